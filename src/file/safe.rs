//! Opening and locking files that others may tamper with.
//!
//! A planted symlink must not lead a write elsewhere, a planted FIFO must not hang an open, and an
//! existing file is never truncated by opening it.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::clock::{Clock, Tick};
use crate::disk::rename_new;
pub(crate) use crate::disk::{explain, io_error, shown, while_opening};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::file::faults;
use crate::random;

/// The first pause between two tries for a kernel lock.
const PAUSE_MIN: Duration = Duration::from_micros(50);

/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// How often a file that is replaced again and again is reopened before that counts as trouble.
const REOPEN_MAX: u32 = 100;

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opening {
    /// Open for writing too.
    pub(crate) write: bool,
    /// Create it where it is missing, empty and with mode 0600.
    ///
    /// Prefer [`create_whole`] where an empty file would be ambiguous.
    pub(crate) create: bool,
    /// Refuse a file that another user owns.
    pub(crate) check_owner: bool,
    /// Refuse a file with more than one name.
    pub(crate) check_links: bool,
    /// The kind of the error for a file that fails these checks or is not a regular file:
    /// `Corrupt` for files of our own, `Invalid` for a path that the user named.
    pub(crate) refusal: ErrorKind,
}

impl Opening {
    /// A file of our own, for reading and writing, all checks on, not created.
    pub(crate) const OWN: Self = Self {
        write: true,
        create: false,
        check_owner: true,
        check_links: true,
        refusal: ErrorKind::Corrupt,
    };
}

/// How a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Alone.
    Exclusive,
    /// With other readers.
    Shared,
}

/// Opens `path`: without following a symlink in its last component, without waiting for a FIFO's
/// other end, without truncating, closed on exec. `None` where there is no such file.
///
/// # Errors
/// `opening.refusal` where it is a symlink, not a regular file, another user's or has several
/// names; else as [`io_error`].
pub(crate) fn open(path: &Path, opening: Opening) -> Result<Option<File>> {
    let access = if opening.write {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    let create = if opening.create {
        OFlags::CREATE
    } else {
        OFlags::empty()
    };
    let flags = access | create | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let refuse = |what: &str| Error::new(opening.refusal, what).with("path", shown(path));
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) if !opening.create => return Ok(None),
        Err(Errno::LOOP) => return Err(refuse("expected a regular file, found a symbolic link")),
        Err(Errno::ISDIR) => return Err(refuse("expected a regular file, found a directory")),
        Err(Errno::NXIO) => {
            return Err(refuse(
                "expected a regular file, found a pipe, socket or device",
            ));
        }
        Err(e) => return Err(io_error(e.into(), "a file cannot be opened", path)),
    };
    let found = stat(&file, path)?;
    if found.is_dir() {
        return Err(refuse("expected a regular file, found a directory"));
    }
    if !found.is_file() {
        return Err(refuse(
            "expected a regular file, found a pipe, socket or device",
        ));
    }
    let user = rustix::process::geteuid().as_raw();
    if opening.check_owner && found.uid() != user {
        return Err(
            refuse("the file belongs to another user; run chown on it, or remove it")
                .with("owner_uid", found.uid())
                .with("expected_uid", user),
        );
    }
    // A link count of 0 is a file that was just removed or replaced; the identity check says so.
    if opening.check_links && found.nlink() > 1 {
        return Err(
            refuse("the file has several hard links, and was perhaps planted")
                .with("links", found.nlink()),
        );
    }
    Ok(Some(file))
}

/// Opens `path` as [`open`] does and locks it, reopening where another file took its place in the
/// meantime: a lock on a file that the path no longer names would exclude nobody.
///
/// Closing the file unlocks it. `None` where there is no such file.
///
/// # Errors
/// As [`open`] and [`lock`].
pub(crate) fn open_locked(
    path: &Path,
    opening: Opening,
    sharing: Sharing,
    until: Tick,
) -> Result<Option<File>> {
    for _ in 0..REOPEN_MAX {
        let Some(file) = open(path, opening)? else {
            return Ok(None);
        };
        lock(&file, sharing, until, path)?;
        if is_still(&file, path)? {
            return Ok(Some(file));
        }
    }
    Err(Error::unavailable(
        "the file is replaced again and again; something else writes to its directory",
    )
    .with("path", shown(path)))
}

/// The moment, by the host's clock, until which something that begins now may wait.
pub(crate) fn within(limit: Duration) -> Tick {
    Clock::system().now().after(limit)
}

