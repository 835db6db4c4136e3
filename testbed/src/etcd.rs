//! etcd: one member, or three.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::eventually;
use crate::port::Port;
use crate::process::{Launch, Server, program, run};
use crate::redis::Certificates;

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "etcd";

const READY: Duration = Duration::from_secs(30);

/// What makes leases of a second possible: the shortest is one and a half election timeouts.
const FAST: [&str; 4] = ["--heartbeat-interval", "50", "--election-timeout", "250"];

/// One etcd member.
#[derive(Debug)]
pub struct Etcd {
    server: Server,
    name: String,
    /// How members reach each other; kept, so that nobody else takes the port.
    peer: Port,
    /// All members, as etcd has it: `a=http://…,b=http://…`.
    cluster: String,
    /// How many times a snapshot was restored.
    lives: u32,
    tls: Option<Certificates>,
}

impl Etcd {
    /// An empty cluster of one member, with leases of a second and more.
    #[must_use]
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// The same with more arguments, of which the last of a kind counts.
    #[must_use]
    pub fn with(args: &[&str]) -> Self {
        let args: Vec<&str> = FAST.iter().chain(args).copied().collect();
        let peer = Port::free();
        let cluster = format!("one={}", url(peer.number()));
        let etcd = Self::launch("one", peer, &cluster, &args, None);
        etcd.await_health();
        etcd
    }

    /// A cluster of one member that speaks only TLS to clients, with a certificate of its own
    /// authority for `localhost` and 127.0.0.1, and asks them for one of the same authority.
    #[must_use]
    pub fn with_tls() -> Self {
        let peer = Port::free();
        let cluster = format!("one={}", url(peer.number()));
        let etcd = Self::launch("one", peer, &cluster, &FAST, Some(Certificates::make()));
        etcd.await_health();
        etcd
    }

    fn launch(
        name: &str,
        peer: Port,
        cluster: &str,
        more: &[&str],
        tls: Option<Certificates>,
    ) -> Self {
        let launch = Launch::new(program(SERVER, "etcd", "etcd-server", &[])).ready(|_| true);
        let data = launch.dir().join("data-0").display().to_string();
        let mut args = args(name, launch.port(), &peer, cluster, &data);
        if let Some(tls) = &tls {
            // The last one counts.
            let clients = format!("https://127.0.0.1:{}", launch.port());
            for (option, value) in [
                ("--listen-client-urls", clients.clone()),
                ("--advertise-client-urls", clients),
                ("--cert-file", tls.certificate().display().to_string()),
                ("--key-file", tls.key().display().to_string()),
                ("--trusted-ca-file", tls.authority().display().to_string()),
                ("--client-cert-auth", "true".to_owned()),
            ] {
                args.push(format!("{option}={value}"));
            }
        }
        Self {
            server: launch.args(args).args(more).start(),
            name: name.to_owned(),
            peer,
            cluster: cluster.to_owned(),
            lives: 0,
            tls,
        }
    }

    /// The files of a TLS server; its own certificate is also a client's.
    ///
    /// # Panics
    /// Where it speaks no TLS.
    #[must_use]
    pub fn certificates(&self) -> &Certificates {
        self.tls.as_ref().expect("a TLS server")
    }

    /// The process, to be paused, killed and restarted; see also [`await_health`](Self::await_health).
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    /// Kills the member at once, and starts it again on its data.
    pub fn kill_and_restart(&mut self) {
        self.server.restart();
        self.await_health();
    }

    /// The port for clients.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// `etcd://127.0.0.1:port`, without a password.
    #[must_use]
    pub fn url(&self) -> String {
        format!("etcd://{}", self.address())
    }

    /// Returns once the member has a leader and takes requests.
    pub fn await_health(&self) {
        eventually("a healthy etcd", READY, || self.is_healthy());
    }

