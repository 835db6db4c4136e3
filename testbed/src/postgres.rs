//! PostgreSQL: a server, and a standby of it.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::eventually;
use crate::process::{Launch, Server, copy_dir, program, run};
use crate::redis::Certificates;

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "postgres";

/// The user that the server runs as where the test is root, which PostgreSQL refuses.
const USER: &str = "postgres";

const READY: Duration = Duration::from_secs(30);

/// One PostgreSQL server, whose superuser `postgres` needs no password.
#[derive(Debug)]
pub struct Postgres {
    server: Server,
}

impl Postgres {
    /// An empty server with the settings of a new installation, fsync included.
    #[must_use]
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with settings, as `["fsync=off"]`.
    #[must_use]
    pub fn with(settings: &[&str]) -> Self {
        let launch = Launch::new(binary("postgres"));
        copy_dir(&template(), &launch.dir().join("data"));
        Self::launch(launch, settings)
    }

    /// A server that is used by tests which do not pull its plug: it waits for no disk.
    #[must_use]
    pub fn fast() -> Self {
        Self::with(&["fsync=off"])
    }

    /// A server that also speaks TLS, with a certificate for `localhost` and 127.0.0.1, and the
    /// file of the authority that signed it.
    #[must_use]
    pub fn with_tls(settings: &[&str]) -> (Self, Certificates) {
        let tls = Certificates::make();
        let mut launch = Launch::new(binary("postgres"));
        let data = launch.dir().join("data");
        copy_dir(&template(), &data);
        for (from, to) in [(tls.certificate(), "server.crt"), (tls.key(), "server.key")] {
            fs::copy(from, data.join(to)).expect("a file for the server");
        }
        // PostgreSQL refuses a key that others may read.
        run(Command::new("chmod")
            .arg("0600")
            .arg(data.join("server.key")));
        launch = launch.args(["-c", "ssl=on"]);
        (Self::launch(launch, settings), tls)
    }

    /// A hot standby that follows `primary`.
    #[must_use]
    pub fn standby_of(primary: &Self, settings: &[&str]) -> Self {
        let launch = Launch::new(binary("postgres")).user(USER);
        let data = launch.dir().join("data");
        run(launch
            .command(binary("pg_basebackup"))
            .args(["-h", "127.0.0.1", "-U", "postgres", "-R", "--no-sync"])
            .args(["-c", "fast", "-p", &primary.port().to_string()])
            .arg("-D")
            .arg(&data));
        Self::launch(launch, settings)
    }

    fn launch(launch: Launch, settings: &[&str]) -> Self {
        let mut launch = launch.user(USER).stop_signal(Signal::INT);
        let (dir, port) = (launch.dir().to_owned(), launch.port().to_string());
        launch = launch
            .args(["-p", &port, "-c", "listen_addresses=127.0.0.1"])
            .args(["-c", "shared_buffers=16MB"])
            .arg("-c")
            .arg(format!("unix_socket_directories={}", dir.display()))
            .arg("-D")
            .arg(dir.join("data"));
        for setting in settings {
            launch = launch.args(["-c", setting]);
        }
        let server = launch.ready(is_ready).start();
        Self { server }
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

    /// The URL of the superuser and the database `postgres`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port())
    }

    /// What the server has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// Runs SQL with psql as the superuser and returns its output, unaligned and without headers.
    ///
    /// # Panics
    /// Where it fails.
    #[must_use]
    pub fn psql(&self, sql: &str) -> String {
        match psql(self.port(), sql, &[]) {
            Ok(output) => output,
            Err(error) => panic!("{sql}: {error}"),
        }
    }

    /// Runs SQL with psql and these variables in its environment; the error is what psql prints.
    ///
    /// # Errors
    /// Where the SQL fails.
    pub fn try_psql(&self, sql: &str, env: &[(&str, &str)]) -> Result<String, String> {
        psql(self.port(), sql, env)
    }

    /// Makes a user with a password that is asked for.
    pub fn add_user(&self, user: &str, password: &str) {
        let hba = self.server.dir().join("data/pg_hba.conf");
        let old = fs::read_to_string(&hba).expect("pg_hba.conf");
        let line = format!("host all {user} 127.0.0.1/32 scram-sha-256\n");
        fs::write(&hba, line + &old).expect("pg_hba.conf");
        let _ = self.psql(&format!(
            "CREATE ROLE {user} LOGIN PASSWORD '{password}'; SELECT pg_reload_conf()"
        ));
        eventually("a password is asked for", READY, || {
            let user = ("PGUSER", user);
            psql(self.port(), "SELECT 1", &[user, ("PGPASSWORD", "wrong")]).is_err()
        });
    }

    /// Makes a standby a primary.
    pub fn promote(&self) {
        let _ = self.psql("SELECT pg_promote()");
    }
}

/// A directory as initdb leaves it, made once and copied from then on.
fn template() -> PathBuf {
    let version = run(Command::new(binary("postgres")).arg("--version"));
    let version: String = version
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let user = rustix::process::geteuid().as_raw();
    let name = format!("fencelock-testbed-{}-{user}", version.trim_matches('-'));
    let dir = std::env::temp_dir().join(&name);
    let lock = File::create(std::env::temp_dir().join(name + ".lock")).expect("a lock file");
    lock.lock().expect("the lock of the template");
    if !dir.exists() {
        let launch = Launch::new(binary("initdb")).user(USER);
        let made = launch.dir().join("data");
        run(launch
            .command(binary("initdb"))
            .args(["-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8"])
            .args(["--locale", "C", "-D"])
            .arg(&made));
        fs::rename(&made, &dir).expect("a directory on the same file system");
    }
    dir
}

fn is_ready(port: u16) -> bool {
    Command::new(binary("pg_isready"))
        .args(["-q", "-h", "127.0.0.1", "-p", &port.to_string()])
        .stdin(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn psql(port: u16, sql: &str, env: &[(&str, &str)]) -> Result<String, String> {
    let mut command = Command::new(binary("psql"));
    if !env.iter().any(|(key, _)| *key == "PGUSER") {
        command.args(["-U", "postgres"]);
    }
    let output = command
        .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"])
        .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-d", "postgres"])
        .args(["-c", sql])
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("psql starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

/// Debian keeps the server's programs in a directory of each version.
fn binary(name: &str) -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut dirs: Vec<String> = versions
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .filter(|dir| Path::is_dir(dir))
        .map(|dir| dir.display().to_string())
        .collect();
    dirs.sort();
    dirs.reverse();
    let dirs: Vec<&str> = dirs.iter().map(String::as_str).collect();
    program(SERVER, name, "postgresql", &dirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_committed_survives_a_kill() {
        crate::skip!("postgres");
        let mut postgres = Postgres::start();
        let _ = postgres.psql("CREATE TABLE t AS SELECT 7 AS a");
        postgres.server().kill();
        postgres.server().restart();
        assert_eq!(postgres.psql("SELECT a FROM t"), "7");
        postgres.server().stop();
    }

    #[test]
    fn a_standby_follows_and_takes_no_writes() {
        crate::skip!("postgres");
        let primary = Postgres::fast();
        let standby = Postgres::standby_of(&primary, &["fsync=off"]);
        let _ = primary.psql("CREATE TABLE t AS SELECT 7 AS a");
        eventually("the table at the standby", READY, || {
            standby.try_psql("SELECT a FROM t", &[]) == Ok("7".to_owned())
        });
        let refused = standby.try_psql("CREATE TABLE u ()", &[]).unwrap_err();
        assert!(refused.contains("read-only"), "{refused}");
    }
}