/// Takes the kernel lock of an open file, trying until `until` with short growing pauses, and at
/// least once.
///
/// A blocking flock(2) has no time limit, and one stuck process would hang all.
///
/// # Errors
/// `Unavailable` where it stays locked for so long, or the file system has no locks.
pub(crate) fn lock(file: &File, sharing: Sharing, until: Tick, path: &Path) -> Result<()> {
    let clock = Clock::system();
    let start = clock.now();
    let mut pause = PAUSE_MIN;
    loop {
        let tried = match sharing {
            Sharing::Exclusive => file.try_lock(),
            Sharing::Shared => file.try_lock_shared(),
        };
        match tried {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(e)) => {
                return Err(io_error(e, "a file cannot be locked", path));
            }
        }
        let now = clock.now();
        if now >= until {
            return Err(Error::unavailable(
                "another process holds the kernel lock of a file for too long; find it with fuser or lslocks",
            )
            .with("waited", format_args!("{:?}", now.since(start)))
            .with("path", shown(path)));
        }
        std::thread::sleep(random::between(pause / 2, pause).min(until.since(now)));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// True where `path` still names the open `file`.
///
/// # Errors
/// As [`io_error`]; a path that names nothing is an answer, not an error.
pub(crate) fn is_still(file: &File, path: &Path) -> Result<bool> {
    let open = stat(file, path)?;
    match std::fs::symlink_metadata(path) {
        Ok(named) => Ok(open.dev() == named.dev() && open.ino() == named.ino()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io_error(e, "a file cannot be looked at", path)),
    }
}

/// Creates `path` with `content` and mode 0600, whole and durable or not at all. `false` where it
/// is there already.
///
/// An empty file of that name is therefore never half of a creation; it is damage.
///
/// Another process can open the file before its name is durable. Whoever writes to it first (a pair
/// of slots at generation 1) calls [`sync_dir`] before, so that nothing told can lose its file.
///
/// # Errors
/// As [`io_error`]; nothing has the name `path` then, except where only the directory could not be
/// made durable.
pub(crate) fn create_whole(path: &Path, content: &[u8]) -> Result<bool> {
    let dir = parent(path);
    let temp = dir.join(format!(".{}.fence.tmp", hex(&random::id())));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(&temp, flags, Mode::RUSR | Mode::WUSR)
        .map(File::from)
        .map_err(|e| io_error(e.into(), "a file cannot be created", &temp))?;
    // Locked while it is written, so that nobody takes it for a dead writer's leftover.
    let _ = file.try_lock();
    let placed = faults::step("write a new file")
        .and_then(|()| file.write_all_at(content, 0))
        .and_then(|()| file.sync_all())
        .map_err(|e| io_error(e, "a new file cannot be written", &temp))
        .and_then(|()| place(&temp, path));
    if !matches!(placed, Ok(true)) {
        // The name is random and ours; where even this fails, it is a leftover that harms nobody.
        let _ = std::fs::remove_file(&temp);
    }
    let placed = placed?;
    sync_dir(&dir)?;
    Ok(placed)
}

/// Makes the names in a directory durable.
///
/// # Errors
/// As [`io_error`].
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    faults::step("sync the directory")
        .and_then(|()| {
            Ok(rustix::fs::fsync(rustix::fs::open(
                dir,
                flags,
                Mode::empty(),
            )?)?)
        })
        .map_err(|e| io_error(e, "a directory cannot be made durable", dir))
}

/// The directory that `path` lies in.
pub(crate) fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// What the kernel knows of an open file.
///
/// # Errors
/// As [`io_error`].
pub(crate) fn stat(file: &File, path: &Path) -> Result<Metadata> {
    file.metadata()
        .map_err(|e| io_error(e, "a file cannot be looked at", path))
}

