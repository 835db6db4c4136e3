//! Redis: standalone, with a replica, watched by Sentinels, or as a cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::eventually;
use crate::process::{Launch, Server, listens, program, run};

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "redis";

/// The name of the master that Sentinels watch.
pub const MASTER: &str = "main";

const READY: Duration = Duration::from_secs(30);

/// One Redis server.
#[derive(Debug)]
pub struct Redis {
    server: Server,
    password: Option<String>,
    tls: Option<Certificates>,
}

impl Redis {
    /// An empty server without persistence.
    #[must_use]
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with more arguments, as `["--maxmemory", "2mb"]`.
    #[must_use]
    pub fn with(args: &[&str]) -> Self {
        let launch = Launch::new(binary("redis-server"));
        let port = launch.port().to_string();
        let server = launch_base(launch)
            .args(["--port", &port])
            .args(args)
            .start();
        Self {
            server,
            password: None,
            tls: None,
        }
    }

    /// A server whose default user has a password.
    #[must_use]
    pub fn with_password(password: &str) -> Self {
        let mut redis = Self::with(&["--requirepass", password]);
        redis.password = Some(password.to_owned());
        redis
    }

    /// A server that speaks only TLS, with a certificate of its own authority for `localhost` and
    /// 127.0.0.1.
    #[must_use]
    pub fn with_tls() -> Self {
        let tls = Certificates::make();
        let launch = Launch::new(binary("redis-server"));
        let port = launch.port().to_string();
        let server = launch_base(launch)
            .args(["--port", "0", "--tls-port", &port])
            .args(["--tls-auth-clients", "no"])
            .arg("--tls-cert-file")
            .arg(tls.certificate())
            .arg("--tls-key-file")
            .arg(tls.key())
            .arg("--tls-ca-cert-file")
            .arg(tls.authority())
            .start();
        Self {
            server,
            password: None,
            tls: Some(tls),
        }
    }

    /// The process, to be paused, killed and restarted.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// `redis://127.0.0.1:port`, or `rediss://`; without a password.
    #[must_use]
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() {
            "rediss"
        } else {
            "redis"
        };
        format!("{scheme}://127.0.0.1:{}", self.port())
    }

    /// The files of a TLS server.
    ///
    /// # Panics
    /// Where it speaks no TLS.
    #[must_use]
    pub fn certificates(&self) -> &Certificates {
        self.tls.as_ref().expect("a TLS server")
    }

    /// Runs one command and returns its answer as redis-cli prints it, without the last newline.
    /// An answer that is an error is text that begins with its code.
    #[must_use]
    pub fn cli(&self, args: &[&str]) -> String {
        let mut command = cli(self.port());
        if let Some(password) = &self.password {
            command.args(["--no-auth-warning", "-a", password]);
        }
        if let Some(tls) = &self.tls {
            command.arg("--tls").arg("--cacert").arg(tls.authority());
        }
        output(command.args(args))
    }

    /// Makes this server a replica of `master`, and waits until it has its data.
    pub fn follow(&self, master: &Self) {
        self.follow_at(master.port());
    }

    /// The same through a proxy in front of the master, which can make it lag.
    pub fn follow_at(&self, port: u16) {
        let port = port.to_string();
        assert_eq!(self.cli(&["REPLICAOF", "127.0.0.1", &port]), "OK");
        eventually("a replica in step", READY, || {
            self.cli(&["INFO", "replication"])
                .contains("master_link_status:up")
        });
    }

    /// Makes this replica a master, as a failover does.
    pub fn promote(&self) {
        assert_eq!(self.cli(&["REPLICAOF", "NO", "ONE"]), "OK");
    }
}

/// A master and its replica.
#[derive(Debug)]
pub struct Pair {
    /// The master.
    pub master: Redis,
    /// The replica.
    pub replica: Redis,
}

impl Pair {
    /// A pair in step.
    #[must_use]
    pub fn start() -> Self {
        let master = Redis::with(&["--repl-diskless-sync-delay", "0"]);
        let replica = Redis::with(&["--repl-diskless-sync-delay", "0"]);
        replica.follow(&master);
        Self { master, replica }
    }
}

/// A master, a replica, and three Sentinels that watch them as [`MASTER`].
#[derive(Debug)]
pub struct Sentinels {
    /// The servers.
    pub pair: Pair,
    /// The Sentinels.
    pub sentinels: Vec<Server>,
}

