//! Where a fenced file lies, and the names of the files beside it.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::file::safe::{self, Opening, shown};
use crate::name::ResourceName;

/// The longest file name of the usual file systems, in bytes.
const FILE_NAME_MAX_BYTES: usize = 255;

/// Endings of our own names, all of which begin with a dot. A name that would be too long is
/// hashed, and the hashed ones end otherwise, so that no two files share a name of ours.
const FENCE: &str = ".fence";
const FENCE_HASHED: &str = ".fenceh";
const TEMP: &str = ".tmp";

/// Dot, dot, a number of at most four digits, and the two longest endings.
const EXTRA_BYTES: usize = 2 + 4 + FENCE_HASHED.len() + TEMP.len();

/// The paths of one fenced file.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The directory of all the others.
    pub(crate) dir: PathBuf,
    /// The plain file with the value.
    pub(crate) data: PathBuf,
    /// The fence file: watermark and writer.
    pub(crate) fence: PathBuf,
    /// The name of the plain file, for people who read the fence file.
    pub(crate) file_name: String,
}

impl Place {
    /// The place of `resource` below `root`.
    ///
    /// # Errors
    /// `Invalid` where the name is not a plain relative path, or is one of our own names.
    pub(crate) fn new(root: &Path, resource: &ResourceName) -> Result<Self> {
        let name = resource.as_str();
        let refuse = |what: &str| Error::invalid(what).with("resource", format_args!("{name:?}"));
        let mut dir = root.to_owned();
        let mut components = name.split('/').peekable();
        while let Some(component) = components.next() {
            match component {
                "" => {
                    return Err(refuse(
                        "the resource is not a plain relative path; expected no leading, trailing or double slash",
                    ));
                }
                "." | ".." => {
                    return Err(refuse(
                        "the resource is not a plain relative path; expected no component that is . or ..",
                    ));
                }
                _ if component.contains('\0') => {
                    return Err(refuse("the resource has a NUL, which no path can have"));
                }
                _ if component.len() > FILE_NAME_MAX_BYTES => {
                    return Err(refuse(
                        "a component of the resource is too long; expected at most 255 bytes",
                    ));
                }
                _ if is_ours(component) => {
                    return Err(refuse(
                        "the resource has the name of a fence file; choose another",
                    ));
                }
                _ if components.peek().is_some() => dir.push(component),
                _ => {
                    return Ok(Self {
                        data: dir.join(component),
                        fence: dir.join(fence_name(component)),
                        file_name: component.to_owned(),
                        dir,
                    });
                }
            }
        }
        Err(refuse("the resource is empty"))
    }

    /// The name of the temporary file with this number.
    pub(crate) fn temp(&self, number: u32) -> PathBuf {
        let (stem, ending) = stem(&self.file_name);
        self.dir.join(format!(".{stem}.{number}{ending}{TEMP}"))
    }

    /// What is known of the plain file; `None` where it is not there.
    ///
    /// # Errors
    /// `Invalid` where it is not a regular file; nothing is then read or replaced.
    pub(crate) fn look(&self) -> Result<Option<Metadata>> {
        let found = match std::fs::symlink_metadata(&self.data) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(safe::io_error(e, "a file cannot be looked at", &self.data)),
        };
        let kind = found.file_type();
        let what = if kind.is_file() {
            return Ok(Some(found));
        } else if kind.is_symlink() {
            "expected a regular file, found a symbolic link; name its target instead"
        } else if kind.is_dir() {
            "expected a regular file, found a directory"
        } else {
            "expected a regular file, found a pipe, socket or device"
        };
        Err(Error::invalid(what).with("path", shown(&self.data)))
    }

    /// Opens the plain file for reading; `None` where it is not there.
    ///
    /// # Errors
    /// As [`look`](Self::look), and `Unavailable` where it cannot be opened.
    pub(crate) fn open_data(&self) -> Result<Option<File>> {
        let opening = Opening {
            write: false,
            create: false,
            check_owner: false,
            check_links: false,
            refusal: ErrorKind::Invalid,
        };
        safe::open(&self.data, opening)
    }
}