/// Gives `temp` the name `path` unless that is taken.
fn place(temp: &Path, path: &Path) -> Result<bool> {
    match rename_new(temp, path) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(e) => Err(io_error(e.into(), "a file cannot be given its name", path)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    const NEW: Opening = Opening {
        create: true,
        ..Opening::OWN
    };

    fn refused(path: &Path, opening: Opening) -> String {
        let error = open(path, opening).unwrap_err();
        assert_eq!(error.kind(), opening.refusal);
        assert!(error.to_string().contains("path="), "{error}");
        error.to_string()
    }

    #[test]
    fn a_symlink_is_refused_and_its_target_stays_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, link) = (dir.path().join("victim"), dir.path().join("link"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &link).unwrap();
        assert!(refused(&link, NEW).contains("symbolic link"));
        symlink(dir.path().join("nowhere"), dir.path().join("dangling")).unwrap();
        refused(&dir.path().join("dangling"), NEW);
        assert!(!dir.path().join("nowhere").exists());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn pipes_directories_and_hard_links_are_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        fs::create_dir(at("dir")).unwrap();
        fs::write(at("file"), "").unwrap();
        fs::hard_link(at("file"), at("twin")).unwrap();
        let read_only = Opening {
            write: false,
            ..Opening::OWN
        };
        for opening in [
            NEW,
            read_only,
            Opening {
                refusal: ErrorKind::Invalid,
                ..Opening::OWN
            },
        ] {
            assert!(refused(&at("pipe"), opening).contains("pipe"));
            assert!(refused(&at("dir"), opening).contains("directory"));
            assert!(refused(&at("twin"), opening).contains("links=2"));
        }
        let any_links = Opening {
            check_links: false,
            ..Opening::OWN
        };
        assert!(open(&at("twin"), any_links).unwrap().is_some());
    }

    #[test]
    fn a_socket_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        refused(&path, Opening::OWN);
    }

    #[test]
    fn opening_creates_for_the_user_alone_and_never_truncates() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert!(open(&path, Opening::OWN).unwrap().is_none());
        assert!(open(&path, NEW).unwrap().is_some());
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        fs::write(&path, "kept").unwrap();
        open(&path, NEW).unwrap().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"kept");
    }

    #[test]
    fn a_lock_that_is_held_is_waited_for_only_so_long() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let holder = open(&path, NEW).unwrap().unwrap();
        lock(&holder, Sharing::Shared, within(Duration::ZERO), &path).unwrap();
        let other = open(&path, NEW).unwrap().unwrap();
        let limit = Duration::from_millis(30);
        let clock = Clock::system();
        let start = clock.now();
        let error = lock(&other, Sharing::Exclusive, within(limit), &path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let waited = clock.now().since(start);
        assert!(
            waited >= limit && waited < Duration::from_secs(10),
            "{waited:?}"
        );
        lock(&other, Sharing::Shared, within(limit), &path).unwrap();
        drop(holder);
        lock(
            &other,
            Sharing::Exclusive,
            within(Duration::from_secs(10)),
            &path,
        )
        .unwrap();
    }

    #[test]
    fn a_file_that_was_replaced_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = open(&path, NEW).unwrap().unwrap();
        assert!(is_still(&file, &path).unwrap());
        fs::rename(&path, dir.path().join("moved")).unwrap();
        assert!(!is_still(&file, &path).unwrap());
        fs::write(&path, "another").unwrap();
        assert!(!is_still(&file, &path).unwrap());
    }

    /// How many descriptors of this process name `path`.
    #[cfg(target_os = "linux")]
    fn opened(path: &Path) -> usize {
        fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter(|fd| fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == path))
            .count()
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_waiter_for_a_replaced_file_gets_the_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(dir.path()).unwrap().join("file");
        fs::write(&path, "old").unwrap();
        let holder = open_locked(
            &path,
            Opening::OWN,
            Sharing::Exclusive,
            within(Duration::ZERO),
        )
        .unwrap()
        .unwrap();
        let waiter = std::thread::spawn({
            let path = path.clone();
            move || {
                let limit = within(Duration::from_secs(60));
                let file = open_locked(&path, Opening::OWN, Sharing::Exclusive, limit)
                    .unwrap()
                    .unwrap();
                is_still(&file, &path).unwrap()
            }
        });
        while opened(&path) < 2 {
            std::thread::yield_now();
        }
        fs::write(dir.path().join("new"), "new").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        drop(holder);
        assert!(waiter.join().unwrap());
    }

    #[test]
    fn a_file_is_created_whole_and_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let made: usize = std::thread::scope(|scope| {
            let tries: Vec<_> = (0..8_u8)
                .map(|n| {
                    let path = &path;
                    scope.spawn(move || create_whole(path, &[n; 64]).unwrap())
                })
                .collect();
            tries
                .into_iter()
                .map(|t| usize::from(t.join().unwrap()))
                .sum()
        });
        assert_eq!(made, 1);
        let content = fs::read(&path).unwrap();
        assert!(content.len() == 64 && content.iter().all(|b| *b == content[0]));
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary file stays"
        );
    }

    #[test]
    fn errors_say_what_to_do_and_name_the_path() {
        let path = Path::new("/srv/a\nb");
        let error = io_error(Errno::NOSPC.into(), "a value cannot be written", path);
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            r#"a value cannot be written: the disk is full; free some space path="/srv/a\nb""#
        );
        let missing = create_whole(Path::new("/nonexistent/file"), b"").unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::Unavailable);
    }
}
