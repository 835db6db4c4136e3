//! Connections of our own: how one is made, lent to one request at a time, and kept for the next.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mysql_async::prelude::Queryable as _;
use mysql_async::{Conn, Opts, OptsBuilder, Pool};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::connect_error;
use crate::clock::{Clock, Tick};
use crate::error::{Error, Result};

/// How long it may take to get a connection. With the request that follows, it stays below what the
/// layers above wait for one request.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// A connection that nobody used for so long, or since another one broke, is asked first whether it is
/// still there: a request that fails on a dead one is of unknown outcome, and that would be news of no
/// worth.
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// How long the answer to that question may take.
const PING_LIMIT: Duration = Duration::from_secs(1);

/// Where the database is and how to get in. `Debug` shows no password.
#[derive(Clone)]
pub(super) struct Target {
    opts: Opts,
    server: Arc<str>,
    user: Arc<str>,
    database: Arc<str>,
}

impl Target {
    pub(super) fn new(
        options: OptsBuilder,
        server: String,
        user: String,
        database: String,
    ) -> Self {
        Self {
            opts: options.into(),
            server: server.into(),
            user: user.into(),
            database: database.into(),
        }
    }

    pub(super) fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn database(&self) -> &str {
        &self.database
    }

    #[cfg(test)]
    pub(super) fn is_encrypted(&self) -> bool {
        self.opts.ssl_opts().is_some()
    }

    #[cfg(test)]
    pub(super) fn opts(&self) -> &Opts {
        &self.opts
    }

    async fn connect(&self) -> Result<Conn> {
        Conn::new(self.opts.clone())
            .await
            .map_err(|error| connect_error(error, Some(self)))
    }
}

/// The server, without user and password.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.server)
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.server, self.database)
    }
}

/// A few connections that are made when they are needed, and made anew when they are gone.
pub(super) struct Link {
    target: Target,
    places: Arc<Semaphore>,
    idle: Arc<Idle>,
}

/// Each with the time of its last answer; `None` where there is a reason to doubt it.
type Idle = Mutex<Vec<(Conn, Option<Tick>)>>;

/// One connection, lent to one request. Given back by [`Line::keep`]; otherwise it is cut, for a
/// request that was dropped on the way left an answer, or a transaction, behind on it.
pub(super) struct Line {
    conn: Option<Conn>,
    home: Home,
}

enum Home {
    Own {
        idle: Arc<Idle>,
        _place: OwnedSemaphorePermit,
    },
    /// The pool cleans up what comes back to it.
    Pool,
}

impl Link {
    pub(super) fn new(target: Target, connections: usize) -> Self {
        Self {
            target,
            places: Arc::new(Semaphore::new(connections)),
            idle: Arc::default(),
        }
    }

    /// A connection that works, as far as one can know.
    pub(super) async fn line(&self) -> Result<Line> {
        match tokio::time::timeout(CONNECT_LIMIT, self.lend()).await {
            Ok(line) => line,
            Err(_) => Err(Error::unavailable(
                "the MySQL server cannot be reached in time, or has not answered earlier requests",
            )
            .with("server", &self.target)
            .with("limit", format_args!("{CONNECT_LIMIT:?}"))),
        }
    }

    async fn lend(&self) -> Result<Line> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(|_| Error::unavailable("the store is closed"))?;
        let mut line = Line {
            conn: None,
            home: Home::Own {
                idle: Arc::clone(&self.idle),
                _place: place,
            },
        };
        let kept = lock(&self.idle).pop();
        if let Some((conn, since)) = kept {
            let conn = line.conn.insert(conn);
            let now = Clock::system().now();
            if since.is_some_and(|since| now.since(since) < TRUSTED_IDLE) {
                return Ok(line);
            }
            if let Ok(Ok(())) = tokio::time::timeout(PING_LIMIT, conn.ping()).await {
                return Ok(line);
            }
            line.cut();
        }
        line.conn = Some(self.target.connect().await?);
        Ok(line)
    }

    /// Doubts all connections that are idle now: another one broke, and what ended it may have ended
    /// them.
    pub(super) fn doubt(&self) {
        for (_, since) in lock(&self.idle).iter_mut() {
            *since = None;
        }
    }

    /// Forgets the connections, so that the next ones belong to whichever runtime asks for them.
    /// No request is due on them, so each says goodbye by itself.
    pub(super) fn forget(&self) {
        drop(std::mem::take(&mut *lock(&self.idle)));
    }
}

impl Line {
    /// A connection of the user's pool.
    pub(super) async fn of(pool: &Pool) -> Result<Self> {
        match tokio::time::timeout(CONNECT_LIMIT, pool.get_conn()).await {
            Ok(Ok(conn)) => Ok(Self {
                conn: Some(conn),
                home: Home::Pool,
            }),
            Ok(Err(error)) => Err(connect_error(error, None)),
            Err(_) => Err(Error::unavailable(
                "the pool gave no connection in time; its connections are all in use, or the server cannot be reached",
            )
            .with("limit", format_args!("{CONNECT_LIMIT:?}"))),
        }
    }

    pub(super) fn conn(&mut self) -> Result<&mut Conn> {
        self.conn
            .as_mut()
            .ok_or_else(|| Error::unavailable("the connection is gone"))
    }

    /// Gives the connection back: its last request is answered, and left nothing behind.
    pub(super) fn keep(mut self) {
        if let (Some(conn), Home::Own { idle, .. }) = (self.conn.take(), &self.home) {
            lock(idle).push((conn, Some(Clock::system().now())));
        }
    }

    fn cut(&mut self) {
        match (self.conn.take(), &self.home) {
            (Some(conn), Home::Own { .. }) => hang_up(conn),
            (conn, _) => drop(conn),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.cut();
    }
}

/// Closes the socket without a goodbye, for which the client would first wait for the answer that a
/// silent server owes. It would do so in a task of the present runtime: so this is not done there.
fn hang_up(conn: Conn) {
    blocking::unblock(move || drop(conn)).detach();
}

fn lock(idle: &Idle) -> std::sync::MutexGuard<'_, Vec<(Conn, Option<Tick>)>> {
    idle.lock().unwrap_or_else(PoisonError::into_inner)
}
