//! PgBouncer in front of a PostgreSQL server.

use std::fs;
use std::net::SocketAddr;

use crate::postgres::Postgres;
use crate::process::{Launch, Server, program};

/// The name that `FENCELOCK_TEST_SKIP` lists.
pub const SERVER: &str = "pgbouncer";

/// One PgBouncer, which lets the server's superuser in without a password.
#[derive(Debug)]
pub struct PgBouncer {
    server: Server,
}

impl PgBouncer {
    /// A pooler in `mode`, `transaction` or `session`, with this many server connections.
    #[must_use]
    pub fn start(to: &Postgres, mode: &str, pool_size: u32) -> Self {
        let launch = Launch::new(program(SERVER, "pgbouncer", "pgbouncer", &["/usr/sbin"]));
        let (config, users) = (
            launch.dir().join("pgbouncer.ini"),
            launch.dir().join("users.txt"),
        );
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {}\npool_mode = {mode}\n\
             default_pool_size = {pool_size}\nmax_client_conn = 500\n",
            to.port(),
            launch.port(),
            users.display(),
        );
        fs::write(&config, text).expect("a file for the pooler");
        fs::write(&users, "\"postgres\" \"\"\n").expect("a file for the pooler");
        let server = launch.user("postgres").arg(config).start();
        Self { server }
    }

    /// The process, to be paused, killed and restarted.
    pub fn server(&mut self) -> &mut Server {
        &mut self.server
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// The URL of the superuser and the database `postgres`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@{}/postgres", self.address())
    }
}
