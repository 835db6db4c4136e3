//! The database as its operations use it: transactions off the async threads, retried while others
//! write, and each checked to be of the data that was opened.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rusqlite::{CachedStatement, Connection, Transaction, TransactionBehavior};
use tokio::sync::Mutex;

use super::connect::{Meta, at, connect, set_up};
use super::error::{Halt, at_commit, busy};
use super::options::SqliteOptions;
use super::place::Place;
use crate::backoff::Backoff;
use crate::clock::{Clock, Tick};
use crate::driver::off_thread;
use crate::error::{Error, ErrorKind, Result};
use crate::host::Host;

/// The pauses between two tries while another connection writes. SQLite's own grow to 100 ms, by
/// which a busy database starves one of its users.
const PAUSE: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(5));

/// A connection of a [`Database`]. Work on one does not hold up work on another, but for SQLite's
/// one write lock.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lane {
    /// Acquires, and what people ask.
    Ask,
    /// Renewals and releases.
    Upkeep,
    /// Waiters.
    Look,
}

/// A database that is open.
pub(super) struct Database {
    place: Place,
    pub(super) busy_limit: Duration,
    pub(super) clock: Clock,
    pub(super) host: Host,
    realm: String,
    /// The most grants that this client has seen counted in the data.
    grants_seen: AtomicI64,
    lanes: [Arc<Mutex<Option<Connection>>>; 3],
    pid: u32,
}

/// One transaction under way.
pub(super) struct Step<'a> {
    transaction: &'a Transaction<'a>,
    pub(super) meta: Meta,
    pub(super) clock: &'a Clock,
    pub(super) host: &'a Host,
}

impl Step<'_> {
    /// A statement, prepared once for each connection.
    pub(super) fn prepare(&self, sql: &str) -> rusqlite::Result<CachedStatement<'_>> {
        self.transaction.prepare_cached(sql)
    }

    /// The connection, within the transaction.
    pub(super) fn connection(&self) -> &Connection {
        self.transaction
    }
}

impl Database {
    /// Opens the database, and makes what is missing where `options` allow it.
    pub(super) async fn open(path: &Path, options: SqliteOptions) -> Result<Arc<Self>> {
        let path = path.to_owned();
        off_thread(move || Self::open_now(&path, options)).await?
    }

