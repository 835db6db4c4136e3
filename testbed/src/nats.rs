//! NATS with JetStream: one server, or three.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::eventually;
use crate::port::Port;
use crate::process::{Launch, Server, set_up};
use crate::redis::Certificates;

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "nats";

const READY: Duration = Duration::from_secs(30);

/// One NATS server.
#[derive(Debug)]
pub struct Nats {
    server: Server,
    name: String,
    /// How servers reach each other; kept, so that nobody else takes the port.
    _route: Option<Port>,
    /// What [`ask`](Self::ask) logs in with, as members of a JSON object.
    login: &'static str,
    tls: Option<Certificates>,
}

impl Nats {
    /// A server with JetStream.
    #[must_use]
    pub fn start() -> Self {
        Self::with("")
    }

    /// The same with more lines in its configuration.
    #[must_use]
    pub fn with(more: &str) -> Self {
        let launch = Launch::new(set_up(SERVER, "nats-server"));
        let jetstream = jetstream(&launch);
        Self::launch(launch, "one", &format!("{jetstream}{more}"), None)
    }

    /// A server without JetStream.
    #[must_use]
    pub fn without_jetstream() -> Self {
        let launch = Launch::new(set_up(SERVER, "nats-server"));
        Self::launch(launch, "one", "", None)
    }

    /// A server that asks for a password: `admin` with `admin` may do everything; the user that is
    /// named here only what `permissions` say, in the words of the configuration, and everything
    /// where they are empty.
    #[must_use]
    pub fn with_user(user: &str, password: &str, permissions: &str) -> Self {
        let permissions = match permissions {
            "" => String::new(),
            some => format!(", permissions: {{ {some} }}"),
        };
        let mut nats = Self::with(&format!(
            "authorization {{ users = [ {{ user: admin, password: admin }}, {{ user: {user:?}, password: {password:?}{permissions} }} ] }}\n"
        ));
        nats.login = r#","user":"admin","pass":"admin""#;
        nats
    }

    /// A server that speaks only TLS, with a certificate of its own authority for `localhost` and
    /// 127.0.0.1, and asks clients for one of the same authority.
    #[must_use]
    pub fn with_tls() -> Self {
        let launch = Launch::new(set_up(SERVER, "nats-server"));
        let tls = Certificates::make();
        let lines = format!(
            "{}tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}\n",
            jetstream(&launch),
            tls.certificate(),
            tls.key(),
            tls.authority(),
        );
        Self::launch(launch, "one", &lines, Some(tls))
    }

    fn launch(launch: Launch, name: &str, more: &str, tls: Option<Certificates>) -> Self {
        let file = launch.dir().join("nats.conf");
        let port = launch.port();
        let lines = format!("listen: \"127.0.0.1:{port}\"\nserver_name: {name}\n{more}");
        std::fs::write(&file, lines).expect("a configuration");
        Self {
            server: launch.arg("-c").arg(file).start(),
            name: name.to_owned(),
            _route: None,
            login: "",
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

    /// The process, to be paused, killed and restarted.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    /// Pauses the server, and returns once all its threads stand still: the signal alone leaves them a
    /// moment in which they answer.
    pub fn pause(&self) {
        self.server.pause();
        let tasks = format!("/proc/{}/task", self.server.pid());
        eventually("all threads stopped", READY, || {
            let tasks = std::fs::read_dir(&tasks).expect("a running server");
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat"));
                // The name before it is in parentheses and may hold anything.
                stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|s| s.starts_with(" T")))
            })
        });
    }

    /// Kills the server at once, and starts it again on its data.
    pub fn kill_and_restart(&mut self) {
        self.server.restart();
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

    /// `nats://127.0.0.1:port`, without a password.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// Asks at a subject and returns the answer's body; a server that says that nobody listens
    /// there answers with nothing.
    ///
    /// # Panics
    /// Where there is no answer in time.
    #[must_use]
    pub fn ask(&self, subject: &str, body: &str) -> String {
        self.try_ask(subject, "", body, Duration::from_secs(10))
            .unwrap_or_else(|e| panic!("no answer to {subject}: {e}"))
    }

    /// Publishes with these header lines, each with its `\r\n`, and returns the answer's body.
    ///
    /// # Panics
    /// Where there is no answer in time.
    #[must_use]
    pub fn publish(&self, subject: &str, headers: &str, body: &str) -> String {
        self.try_ask(subject, headers, body, Duration::from_secs(10))
            .unwrap_or_else(|e| panic!("no answer to {subject}: {e}"))
    }

    fn try_ask(
        &self,
        subject: &str,
        headers: &str,
        body: &str,
        limit: Duration,
    ) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.address())?;
        stream.set_read_timeout(Some(limit))?;
        let head = format!("NATS/1.0\r\n{headers}\r\n");
        let (head_len, all_len) = (head.len(), head.len() + body.len());
        let login = self.login;
        stream.write_all(
            format!(
                "CONNECT {{\"verbose\":false,\"headers\":true,\"no_responders\":true{login}}}\r\n\
                 SUB inbox.testbed 1\r\n\
                 HPUB {subject} inbox.testbed {head_len} {all_len}\r\n{head}{body}\r\n"
            )
            .as_bytes(),
        )?;
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.starts_with("-ERR") {
                return Err(std::io::Error::other(line));
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words.get(at).and_then(|n| n.parse::<usize>().ok());
            let (head_len, all_len) = match words.first() {
                Some(&"PING") => {
                    stream.write_all(b"PONG\r\n")?;
                    continue;
                }
                Some(&"MSG") => (Some(0), number(words.len() - 1)),
                Some(&"HMSG") => (number(words.len() - 2), number(words.len() - 1)),
                _ => continue,
            };
            let (Some(head_len), Some(all_len)) = (head_len, all_len) else {
                return Err(std::io::Error::other(line));
            };
            let mut message = vec![0; all_len];
            reader.read_exact(&mut message)?;
            return Ok(String::from_utf8_lossy(&message[head_len..]).into_owned());
        }
    }

    /// The name of the server that leads a bucket, where there is one.
    #[must_use]
    fn leader_of(&self, bucket: &str) -> Option<String> {
        let subject = format!("$JS.API.STREAM.INFO.KV_{bucket}");
        let info = self
            .try_ask(&subject, "", "", Duration::from_secs(1))
            .ok()?;
        let (_, rest) = info.split_once("\"leader\":\"")?;
        Some(rest.split('"').next()?.to_owned())
    }
}

