//! Which file systems are refused: those where a kernel lock of one client need not exclude another
//! client, or where a rename is not seen by all at once.
//!
//! A lock on NFS or FUSE may be local to one client, and it may hang for as long as the server is
//! away. That cannot be tested from one host, so it is refused by the kind of the file system
//! unless the user, who can know, allows it.

use std::path::Path;

use crate::disk;
use crate::error::{Error, Result};

/// The file system below a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileSystem {
    /// A network, cluster or user-space file system: its common name.
    Network(&'static str),
    /// Any other.
    Local,
    /// This operating system was not asked.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    Unknown,
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
thread_local! {
    /// What tests let every path of this thread lie on.
    pub(crate) static PRETENDED: std::cell::Cell<Option<FileSystem>> =
        const { std::cell::Cell::new(None) };
}

/// Magic numbers of statfs(2), in 32 bits: of linux/magic.h, and of file systems that are not in the
/// kernel as stat(1) of the GNU coreutils lists them. A folder that a hypervisor shares with its
/// guest has other clients too.
#[cfg(any(target_os = "linux", target_os = "android"))]
const NETWORK: [(i128, &str); 18] = [
    (0x0000_6969, "nfs"),
    (0x0000_517b, "smb"),
    (0xff53_4d42, "cifs"),
    (0xfe53_4d42, "smb2"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "ceph"),
    (0x5346_414f, "afs"),
    (0x6b41_4653, "afs"),
    (0x0bd0_0bd0, "lustre"),
    (0x7461_636f, "ocfs2"),
    (0x0116_1970, "gfs2"),
    (0x7375_7245, "coda"),
    (0x4750_4653, "gpfs"),
    (0x1983_0326, "beegfs"),
    (0xaad7_aaea, "panfs"),
    (0x786f_4256, "vboxsf"),
    (0x7c7c_6673, "prl_fs"),
];

/// tmpfs and ramfs.
#[cfg(any(target_os = "linux", target_os = "android"))]
const VOLATILE: [i128; 2] = [0x0102_1994, 0x8584_58f6];

/// What kind of file system `path` lies on.
///
/// # Errors
/// `Unavailable` where the path cannot be asked.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn kind_of(path: &Path) -> Result<FileSystem> {
    #[cfg(test)]
    if let Some(pretended) = PRETENDED.get() {
        return Ok(pretended);
    }
    let found = rustix::fs::statfs(path).map_err(|e| {
        disk::io_error(
            e.into(),
            "the file system cannot be asked for its kind",
            path,
        )
    })?;
    Ok(by_magic(i128::from(found.f_type)))
}

/// What kind of file system `path` lies on: unknown here.
///
/// # Errors
/// None.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn kind_of(_: &Path) -> Result<FileSystem> {
    Ok(FileSystem::Unknown)
}

/// True where the file system under `path` is in memory, and gone after a reboot.
///
/// # Errors
/// As [`kind_of`].
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn is_volatile(path: &Path) -> Result<bool> {
    let found = rustix::fs::statfs(path).map_err(|e| {
        disk::io_error(
            e.into(),
            "the file system cannot be asked for its kind",
            path,
        )
    })?;
    Ok(VOLATILE.contains(&(i128::from(found.f_type) & 0xffff_ffff)))
}

/// True where the file system under `path` is in memory: unknown here.
///
/// # Errors
/// None.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn is_volatile(_: &Path) -> Result<bool> {
    Ok(false)
}

/// Refuses a network file system unless it is `allowed`.
///
/// # Errors
/// `Unsupported`, and as [`kind_of`].
pub(crate) fn refuse_network(path: &Path, allowed: bool) -> Result<()> {
    match kind_of(path)? {
        FileSystem::Network(kind) if !allowed => Err(Error::unsupported(
            "a kernel lock on a network or user-space file system need not exclude other clients; \
             use a local directory, or allow it where you know that it does",
        )
        .with("file_system", kind)
        .with("path", disk::shown(path))),
        _ => Ok(()),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn by_magic(f_type: i128) -> FileSystem {
    // Some architectures give the number as a signed 32-bit word.
    let magic = f_type & 0xffff_ffff;
    NETWORK
        .iter()
        .find(|(known, _)| *known == magic)
        .map_or(FileSystem::Local, |(_, name)| FileSystem::Network(name))
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_their_numbers_signed_or_not() {
        assert_eq!(by_magic(0x6969), FileSystem::Network("nfs"));
        assert_eq!(by_magic(0xff53_4d42), FileSystem::Network("cifs"));
        assert_eq!(
            by_magic(i128::from(0xff53_4d42_u32.cast_signed())),
            FileSystem::Network("cifs")
        );
        assert_eq!(by_magic(0xef53), FileSystem::Local);
        // What the vendors' names spell, in the byte order that each has chosen.
        let spelled = |text: &[u8; 4]| i128::from(u32::from_be_bytes(*text));
        assert_eq!(by_magic(spelled(b"GPFS")), FileSystem::Network("gpfs"));
        assert_eq!(by_magic(spelled(b"xoBV")), FileSystem::Network("vboxsf"));
        assert_eq!(by_magic(spelled(b"||fs")), FileSystem::Network("prl_fs"));
        assert_eq!(by_magic(0x1983_0326), FileSystem::Network("beegfs"));
        assert_eq!(
            by_magic(i128::from(0xaad7_aaea_u32.cast_signed())),
            FileSystem::Network("panfs")
        );
    }

    #[test]
    fn a_path_that_is_not_there_is_unavailable() {
        let error = refuse_network(Path::new("/nonexistent/fencelock"), false).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unavailable);
        assert!(error.to_string().contains("path="), "{error}");
    }
}