    fn open_now(path: &Path, options: SqliteOptions) -> Result<Arc<Self>> {
        let until = Clock::system().now().after(options.busy_limit);
        let place = Place::open(path, options.create, options.allow_network_fs)?;
        let (connection, meta) = patiently(until, || {
            let mut connection = connect(&place)?;
            let meta = set_up(&mut connection, options.create)?;
            Ok((connection, meta))
        })
        .map_err(|error| at(error, &place))?;
        let lanes = [Some(connection), None, None];
        Ok(Arc::new(Self {
            place,
            busy_limit: options.busy_limit,
            clock: options.clock,
            host: options.host.unwrap_or_else(Host::read),
            realm: meta.realm,
            grants_seen: AtomicI64::new(meta.grants),
            lanes: lanes.map(|connection| Arc::new(Mutex::new(connection))),
            pid: std::process::id(),
        }))
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn realm(&self) -> &str {
        &self.realm
    }

    /// Runs `work` in a transaction that has the write lock from its beginning, and commits it.
    /// `work` may run several times, and only the last one counts.
    ///
    /// Cancel safety: work that was begun is ended.
    pub(super) async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        lane: Lane,
        limit: Duration,
        work: impl Fn(&Step<'_>) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        self.on_lane(lane, limit, move |database, connection| {
            database.write_now(connection, &work)
        })
        .await
    }

    /// Runs `work` in a transaction that sees one state of the data, and changes nothing.
    ///
    /// Cancel safe.
    pub(super) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        lane: Lane,
        work: impl Fn(&Step<'_>) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        self.on_lane(lane, self.busy_limit, move |database, connection| {
            let transaction = connection.transaction()?;
            let step = database.begin(&transaction)?;
            work(&step)
        })
        .await
    }

    async fn on_lane<T: Send + 'static>(
        self: &Arc<Self>,
        lane: Lane,
        limit: Duration,
        attempt: impl Fn(&Self, &mut Connection) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        // SQLite's connections must not be used, nor closed, in a child of a fork.
        self.same_process()?;
        // Read before the wait for the lane: where the database is locked for long, those who wait
        // behind each other all end in time.
        let until = Clock::system().now().after(limit);
        let index = match lane {
            Lane::Ask => 0,
            Lane::Upkeep => 1,
            Lane::Look => 2,
        };
        let [ask, upkeep, look] = &self.lanes;
        let lane = [ask, upkeep, look].get(index).map_or(ask, |lane| lane);
        let mut slot = Arc::clone(lane).lock_owned().await;
        let database = Arc::clone(self);
        off_thread(move || {
            let done = patiently(until, || {
                let connection = match slot.as_mut() {
                    Some(connection) => connection,
                    None => slot.insert(connect(&database.place)?),
                };
                attempt(&database, connection)
            });
            done.map_err(|error| {
                // What is broken is made anew; what is only wrong stays.
                if matches!(
                    error.kind(),
                    ErrorKind::Unavailable | ErrorKind::Indeterminate | ErrorKind::Corrupt
                ) {
                    *slot = None;
                }
                at(error, &database.place)
            })
        })
        .await?
    }

    fn write_now<T>(
        &self,
        connection: &mut Connection,
        work: &impl Fn(&Step<'_>) -> Result<T, Halt>,
    ) -> Result<T, Halt> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let (value, grants) = {
            let step = self.begin(&transaction)?;
            let value = work(&step)?;
            // What this transaction made of it counts as seen once it is committed.
            (value, Meta::read(&transaction)?.grants)
        };
        transaction.commit().map_err(at_commit)?;
        self.grants_seen.fetch_max(grants, Ordering::SeqCst);
        Ok(value)
    }

    /// Makes sure that the data are those that were opened.
    fn begin<'a>(&'a self, transaction: &'a Transaction<'a>) -> Result<Step<'a>, Halt> {
        // Read before the data: another lane may commit in between.
        let grants_seen = self.grants_seen.load(Ordering::SeqCst);
        let meta = Meta::read(transaction)?;
        self.place.check_same()?;
        meta.check_version()?;
        if meta.realm != self.realm {
            // Its tokens cannot be compared with those of the realm that the caller opened (S9).
            return Err(
                Error::corrupt("the data of this store was replaced since it was opened")
                    .with("found", &meta.realm)
                    .with("expected", &self.realm)
                    .into(),
            );
        }
        if meta.grants < grants_seen {
            return Err(Error::corrupt(
                "the data of this store went back to an older state since it was opened, as by a restored backup; raise the floors above every token that was used, and open it anew",
            )
            .with("grants", meta.grants)
            .with("grants_seen", grants_seen)
            .into());
        }
        Ok(Step {
            transaction,
            meta,
            clock: &self.clock,
            host: &self.host,
        })
    }

    /// Becomes as it is in a child of a fork.
    #[cfg(all(test, target_os = "linux"))]
    pub(super) fn pretend_forked(&mut self) {
        self.pid = 0;
    }

    fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(
            Error::invalid("this database was opened before a fork; open it again in the child")
                .with("opened_by_pid", self.pid),
        )
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            return;
        }
        // Closing here could remove the write-ahead log from under the parent.
        for lane in &self.lanes {
            if let Ok(mut slot) = lane.try_lock() {
                std::mem::forget(slot.take());
            }
        }
    }
}

/// Makes attempts until one does not meet another connection's lock, or `until` has come; one at
/// least.
fn patiently<T>(until: Tick, mut attempt: impl FnMut() -> Result<T, Halt>) -> Result<T> {
    let clock = Clock::system();
    let mut pauses = Backoff::new(PAUSE.0, PAUSE.1);
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(Halt::Failed(error)) => return Err(error),
            Err(Halt::Busy(error)) => {
                let left = until.since(clock.now());
                if left.is_zero() {
                    return Err(busy(error));
                }
                std::thread::sleep(pauses.next().min(left));
            }
        }
    }
}
