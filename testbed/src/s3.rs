//! Object stores that speak S3: moto and SeaweedFS.
//!
//! Both honour conditional writes; moto looks and then writes, so that under load two racing writers can
//! win, and SeaweedFS is exact. moto takes any credentials; SeaweedFS knows [`KEY`] with
//! [`SECRET`], refuses others, and lets a request without any do everything.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::process::Signal;

use crate::port::Port;
use crate::process::{Launch, Server, set_up};

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "s3";

/// The key id that SeaweedFS knows.
pub const KEY: &str = "fencelock-test-key";

/// Its secret.
pub const SECRET: &str = "fencelock-test-secret-hunter2";

const READY: Duration = Duration::from_secs(30);

const IDENTITIES: &str = r#"{"identities":[
{"name":"anonymous","actions":["Admin","Read","Write","List","Tagging"]},
{"name":"test","credentials":[{"accessKey":"fencelock-test-key","secretKey":"fencelock-test-secret-hunter2"}],
 "actions":["Admin","Read","Write","List","Tagging"]}]}"#;

/// One server with one bucket, `bucket`.
#[derive(Debug)]
pub struct S3 {
    server: Server,
    /// Kept, so that nobody else takes the ports.
    _ports: Vec<Port>,
}

impl S3 {
    /// moto: everything in memory, gone with a restart.
    #[must_use]
    pub fn moto() -> Self {
        let launch = Launch::new(set_up(SERVER, "moto_server"));
        let port = launch.port().to_string();
        let server = launch
            .args(["-H", "127.0.0.1", "-p", &port])
            .stop_signal(Signal::KILL)
            .ready(|port| request(port, "GET / HTTP/1.0\r\n").is_some())
            .start();
        Self::with_bucket(server, Vec::new())
    }

    /// SeaweedFS: a cluster of one process, which keeps its objects over a restart.
    #[must_use]
    pub fn seaweed() -> Self {
        let launch = Launch::new(set_up(SERVER, "weed"));
        let dir = launch.dir().display().to_string();
        let config = launch.dir().join("identities.json");
        std::fs::write(&config, IDENTITIES).expect("a configuration");
        let mut args: Vec<String> = [
            "server",
            "-s3",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-volume.max=20",
            "-master.volumeSizeLimitMB=64",
            "-volume.preStopSeconds=0",
            // A mistyped bucket is to fail.
            "-s3.autoCreateBucket=false",
        ]
        .map(str::to_owned)
        .into();
        args.push(format!("-dir={dir}"));
        args.push(format!("-s3.config={}", config.display()));
        args.push(format!("-s3.localSocket={dir}/s3.sock"));
        args.push(format!("-filer.localSocket={dir}/filer.sock"));
        args.push(format!("-s3.port={}", launch.port()));
        // Nothing listens on a well-known port, not even its catalogues.
        let names = [
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "s3.port.grpc",
        ];
        let ports: Vec<Port> = names.iter().map(|_| Port::free()).collect();
        for (name, port) in names.iter().zip(&ports) {
            args.push(format!("-{name}={}", port.number()));
        }
        args.extend(["-s3.port.iceberg=0", "-s3.port.lance=0"].map(str::to_owned));
        let server = launch
            .args(args)
            .stop_signal(Signal::KILL)
            // It listens before it serves, and takes buckets before it takes objects.
            .ready(|port| {
                let bucket = "PUT /ready HTTP/1.0\r\nContent-Length: 0\r\n";
                request(port, bucket).is_some_and(created)
                    && write_object(port, "ready").is_some_and(created)
            })
            .start();
        Self::with_bucket(server, ports)
    }

    fn with_bucket(server: Server, ports: Vec<Port>) -> Self {
        let s3 = Self {
            server,
            _ports: ports,
        };
        s3.create_bucket("bucket");
        s3
    }

    /// Makes another bucket, with an object `warm`.
    ///
    /// # Panics
    /// Where the server does not make it.
    pub fn create_bucket(&self, name: &str) {
        let answer = request(
            self.server.port(),
            &format!("PUT /{name} HTTP/1.0\r\nContent-Length: 0\r\n"),
        );
        assert!(
            answer.as_deref().is_some_and(|a| created(a.to_owned())),
            "{name}: {answer:?}"
        );
        self.await_objects(name);
    }

    /// Kills the server, starts it again, and returns once it takes objects.
    pub fn kill_and_restart(&mut self) {
        self.server.restart();
        self.await_objects("bucket");
    }

    /// SeaweedFS answers before it can store: the first object of a bucket makes it lay out its
    /// volumes, and after a start it has to find them again, which takes seconds.
    fn await_objects(&self, bucket: &str) {
        let head = format!("PUT /{bucket}/warm HTTP/1.0\r\nContent-Length: 4\r\n");
        crate::eventually("a bucket that takes objects", READY, || {
            let answer = request_with(self.server.port(), &head, "warm");
            answer.is_some_and(|answer| answer.get(9..12) == Some("200"))
        });
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// `s3://bucket/prefix?endpoint=http://127.0.0.1:port`
    #[must_use]
    pub fn url(&self, prefix: &str) -> String {
        url(self.address(), prefix)
    }

    /// What the server lists below a prefix of the bucket `bucket`: the keys, one a line.
    ///
    /// # Panics
    /// Where it does not list.
    #[must_use]
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let head = format!("GET /bucket?list-type=2&prefix={prefix} HTTP/1.0\r\n");
        let answer = request(self.server.port(), &head).unwrap_or_default();
        assert!(answer.get(9..12) == Some("200"), "no list: {answer:?}");
        let keys = answer.split("<Key>").skip(1);
        keys.filter_map(|after| Some(after.split_once("</Key>")?.0.to_owned()))
            .collect()
    }

    /// The process: to pause, to kill, to start again.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }
}

/// The URL of a prefix of the bucket `bucket` behind an address.
#[must_use]
pub fn url(address: SocketAddr, prefix: &str) -> String {
    format!("s3://bucket/{prefix}?endpoint=http://{address}")
}

fn created(answer: String) -> bool {
    // Again is no mistake: a server that was started anew still has it.
    ["200", "409"]
        .iter()
        .any(|status| answer.get(9..12) == Some(status))
}

/// The answer to a request without credentials.
fn request(port: u16, head: &str) -> Option<String> {
    request_with(port, head, "")
}

/// Writes an object named `ready` to a bucket.
fn write_object(port: u16, bucket: &str) -> Option<String> {
    let head = format!("PUT /{bucket}/ready HTTP/1.0\r\nContent-Length: 5\r\n");
    request_with(port, &head, "ready")
}

fn request_with(port: u16, head: &str, body: &str) -> Option<String> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .ok()?;
    write!(
        stream,
        "{head}Host: {address}\r\nConnection: close\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    // What came before a reset counts.
    let _ = stream.read_to_string(&mut answer);
    (!answer.is_empty()).then_some(answer)
}
