//! How a file store is opened.

use std::path::Path;

use crate::clock::Clock;
use crate::error::Result;
use crate::file::lease::FileStore;
use crate::host::Host;
use crate::token::FencingToken;

/// Options of a [`FileStore`], each at first as the safe default.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// use fencelock::file::FileStore;
/// let store = FileStore::options().allow_network_fs(false).open(dir.path())?;
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct FileOptions {
    pub(crate) allow_network_fs: bool,
    pub(crate) mend: Option<FencingToken>,
    pub(crate) clock: Clock,
    pub(crate) host: Option<Host>,
}

impl FileOptions {
    /// Allows a directory on a network, cluster or user-space file system, which is refused
    /// otherwise. Only for those who know that *its* kernel locks exclude all clients, and that no
    /// client reads stale pages: most do not, whatever they say.
    pub fn allow_network_fs(mut self, allow: bool) -> Self {
        self.allow_network_fs = allow;
        self
    }

    /// Where the store's identity is missing or damaged, makes a new one instead of failing as
    /// `Corrupt`: another realm, whose tokens are above `least` and above every reservation that
    /// can still be read. Choose a `least` above every token that any storage has seen.
    ///
    /// Does nothing to a store whose identity is sound. Stores that are open elsewhere have to be
    /// opened again.
    pub fn mend(mut self, least: FencingToken) -> Self {
        self.mend = Some(least);
        self
    }

    /// The clock by which leases lapse: [`Clock::adjustable`] in tests. All stores of a directory
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

    /// Opens the store in the directory `path`, which is made, with mode 0700, where it is missing.
    /// Blocks on file I/O for a moment.
    ///
    /// # Errors
    /// - `Invalid` where the path is not a directory, cannot be made, is not accessible, another
    ///   user's, or writable by anybody.
    /// - `Unsupported` on a network file system.
    /// - `Corrupt` where the store's identity is damaged, or missing while there are records.
    /// - `Unavailable` where the disk fails or is full.
    pub fn open(self, path: impl AsRef<Path>) -> Result<FileStore> {
        FileStore::open_with(path.as_ref(), self)
    }
}