    fn is_healthy(&self) -> bool {
        if self.tls.is_some() {
            let health = self.command().args(["endpoint", "health"]).output();
            return health.is_ok_and(|health| health.status.success());
        }
        let answer = || {
            let mut stream = TcpStream::connect(self.address())?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        };
        answer().is_ok_and(|text| text.contains(r#""health":"true""#))
    }

    /// Runs etcdctl and returns what it prints.
    ///
    /// # Panics
    /// Where it fails.
    #[must_use]
    pub fn ctl(&self, args: &[&str]) -> String {
        run(self.command().args(args))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(ctl());
        command.env("ETCDCTL_API", "3").arg("--endpoints");
        match &self.tls {
            None => command.arg(self.address().to_string()),
            Some(tls) => command
                .arg(format!("https://{}", self.address()))
                .arg("--cacert")
                .arg(tls.authority())
                .arg("--cert")
                .arg(tls.certificate())
                .arg("--key")
                .arg(tls.key()),
        };
        command
    }

    /// True where this member leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        let status = self.ctl(&["endpoint", "status", "-w", "fields"]);
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.rsplit_once(" : "))
                .map(|(_, value)| value.to_owned())
        };
        let own = field("\"MemberID\"");
        own.is_some() && own == field("\"Leader\"")
    }

    /// Asks for passwords from here on: `root` with this one.
    pub fn protect(&self, password: &str) {
        for args in [
            &["user", "add", &format!("root:{password}")][..],
            &["user", "grant-role", "root", "root"][..],
            &["auth", "enable"][..],
        ] {
            let _ = self.ctl(args);
        }
    }

    /// Asks for passwords from here on, and adds a user with this one that may read and write what
    /// begins with `prefix`.
    pub fn protect_for(&self, user: &str, password: &str, prefix: &str) {
        for args in [
            &["role", "add", user][..],
            &[
                "role",
                "grant-permission",
                user,
                "--prefix=true",
                "readwrite",
                prefix,
            ],
            &["user", "add", &format!("{user}:{password}")],
            &["user", "grant-role", user, user],
        ] {
            let _ = self.ctl(args);
        }
        self.protect(password);
    }

    /// Writes all data to a file in the member's directory.
    #[must_use]
    pub fn snapshot(&self) -> PathBuf {
        let file = self.server.dir().join("snapshot.db");
        let _ = run(self.command().args(["snapshot", "save"]).arg(&file));
        file
    }

    /// Ends the cluster, and starts it again as it was when the snapshot was taken.
    pub fn restore(&mut self, snapshot: &std::path::Path) {
        self.server.kill();
        self.lives += 1;
        let data = self.server.dir().join(format!("data-{}", self.lives));
        let mut command = Command::new(ctl());
        command
            .env("ETCDCTL_API", "3")
            .args(["snapshot", "restore"])
            .arg(snapshot)
            .args(["--name", &self.name])
            .args(["--initial-cluster", &self.cluster])
            .args(["--initial-advertise-peer-urls", &url(self.peer.number())])
            .arg("--data-dir")
            .arg(&data);
        let _ = run(&mut command);
        let data = data.display().to_string();
        let args = args(&self.name, self.port(), &self.peer, &self.cluster, &data);
        self.server
            .set_args(args.iter().map(String::as_str).chain(FAST));
        self.server.restart();
        self.await_health();
    }
}

/// Three members that know each other.
#[derive(Debug)]
pub struct Cluster {
    /// The members.
    pub members: Vec<Etcd>,
}

impl Cluster {
    /// An empty cluster.
    #[must_use]
    pub fn start() -> Self {
        let named: Vec<(&str, Port)> = ["one", "two", "three"]
            .into_iter()
            .map(|name| (name, Port::free()))
            .collect();
        let cluster: Vec<String> = named
            .iter()
            .map(|(name, peer)| format!("{name}={}", url(peer.number())))
            .collect();
        let cluster = cluster.join(",");
        let members: Vec<Etcd> = named
            .into_iter()
            .map(|(name, peer)| Etcd::launch(name, peer, &cluster, &FAST, None))
            .collect();
        for member in &members {
            member.await_health();
        }
        Self { members }
    }

    /// `etcd://127.0.0.1:port,127.0.0.1:port,127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses: Vec<String> = self
            .members
            .iter()
            .map(|member| member.address().to_string())
            .collect();
        format!("etcd://{}", addresses.join(","))
    }

    /// The member that leads.
    ///
    /// # Panics
    /// Where there is none in time.
    pub fn leader(&mut self) -> &mut Etcd {
        let mut found = None;
        eventually("a leader", READY, || {
            found = self.members.iter().position(Etcd::leads);
            found.is_some()
        });
        let found = found.expect("a leader was found");
        &mut self.members[found]
    }
}

fn ctl() -> PathBuf {
    program(SERVER, "etcdctl", "etcd-client", &[])
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

fn args(name: &str, port: u16, peer: &Port, cluster: &str, data: &str) -> Vec<String> {
    let (clients, peers) = (url(port), url(peer.number()));
    [
        ("--name", name),
        ("--data-dir", data),
        ("--listen-client-urls", &clients),
        ("--advertise-client-urls", &clients),
        ("--listen-peer-urls", &peers),
        ("--initial-advertise-peer-urls", &peers),
        ("--initial-cluster", cluster),
        ("--initial-cluster-state", "new"),
        ("--log-level", "warn"),
        ("--logger", "zap"),
    ]
    .into_iter()
    .flat_map(|(option, value)| [option.to_owned(), value.to_owned()])
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_leader_is_replaced() {
        crate::skip!("etcd");
        let mut cluster = Cluster::start();
        let leader = cluster.leader();
        let port = leader.port();
        leader.server().kill();
        cluster.members.retain(|member| member.port() != port);
        assert_ne!(cluster.leader().port(), port);
    }

    #[test]
    fn a_restored_snapshot_is_the_data_of_its_time() {
        crate::skip!("etcd");
        let mut etcd = Etcd::start();
        let _ = etcd.ctl(&["put", "a", "before"]);
        let snapshot = etcd.snapshot();
        let _ = etcd.ctl(&["put", "a", "after"]);
        etcd.restore(&snapshot);
        assert_eq!(
            etcd.ctl(&["get", "a", "--print-value-only"]).trim(),
            "before"
        );
    }
}
