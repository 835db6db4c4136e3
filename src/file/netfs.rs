//! Which file systems are refused: those where a kernel lock of one client need not exclude another
//! client, or where a rename is not seen by all at once.
//!
//! A lock on NFS or FUSE may be local to one client, and it may hang for as long as the server is
//! away. That cannot be tested from one host, so it is refused by the kind of the file system
//! unless the user, who can know, allows it.

use std::path::Path;

use crate::error::{Error, Result};
use crate::file::safe;

/// True where [`network_kind`] really asks; elsewhere it finds nothing.
pub(crate) const ASKED: bool = cfg!(any(target_os = "linux", target_os = "android"));

/// Magic numbers of statfs(2), in 32 bits.
#[cfg(any(target_os = "linux", target_os = "android"))]
const NETWORK: [(i128, &str); 13] = [
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
];

/// The common name of the network, cluster or user-space file system that `path` lies on; `None` on
/// any other.
///
/// # Errors
/// `Unavailable` where the path cannot be asked.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn network_kind(path: &Path) -> Result<Option<&'static str>> {
    let found = rustix::fs::statfs(path).map_err(|e| {
        safe::io_error(
            e.into(),
            "the file system cannot be asked for its kind",
            path,
        )
    })?;
    Ok(by_magic(i128::from(found.f_type)))
}

/// Unknown on this operating system.
///
/// # Errors
/// None.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn network_kind(_: &Path) -> Result<Option<&'static str>> {
    Ok(None)
}

/// Refuses a network file system unless it is `allowed`.
///
/// # Errors
/// `Unsupported`, and as [`network_kind`].
pub(crate) fn refuse_network(path: &Path, allowed: bool) -> Result<()> {
    match network_kind(path)? {
        Some(kind) if !allowed => Err(Error::unsupported(
            "a kernel lock on a network or user-space file system need not exclude other clients; \
             use a local directory, or allow it where you know that it does",
        )
        .with("file_system", kind)
        .with("path", safe::shown(path))),
        _ => Ok(()),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn by_magic(f_type: i128) -> Option<&'static str> {
    // Some architectures give the number as a signed 32-bit word.
    let magic = f_type & 0xffff_ffff;
    NETWORK
        .iter()
        .find(|(known, _)| *known == magic)
        .map(|(_, name)| *name)
}

#[cfg(all(test, any(target_os = "linux", target_os = "android")))]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_known_by_their_numbers_signed_or_not() {
        assert_eq!(by_magic(0x6969), Some("nfs"));
        assert_eq!(by_magic(0xff53_4d42), Some("cifs"));
        assert_eq!(
            by_magic(i128::from(0xff53_4d42_u32.cast_signed())),
            Some("cifs")
        );
        assert_eq!(by_magic(0xef53), None);
    }

    #[test]
    fn a_path_that_is_not_there_is_unavailable() {
        let error = refuse_network(Path::new("/nonexistent/fencelock"), false).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unavailable);
        assert!(error.to_string().contains("path="), "{error}");
    }
}