/// Which content a file has, without reading it: a rename keeps all of it, and whoever replaces or
/// changes the file leaves another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stamp {
    inode: u64,
    bytes: u64,
    mtime_s: i64,
    mtime_ns: i64,
}

impl Stamp {
    /// The stamp of a file that is written and synced.
    pub(crate) fn of(found: &Metadata) -> Self {
        Self {
            inode: found.ino(),
            bytes: found.size(),
            mtime_s: found.mtime(),
            mtime_ns: found.mtime_nsec(),
        }
    }

    /// True where `found` is the stamp of the same content. Some file systems keep whole seconds
    /// once the file is on disk, so that zero nanoseconds say nothing.
    pub(crate) fn is(&self, found: &Self) -> bool {
        let whole = Self {
            mtime_ns: 0,
            ..*self
        };
        *found == *self || *found == whole
    }
}

/// True for a temporary file's name.
pub(crate) fn is_temp(name: &str) -> bool {
    name.starts_with('.')
        && name
            .strip_suffix(TEMP)
            .is_some_and(|rest| rest.ends_with(FENCE) || rest.ends_with(FENCE_HASHED))
}

/// True for a fence file's name.
pub(crate) fn is_fence(name: &str) -> bool {
    name.starts_with('.') && (name.ends_with(FENCE) || name.ends_with(FENCE_HASHED))
}

fn is_ours(name: &str) -> bool {
    is_temp(name) || is_fence(name)
}

fn fence_name(file_name: &str) -> String {
    let (stem, ending) = stem(file_name);
    format!(".{stem}{ending}")
}

/// The middle of our names, and their ending.
fn stem(file_name: &str) -> (String, &'static str) {
    if file_name.len() + EXTRA_BYTES <= FILE_NAME_MAX_BYTES {
        (file_name.to_owned(), FENCE)
    } else {
        (hex(&Sha256::digest(file_name.as_bytes())), FENCE_HASHED)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(name: &str) -> Result<Place> {
        Place::new(Path::new("/root"), &ResourceName::new(name)?)
    }

    #[test]
    fn a_plain_relative_path_lies_below_the_root() {
        let found = place("payments/today.csv").unwrap();
        assert_eq!(found.dir, Path::new("/root/payments"));
        assert_eq!(found.data, Path::new("/root/payments/today.csv"));
        assert_eq!(found.fence, Path::new("/root/payments/.today.csv.fence"));
        assert_eq!(
            found.temp(0),
            Path::new("/root/payments/.today.csv.0.fence.tmp")
        );
    }

    #[test]
    fn names_that_leave_the_root_or_are_ours_are_refused() {
        for bad in [
            "/etc/passwd",
            "../a",
            "a/../b",
            "a/..",
            ".",
            "./a",
            "a//b",
            "a/",
            "a\0b",
            "/",
            ".a.fence",
            "d/.a.fence",
            ".a.fence/b",
            ".a.0.fence.tmp",
            ".x.fenceh",
        ] {
            let error = place(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{bad:?}");
            assert!(error.to_string().contains("resource="), "{error}");
        }
        let too_long = "x".repeat(256);
        assert_eq!(place(&too_long).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn odd_names_that_a_path_can_have_are_taken() {
        for odd in [
            "-rf",
            " ",
            "...",
            "..a",
            ".hidden",
            "a\nb",
            "Größe/π",
            "a.fence",
            ".tmp",
            "\\",
        ] {
            assert!(place(odd).is_ok(), "{odd:?}");
        }
    }

    proptest! {
        #[test]
        fn different_files_share_no_name_of_ours(a in "\\PC{1,250}", b in "\\PC{1,250}") {
            prop_assume!(a != b);
            let ours = |name: &str| place(name).map(|p| [p.data.clone(), p.fence.clone(), p.temp(0), p.temp(9999)]);
            if let (Ok(a), Ok(b)) = (ours(&a), ours(&b)) {
                prop_assert!(a.iter().all(|name| !b.contains(name)), "{:?} {:?}", a, b);
                for name in a.iter().chain(&b) {
                    prop_assert!(name.file_name().unwrap().len() <= FILE_NAME_MAX_BYTES);
                }
            }
        }
    }
}
