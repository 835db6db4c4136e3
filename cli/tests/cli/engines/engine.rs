//! What an engine has to offer to be tested from outside. One is a few lines.

use std::net::SocketAddr;
use std::time::Duration;

use fencelock_testbed::process::Server;

/// A store of its own, on this host.
pub(crate) trait Engine {
    /// How wrong a client's wall clock may be.
    const CLOCK_ERROR: Duration = Duration::from_secs(24 * 3600);

    /// Starts it.
    fn start() -> Self;

    /// Its URL.
    fn url(&self) -> String;

    /// The shortest TTL that it gives.
    fn ttl_min(&self) -> Duration {
        Duration::from_secs(1)
    }
}

/// A store that is a server. What it has acknowledged outlives its process.
pub(crate) trait Served: Engine {
    /// What to write before the host for a user with this password, where there are users.
    const LOGIN: Option<&'static str>;

    fn server(&mut self) -> &mut Server;

    /// The URL of the same store through another address.
    fn url_at(&self, address: SocketAddr) -> String {
        let own = format!("127.0.0.1:{}", self.port());
        let url = self.url();
        assert!(url.contains(&own), "{url} names {own}");
        url.replace(&own, &address.to_string())
    }

    fn port(&self) -> u16;

    /// A TTL that outlasts a kill and a restart.
    const AWAY: &'static str = "20s";

    /// What the last request of a large write holds, where it is more than one.
    const COMMITS: &'static [&'static [u8]] = &[];

    /// Kills it and starts it again, and waits until it answers.
    fn kill_and_restart(&mut self) {
        self.server().restart();
    }
}

/// The file store, in a directory.
pub(crate) struct File(tempfile::TempDir);

impl Engine for File {
    fn start() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn url(&self) -> String {
        format!("file://{}", self.0.path().join("store").display())
    }
}

/// A SQLite database.
#[cfg(feature = "sqlite")]
pub(crate) struct Sqlite(tempfile::TempDir);

#[cfg(feature = "sqlite")]
impl Engine for Sqlite {
    fn start() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn url(&self) -> String {
        format!("sqlite://{}", self.0.path().join("locks.db").display())
    }
}

#[cfg(feature = "redis")]
mod redis {
    use fencelock_testbed::redis::Redis;

    use super::*;

    impl Engine for Redis {
        fn start() -> Self {
            Self::with(&["--appendonly", "yes", "--appendfsync", "always"])
        }

        fn url(&self) -> String {
            self.url()
        }
    }

    impl Served for Redis {
        const LOGIN: Option<&'static str> = Some("user:canary@");

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.port()
        }
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use fencelock_testbed::postgres::Postgres;

    use super::*;

    impl Engine for Postgres {
        fn start() -> Self {
            Self::start()
        }

        fn url(&self) -> String {
            self.url()
        }
    }

    impl Served for Postgres {
        const LOGIN: Option<&'static str> = Some("user:canary@");

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.port()
        }
    }
}

#[cfg(feature = "mysql")]
mod mysql {
    use fencelock_testbed::mysql::Mysql;

    use super::*;

    impl Engine for Mysql {
        fn start() -> Self {
            Self::start()
        }

        fn url(&self) -> String {
            self.url()
        }
    }

    impl Served for Mysql {
        const LOGIN: Option<&'static str> = Some("user:canary@");

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.port()
        }
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use fencelock_testbed::etcd::Etcd;

    use super::*;

    impl Engine for Etcd {
        fn start() -> Self {
            Self::start()
        }

        fn url(&self) -> String {
            self.url()
        }
    }

    impl Served for Etcd {
        const LOGIN: Option<&'static str> = Some("user:canary@");

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.port()
        }

        fn kill_and_restart(&mut self) {
            self.kill_and_restart();
        }
    }
}

#[cfg(feature = "nats")]
mod nats {
    use fencelock_testbed::nats::Nats;

    use super::*;

    impl Engine for Nats {
        fn start() -> Self {
            Self::start()
        }

        fn url(&self) -> String {
            self.url()
        }
    }

    impl Served for Nats {
        const LOGIN: Option<&'static str> = Some("user:canary@");

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.port()
        }
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use fencelock_testbed::s3::S3;

    use super::*;

    /// SeaweedFS: it writes and checks in one step, and keeps what it has. Its keys are in the
    /// environment of every command.
    impl Engine for S3 {
        // Requests are signed with their time, and refused beyond a quarter of an hour.
        const CLOCK_ERROR: Duration = Duration::from_secs(600);

        fn start() -> Self {
            Self::seaweed()
        }

        fn url(&self) -> String {
            self.url("locks")
        }
    }

    impl Served for S3 {
        const LOGIN: Option<&'static str> = None;

        // SeaweedFS takes its time to store again.
        const AWAY: &'static str = "120s";

        // The value is stored by then, and nobody is pointed to it.
        const COMMITS: &'static [&'static [u8]] = &[br#""fencelock":"pointer""#];

        fn server(&mut self) -> &mut Server {
            self.server()
        }

        fn port(&self) -> u16 {
            self.address().port()
        }

        fn kill_and_restart(&mut self) {
            self.kill_and_restart();
        }
    }
}