/// Three servers that know each other.
#[derive(Debug)]
pub struct Cluster {
    /// The servers.
    pub servers: Vec<Nats>,
}

impl Cluster {
    /// A cluster that has agreed on who leads it.
    #[must_use]
    pub fn start() -> Self {
        let routes: Vec<Port> = (0..3).map(|_| Port::free()).collect();
        let urls: Vec<String> = routes
            .iter()
            .map(|route| format!("nats://127.0.0.1:{}", route.number()))
            .collect();
        let urls = urls.join(", ");
        let servers: Vec<Nats> = routes
            .into_iter()
            .enumerate()
            .map(|(at, route)| {
                let launch = Launch::new(set_up(SERVER, "nats-server"));
                let lines = format!(
                    "{}cluster {{ name: lab, listen: \"127.0.0.1:{}\", routes: [{urls}] }}\n",
                    jetstream(&launch),
                    route.number(),
                );
                let mut nats = Nats::launch(launch, &format!("n{at}"), &lines, None);
                nats._route = Some(route);
                nats
            })
            .collect();
        for server in &servers {
            eventually("a JetStream cluster", READY, || {
                let limit = Duration::from_millis(500);
                let answer = server.try_ask("$JS.API.INFO", "", "", limit);
                answer.is_ok_and(|answer| answer.contains("\"streams\""))
            });
        }
        Self { servers }
    }

    /// `nats://127.0.0.1:port,127.0.0.1:port,127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses: Vec<String> = self
            .servers
            .iter()
            .map(|server| server.address().to_string())
            .collect();
        format!("nats://{}", addresses.join(","))
    }

    /// The server that leads a bucket.
    ///
    /// # Panics
    /// Where there is none in time.
    pub fn leader(&mut self, bucket: &str) -> &mut Nats {
        let mut found = None;
        eventually("a leader", READY, || {
            found = self.servers.iter().position(|server| {
                server.leader_of(bucket).as_deref() == Some(server.name.as_str())
            });
            found.is_some()
        });
        let found = found.expect("a leader was found");
        &mut self.servers[found]
    }
}

fn jetstream(launch: &Launch) -> String {
    let dir = launch.dir().join("jetstream");
    format!("jetstream {{ store_dir: {dir:?} }}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_server_has_its_data_again() {
        crate::skip!("nats");
        let mut nats = Nats::start();
        let made = nats.ask(
            "$JS.API.STREAM.CREATE.KV_a",
            r#"{"name":"KV_a","subjects":["$KV.a.>"],"storage":"file"}"#,
        );
        assert!(made.contains("did_create"), "{made}");
        let acknowledged = nats.publish("$KV.a.x", "", "data");
        assert!(acknowledged.contains(r#""seq":1"#), "{acknowledged}");
        nats.kill_and_restart();
        let read = nats.ask(
            "$JS.API.STREAM.MSG.GET.KV_a",
            r#"{"last_by_subj":"$KV.a.x"}"#,
        );
        assert!(read.contains(r#""seq":1"#), "{read}");
    }
}