impl Sentinels {
    /// A quorum that has found the replica and each other.
    #[must_use]
    pub fn start() -> Self {
        let pair = Pair::start();
        let sentinels: Vec<Server> = (0..3).map(|_| sentinel(pair.master.port())).collect();
        let watch = Self { pair, sentinels };
        eventually("Sentinels that know each other", READY, || {
            watch.sentinels.iter().all(|sentinel| {
                let state = output(cli(sentinel.port()).args(["SENTINEL", "MASTER", MASTER]));
                state.contains("num-slaves\n1") && state.contains("num-other-sentinels\n2")
            })
        });
        watch
    }

    /// `127.0.0.1:p1,127.0.0.1:p2,127.0.0.1:p3`.
    #[must_use]
    pub fn hosts(&self) -> String {
        let hosts: Vec<String> = self
            .sentinels
            .iter()
            .map(|sentinel| sentinel.address().to_string())
            .collect();
        hosts.join(",")
    }

    /// The port that the first Sentinel says the master has.
    #[must_use]
    pub fn master_port(&self) -> u16 {
        master_port(self.sentinels.first().expect("three Sentinels"))
    }

    /// Waits until the first Sentinel names another master than the one at `old`.
    pub fn await_failover(&self, old: u16) {
        eventually("a failover", READY, || self.master_port() != old);
    }

    /// Waits until no Sentinel names the master at `old` any more: they tell each other by and by.
    pub fn await_agreement(&self, old: u16) {
        eventually("Sentinels that know of the failover", READY, || {
            self.sentinels.iter().all(|one| master_port(one) != old)
        });
    }
}

/// The port that a Sentinel says the master has.
fn master_port(asked: &Server) -> u16 {
    let answer = output(cli(asked.port()).args(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]));
    let port = answer.lines().nth(1).expect("an address and a port");
    port.parse().expect("a port")
}

/// Three masters that share the slots of a cluster.
#[derive(Debug)]
pub struct Cluster {
    /// The masters.
    pub nodes: Vec<Redis>,
}

impl Cluster {
    /// A cluster whose nodes all say that it is whole.
    #[must_use]
    pub fn start() -> Self {
        let nodes: Vec<Redis> = (0..3).map(|_| cluster_node()).collect();
        let cluster = Self { nodes };
        let mut create = Command::new(binary_of("redis-cli", "redis-tools"));
        create.args(["--cluster", "create"]);
        for node in &cluster.nodes {
            create.arg(node.address().to_string());
        }
        run(create.arg("--cluster-yes"));
        eventually("a whole cluster", READY, || {
            cluster.nodes.iter().all(|node| {
                let info = node.cli(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
            })
        });
        cluster
    }

    /// `127.0.0.1:p1,127.0.0.1:p2,127.0.0.1:p3`.
    #[must_use]
    pub fn hosts(&self) -> String {
        let hosts: Vec<String> = self
            .nodes
            .iter()
            .map(|node| node.address().to_string())
            .collect();
        hosts.join(",")
    }
}

/// A certificate authority and a server's certificate by it, for `localhost` and 127.0.0.1.
#[derive(Debug)]
pub struct Certificates {
    dir: TempDir,
}

impl Certificates {
    /// New ones, valid for a day.
    #[must_use]
    pub fn make() -> Self {
        let dir = TempDir::with_prefix("fencelock-tls-").expect("a temporary directory");
        let made = Self { dir };
        let openssl = program("tls", "openssl", "openssl", &[]);
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];
        run(Command::new(&openssl)
            .args(["req", "-x509", "-nodes", "-days", "1"])
            .args(key)
            .args(["-subj", "/CN=fencelock test authority", "-keyout"])
            .arg(made.file("ca.key"))
            .arg("-out")
            .arg(made.authority()));
        run(Command::new(&openssl)
            .args(["req", "-x509", "-nodes", "-days", "1"])
            .args(key)
            .args(["-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .arg("-CA")
            .arg(made.authority())
            .arg("-CAkey")
            .arg(made.file("ca.key"))
            .arg("-keyout")
            .arg(made.key())
            .arg("-out")
            .arg(made.certificate()));
        made
    }

    /// The authority's certificate.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.file("ca.crt")
    }

    /// The server's certificate.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.file("server.crt")
    }

