//! What an operator should know of a directory of fenced files.

use std::fs::TryLockError;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::clock::Clock;
use crate::error::Result;
use crate::fence::hex;
use crate::file::safe::{self, Opening, Sharing, io_error, shown};
use crate::file::sidecar::{self, Access};
use crate::file::{place, temp};
use crate::lease::{Finding, Severity};
use crate::netfs::{self, FileSystem};
use crate::random;

/// How many directory entries are looked at for leftovers.
const ENTRIES_MAX: usize = 100_000;

/// How many damaged fence files are told one by one.
const TOLD_MAX: usize = 20;

/// How long all fence files together may be waited for: none is waited for unless it cannot be read.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(3);

/// Looks at the file system, tries a durable write and a kernel lock, counts leftovers, and reads
/// the fence files of the directory, those below it left out.
pub(crate) fn examine(root: &Path, access: Access) -> Vec<Finding> {
    let mut found = vec![file_system(root), writable(root), leftovers(root)];
    match fences(root, access) {
        Ok(fences) => found.extend(fences),
        Err(e) => found.push(Finding::bad("fence files", &e)),
    }
    found
}

/// One finding for all sound fence files, and one for each that cannot be read.
fn fences(root: &Path, access: Access) -> Result<Vec<Finding>> {
    let until = safe::within(LOCK_WAIT_MAX);
    let fail = |e| io_error(e, "a directory cannot be listed", root);
    let (mut sound, mut untold, mut bad) = (0_u64, 0_u64, Vec::new());
    let mut entries = std::fs::read_dir(root).map_err(fail)?;
    for entry in entries.by_ref().take(ENTRIES_MAX) {
        let entry = entry.map_err(fail)?;
        if !entry.file_name().to_str().is_some_and(place::is_fence) {
            continue;
        }
        let access = Access {
            lock_wait: until.since(Clock::system().now()).min(access.lock_wait),
            ..access
        };
        match sidecar::check(&entry.path(), access) {
            Ok(()) => sound += 1,
            Err(e) if bad.len() < TOLD_MAX => {
                bad.push(Finding::bad("fence file", &e));
            }
            Err(_) => untold += 1,
        }
    }
    let scope = if entries.next().is_some() {
        format!(" among the first {ENTRIES_MAX} entries")
    } else {
        String::new()
    };
    let mut found = vec![Finding::new(
        Severity::Good,
        "fence files",
        format!("{sound} sound in the directory itself{scope}"),
    )];
    found.append(&mut bad);
    if untold > 0 {
        found.push(Finding::new(
            Severity::Bad,
            "fence file",
            format!("{untold} more cannot be read; look again once these are mended"),
        ));
    }
    Ok(found)
}

fn file_system(root: &Path) -> Finding {
    let finding = |severity, detail| Finding::new(severity, "file system", detail);
    let found = netfs::kind_of(root).and_then(|kind| Ok((kind, netfs::is_volatile(root)?)));
    match found {
        Ok((FileSystem::Network(kind), _)) => finding(
            Severity::Warning,
            format!("{kind}, allowed by option: its kernel locks need not exclude other hosts"),
        ),
        Ok((_, true)) => finding(
            Severity::Warning,
            "in memory: values and watermarks are gone after a reboot".to_owned(),
        ),
        Ok((FileSystem::Local, false)) => finding(Severity::Good, "local".to_owned()),
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        Ok((FileSystem::Unknown, false)) => finding(
            Severity::Warning,
            "not known on this operating system: make sure that it is local".to_owned(),
        ),
        Err(e) => finding(Severity::Bad, e.to_string()),
    }
}

fn writable(root: &Path) -> Finding {
    let scratch = root.join(format!(".probe-{}.0.fence.tmp", hex(&random::id())));
    let tried = try_write_and_lock(&scratch);
    let _ = std::fs::remove_file(&scratch);
    match tried {
        Ok(true) => Finding::new(
            Severity::Good,
            "directory",
            "a durable write and a kernel lock work",
        ),
        Ok(false) => Finding::new(
            Severity::Bad,
            "directory",
            "a kernel lock did not exclude a second one; fences do not hold here",
        ),
        Err(e) => Finding::bad("directory", &e),
    }
}

fn try_write_and_lock(scratch: &Path) -> Result<bool> {
    safe::create_whole(scratch, b"probe")?;
    let open = || safe::open(scratch, Opening::OWN);
    let (Some(first), Some(second)) = (open()?, open()?) else {
        return Ok(false);
    };
    // A child that this process is just starting shares the descriptors that it had a moment ago, and
    // so the lock that the file was created under.
    let until = safe::within(Duration::from_secs(1));
    safe::lock(&first, Sharing::Exclusive, until, scratch)?;
    Ok(matches!(second.try_lock(), Err(TryLockError::WouldBlock)))
}

fn leftovers(root: &Path) -> Finding {
    let (mut dead, mut example, mut seen) = (0_u64, None, 0_usize);
    let mut dirs = vec![root.to_owned()];
    'tree: while let Some(dir) = dirs.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            seen += 1;
            if seen > ENTRIES_MAX {
                break 'tree;
            }
            let name = entry.file_name();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => dirs.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let leftover = name.to_str().is_some_and(place::is_temp)
                        && temp::is_leftover(&entry.path());
                    if leftover {
                        dead += 1;
                        example.get_or_insert(entry.path());
                    }
                }
                _ => {}
            }
        }
    }
    describe(dead, example, seen > ENTRIES_MAX)
}

fn describe(dead: u64, example: Option<PathBuf>, cut: bool) -> Finding {
    let scope = if cut {
        format!(" among the first {ENTRIES_MAX} entries")
    } else {
        String::new()
    };
    match example {
        None => Finding::new(
            Severity::Good,
            "leftovers",
            format!("no temporary file of a dead writer{scope}"),
        ),
        Some(path) => Finding::new(
            Severity::Warning,
            "leftovers",
            format!(
                "{dead} temporary files of dead writers{scope}; each goes with the next write of its \
                 file, or remove them by hand, such as {}",
                shown(&path)
            ),
        ),
    }
}
