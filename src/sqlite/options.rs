//! How a SQLite store is opened.

use std::path::Path;
use std::time::Duration;

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::sqlite::fence::FencedSqlite;
use crate::sqlite::lease::SqliteStore;

/// The longest time that one operation may wait for the database's lock.
pub(super) const BUSY_LIMIT_MAX: Duration = Duration::from_secs(8);

/// Less than what the layers above wait for one request, so that the caller hears which file it is.
const BUSY_LIMIT: Duration = Duration::from_secs(3);

/// Options of a [`SqliteStore`] or a [`FencedSqlite`], each at first as the safe default.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("app.db");
/// use std::time::Duration;
/// use fencelock::sqlite::SqliteStore;
/// # pollster::block_on(async {
/// let options = SqliteStore::options().busy_timeout(Duration::from_secs(1))?;
/// let store = options.open(&path).await?;
/// # Ok::<(), fencelock::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct SqliteOptions {
    pub(super) create: bool,
    pub(super) allow_network_fs: bool,
    pub(super) busy_limit: Duration,
    pub(super) clock: Clock,
    pub(super) host: Option<Host>,
}

impl Default for SqliteOptions {
    fn default() -> Self {
        Self {
            create: true,
            allow_network_fs: false,
            busy_limit: BUSY_LIMIT,
            clock: Clock::system(),
            host: None,
        }
    }
}

impl SqliteOptions {
    /// Whether to create the file and the tables where they are missing; true where nothing is
    /// said. Its directory is never made.
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Allows a database on a network, cluster or user-space file system, which is refused
    /// otherwise. Only for those who know that its locks and its shared memory reach all clients:
    /// SQLite's manual says that they do not where the clients are on different hosts.
    pub fn allow_network_fs(mut self, allow: bool) -> Self {
        self.allow_network_fs = allow;
        self
    }

    /// How long one operation waits at the most while another connection writes; 3 s where nothing
    /// is said. Longer is `Unavailable`.
    ///
    /// # Errors
    /// `Invalid` above 8 s.
    pub fn busy_timeout(mut self, limit: Duration) -> Result<Self> {
        if limit > BUSY_LIMIT_MAX {
            return Err(
                Error::invalid("busy timeout is out of range; expected at most 8 s")
                    .with("busy_timeout", format_args!("{limit:?}")),
            );
        }
        self.busy_limit = limit;
        Ok(self)
    }

    /// The clock by which leases lapse: [`Clock::adjustable`] in tests. All stores of a database
    /// have to agree on it.
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// Pretends to be in another boot or time namespace.
    #[cfg(test)]
    pub(crate) fn host(mut self, boot: &str, time_namespace: &str) -> Self {
        self.host = Some(Host {
            boot: boot.to_owned(),
            time_namespace: time_namespace.to_owned(),
        });
        self
    }

    /// Opens the locks in the database at `path`.
    ///
    /// # Errors
    /// - `Invalid` where the path is not a regular file with one name, cannot be made or accessed,
    ///   or can be written by anybody.
    /// - `Unsupported` on a network file system, where the database cannot be put in WAL mode, and
    ///   where its text is not UTF-8 or its tables are of another version of fencelock.
    /// - `Corrupt` where the file is no database or a damaged one.
    /// - `Unavailable` where another program keeps it locked, or the disk fails or is full.
    pub async fn open(self, path: impl AsRef<Path>) -> Result<SqliteStore> {
        SqliteStore::open_with(path.as_ref(), self).await
    }

    /// Opens the fenced values in the database at `path`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_fenced(self, path: impl AsRef<Path>) -> Result<FencedSqlite> {
        FencedSqlite::open_with(path.as_ref(), self).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_timeout_is_bounded() {
        let bounded = |limit| SqliteOptions::default().busy_timeout(limit);
        assert!(bounded(BUSY_LIMIT_MAX).is_ok());
        let error = bounded(BUSY_LIMIT_MAX + Duration::from_nanos(1)).unwrap_err();
        assert!(error.to_string().contains("at most 8 s"), "{error}");
    }
}