    /// The server's key.
    #[must_use]
    pub fn key(&self) -> PathBuf {
        self.file("server.key")
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }
}

fn binary(name: &str) -> PathBuf {
    binary_of(name, name)
}

fn binary_of(name: &str, package: &str) -> PathBuf {
    program(SERVER, name, package, &[])
}

/// What all servers have in common: nothing is saved unless a test asks for it.
fn launch_base(launch: Launch) -> Launch {
    let dir = launch.dir().to_owned();
    launch
        .args(["--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(dir)
        .ready(loaded)
}

/// True where the server answers at all: with its data loaded, or by asking for a password or TLS.
fn loaded(port: u16) -> bool {
    listens(port) && !output(cli(port).arg("PING")).starts_with("LOADING")
}

fn cli(port: u16) -> Command {
    let mut command = Command::new(binary_of("redis-cli", "redis-tools"));
    command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "--raw"]);
    command
}

fn output(command: &mut Command) -> String {
    // Not run(): an answer that is an error is an answer.
    let output = command.output().expect("redis-cli");
    let text = String::from_utf8_lossy(&output.stdout);
    text.strip_suffix('\n').unwrap_or(&text).to_owned()
}

/// One Sentinel, which watches the master at this port. Alone it fails nothing over.
///
/// # Panics
/// Where it does not start.
#[must_use]
pub fn sentinel(master: u16) -> Server {
    let launch = Launch::new(program(SERVER, "redis-sentinel", "redis-sentinel", &[]));
    let config = launch.dir().join("sentinel.conf");
    let text = format!(
        "port {}\nbind 127.0.0.1\ndir {}\n\
         sentinel monitor {MASTER} 127.0.0.1 {master} 2\n\
         sentinel down-after-milliseconds {MASTER} 500\n\
         sentinel failover-timeout {MASTER} 3000\n",
        launch.port(),
        launch.dir().display(),
    );
    std::fs::write(&config, text).expect("a file for the Sentinel");
    launch.arg(config).start()
}

fn cluster_node() -> Redis {
    let launch = Launch::new(binary("redis-server"));
    let port = launch.port().to_string();
    // Held until the server is up; then the bus port is its own.
    let bus = crate::port::Port::free();
    let server = launch_base(launch)
        .args(["--port", &port, "--cluster-enabled", "yes"])
        .args(["--cluster-port", &bus.number().to_string()])
        .args(["--cluster-node-timeout", "2000"])
        .start();
    Redis {
        server,
        password: None,
        tls: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_paused_killed_and_started_again() {
        crate::skip!("redis");
        let mut redis = Redis::start();
        assert_eq!(redis.cli(&["SET", "a", "b"]), "OK");
        redis.server().pause();
        redis.server().resume();
        assert_eq!(redis.cli(&["GET", "a"]), "b");
        redis.server().restart();
        assert_eq!(redis.cli(&["GET", "a"]), "");
        redis.server().stop();
        assert!(!listens(redis.port()));
    }

    #[test]
    fn passwords_and_tls_are_asked_for() {
        crate::skip!("redis");
        let redis = Redis::with_password("secret");
        assert_eq!(redis.cli(&["PING"]), "PONG");
        assert!(output(cli(redis.port()).arg("PING")).starts_with("NOAUTH"));
        let redis = Redis::with_tls();
        assert_eq!(redis.cli(&["PING"]), "PONG");
        assert_ne!(output(cli(redis.port()).arg("PING")), "PONG");
    }

    #[test]
    fn sentinels_fail_over() {
        crate::skip!("redis");
        let mut watch = Sentinels::start();
        let old = watch.pair.master.port();
        assert_eq!(watch.master_port(), old);
        watch.pair.master.server().kill();
        watch.await_failover(old);
        assert_eq!(watch.master_port(), watch.pair.replica.port());
    }

    #[test]
    fn a_cluster_serves_every_slot() {
        crate::skip!("redis");
        let cluster = Cluster::start();
        let answers: Vec<String> = cluster
            .nodes
            .iter()
            .map(|node| node.cli(&["SET", "{x}", "1"]))
            .collect();
        assert_eq!(answers.iter().filter(|a| *a == "OK").count(), 1);
        assert_eq!(answers.iter().filter(|a| a.starts_with("MOVED")).count(), 2);
    }
}
