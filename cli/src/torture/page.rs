//! The file of the report: whole or not there, and what was there before stays until then.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::failure::{Failure, Result};

/// Fails where no report can be written to `path`, and changes nothing there.
pub(super) fn probe(path: &Path) -> Result<()> {
    let open = || -> io::Result<()> {
        match Target::of(path)? {
            Target::File(file) => drop(beside(&file)?),
            Target::Other => drop(OpenOptions::new().write(true).open(path)?),
        }
        Ok(())
    };
    open().map_err(|e| Failure::usage(cannot(path, &e)))
}

/// Puts `page` in the place of what is there.
pub(super) fn write(path: &Path, page: &str) -> Result<()> {
    let put = || -> io::Result<()> {
        match Target::of(path)? {
            Target::File(file) => {
                let mut new = beside(&file)?;
                new.write_all(page.as_bytes())?;
                new.persist(&file)?;
            }
            Target::Other => OpenOptions::new()
                .write(true)
                .open(path)?
                .write_all(page.as_bytes())?,
        }
        Ok(())
    };
    put().map_err(|e| Failure::system("the report", io::Error::other(cannot(path, &e))))
}

enum Target {
    /// A regular file, or none yet, behind any links.
    File(PathBuf),
    /// What cannot be replaced, as a pipe.
    Other,
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() => fs::canonicalize(path).map(Self::File),
            Ok(_) => Ok(Self::Other),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::File(path.to_owned())),
            Err(e) => Err(e),
        }
    }
}

fn beside(file: &Path) -> io::Result<NamedTempFile> {
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
    tempfile::Builder::new()
        .prefix(".fencelock-report-")
        // What the caller's umask leaves of it.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(dir.unwrap_or(Path::new(".")))
}

fn cannot(path: &Path, error: &io::Error) -> String {
    format!(
        "the report cannot be written to {}: {error}",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_replaces_the_former_one_only_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("r.html"), dir.path().join("link"));
        probe(&path).unwrap();
        assert!(!path.exists());
        write(&path, "first").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        probe(&link).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        write(&link, "second").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        for nowhere in [dir.path().to_owned(), dir.path().join("none/r.html")] {
            assert!(probe(&nowhere).is_err(), "{nowhere:?}");
        }
        probe(Path::new("/dev/full")).unwrap();
        assert!(write(Path::new("/dev/full"), "page").is_err());
    }
}
