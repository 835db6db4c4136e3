//! MySQL by MariaDB: a server, with TLS or without.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::process::{Launch, Server, copy_dir, program, run};
use crate::redis::Certificates;

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "mysql";

/// The user that the server runs as where the test is root, which it refuses.
const USER: &str = "mysql";

/// What the template and its copies have to agree in.
const LOG_SIZE: &str = "--innodb-log-file-size=48M";

/// What a server keeps of what it acknowledged: all, over a power loss.
pub const DURABLE: [&str; 2] = ["innodb-flush-log-at-trx-commit=1", "sync-binlog=1"];

/// One MariaDB server with a database `test`, whose user `root` needs no password.
#[derive(Debug)]
pub struct Mysql {
    server: Server,
}

impl Mysql {
    /// An empty server that is durable.
    #[must_use]
    pub fn start() -> Self {
        Self::with(&DURABLE)
    }

    /// A server with settings, as `["sync-binlog=1"]`.
    #[must_use]
    pub fn with(settings: &[&str]) -> Self {
        let launch = Launch::new(binary("mariadbd"));
        copy_dir(&template(), &launch.dir().join("data"));
        Self::launch(launch, settings)
    }

    /// A server that is used by tests which do not pull its plug: it waits for no disk.
    #[must_use]
    pub fn fast() -> Self {
        Self::with(&["innodb-flush-log-at-trx-commit=2"])
    }

    /// A server that also speaks TLS, with a certificate for `localhost` and 127.0.0.1, and the
    /// file of the authority that signed it.
    #[must_use]
    pub fn with_tls(settings: &[&str]) -> (Self, Certificates) {
        let tls = Certificates::make();
        let launch = Launch::new(binary("mariadbd"));
        copy_dir(&template(), &launch.dir().join("data"));
        for (from, to) in [(tls.certificate(), "server.crt"), (tls.key(), "server.key")] {
            fs::copy(from, launch.dir().join(to)).expect("a file for the server");
        }
        let file = |name: &str| launch.dir().join(name).display().to_string();
        let certificate = format!("ssl-cert={}", file("server.crt"));
        let key = format!("ssl-key={}", file("server.key"));
        let mut all = vec![certificate.as_str(), key.as_str()];
        all.extend(settings);
        (Self::launch(launch, &all), tls)
    }

    fn launch(launch: Launch, settings: &[&str]) -> Self {
        let mut launch = launch.user(USER);
        let (dir, port) = (launch.dir().to_owned(), launch.port());
        launch = launch
            .arg("--no-defaults")
            .arg(format!("--port={port}"))
            .arg("--bind-address=127.0.0.1")
            .arg(format!("--socket={}", dir.join("socket").display()))
            .arg(format!("--pid-file={}", dir.join("pid").display()))
            .arg(format!("--datadir={}", dir.join("data").display()))
            // A server that starts removes the temporary tables that it finds, whosever they are.
            .arg(format!("--tmpdir={}", dir.display()))
            .arg(LOG_SIZE)
            .args(["--innodb-buffer-pool-size=16M", "--skip-name-resolve"]);
        for setting in settings {
            launch = launch.arg(format!("--{setting}"));
        }
        let server = launch.ready(|port| query(port, "SELECT 1", &[]).is_ok());
        Self {
            server: server.start(),
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

    /// The path of its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.server.dir().join("socket")
    }

    /// The URL of the user `root` and the database `test`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/test", self.port())
    }

    /// What the server has logged.
    #[must_use]
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// Runs SQL with the command line client as `root` and returns its output, columns separated by
    /// tabs and without headers.
    ///
    /// # Panics
    /// Where it fails.
    #[must_use]
    pub fn sql(&self, sql: &str) -> String {
        match query(self.port(), sql, &[]) {
            Ok(output) => output,
            Err(error) => panic!("{sql}: {error}"),
        }
    }

    /// The same with more arguments of the client; the error is what it prints.
    ///
    /// # Errors
    /// Where the SQL fails.
    pub fn try_sql(&self, sql: &str, arguments: &[&str]) -> Result<String, String> {
        query(self.port(), sql, arguments)
    }

    /// Makes a user with a password.
    pub fn add_user(&self, user: &str, password: &str) {
        let _ = self.sql(&format!(
            "CREATE USER '{user}'@'%' IDENTIFIED BY '{password}'"
        ));
    }
}

/// A directory as the installation leaves it, made once and copied from then on.
fn template() -> PathBuf {
    let version = run(Command::new(binary("mariadbd")).args(["--no-defaults", "--version"]));
    let version: String = version
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
        .expect("a version")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    let user = rustix::process::geteuid().as_raw();
    let name = format!("fencelock-testbed-mysql-{version}-{user}");
    let dir = std::env::temp_dir().join(&name);
    let lock = File::create(std::env::temp_dir().join(name + ".lock")).expect("a lock file");
    lock.lock().expect("the lock of the template");
    if !dir.exists() {
        let launch = Launch::new(binary("mariadbd")).user(USER);
        let made = launch.dir().join("data");
        run(launch
            .command(program(
                SERVER,
                "mariadb-install-db",
                "mariadb-server",
                &["/usr/bin"],
            ))
            .args([
                "--no-defaults",
                "--auth-root-authentication-method=normal",
                LOG_SIZE,
            ])
            .arg(format!("--datadir={}", made.display())));
        let test = made.join("test");
        if !test.exists() {
            run(launch.command("mkdir").arg(&test));
        }
        fs::rename(&made, &dir).expect("a directory on the same file system");
    }
    dir
}

fn query(port: u16, sql: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program(SERVER, "mariadb", "mariadb-client", &[]))
        .args(["--no-defaults", "--protocol=tcp", "--host=127.0.0.1"])
        .arg(format!("--port={port}"))
        .args(["--user=root", "--batch", "--skip-column-names", "--raw"])
        .args(["--default-character-set=utf8mb4", "--database=test"])
        .args(arguments)
        .args(["-e", sql])
        .stdin(Stdio::null())
        .output()
        .expect("the client starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

/// Debian keeps servers outside of a user's path.
fn binary(name: &str) -> PathBuf {
    program(SERVER, name, "mariadb-server", &["/usr/sbin"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_committed_survives_a_kill() {
        crate::skip!("mysql");
        let mut mysql = Mysql::start();
        let _ = mysql.sql("CREATE TABLE t ENGINE=InnoDB AS SELECT 7 AS a");
        mysql.server().kill();
        mysql.server().restart();
        assert_eq!(mysql.sql("SELECT a FROM t"), "7");
        mysql.server().stop();
    }
}
