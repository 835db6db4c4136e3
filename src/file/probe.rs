//! What an operator should know of a file store.

use std::os::unix::fs::MetadataExt as _;

use crate::error::Result;
use crate::file::engine::Engine;
use crate::file::netfs::{self, FileSystem};
use crate::file::records::Pace;
use crate::file::safe;
use crate::lease::{Finding, Severity};

/// A sync that is faster than this was not one.
const SYNC_MIN_US: u128 = 20;

/// A sync that is slower than this is felt.
const SYNC_SLOW_MS: u128 = 50;

const GROUP_WRITES: u32 = 0o020;

/// Looks at the directory, the identity, each record and the system.
pub(crate) fn findings(engine: &Engine) -> Result<Vec<Finding>> {
    let mut found = vec![
        file_system(engine)?,
        permissions(engine)?,
        identity(engine)?,
        sync_time(engine)?,
        boot_id(engine),
        notifications(engine),
    ];
    found.push(records(engine)?);
    found.push(liveness(engine)?);
    Ok(found)
}

fn file_system(engine: &Engine) -> Result<Finding> {
    let dir = engine.records.root.dir();
    let finding = |severity, detail: String| Finding::new(severity, "file system", detail);
    Ok(match netfs::kind_of(dir)? {
        FileSystem::Network(kind) => finding(
            Severity::Bad,
            format!("{kind}: its kernel locks need not exclude other clients; use a local directory"),
        ),
        _ if netfs::is_volatile(dir)? => finding(
            Severity::Warning,
            "tmpfs: all is lost at a reboot, and the store's realm with it (D1 only); use a disk where storage outlives the boot".to_owned(),
        ),
        FileSystem::Local => finding(Severity::Good, "local".to_owned()),
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        FileSystem::Unknown => finding(
            Severity::Warning,
            "its kind cannot be asked for here; make sure that it is local".to_owned(),
        ),
    })
}

fn permissions(engine: &Engine) -> Result<Finding> {
    let dir = engine.records.root.dir();
    let mode = std::fs::symlink_metadata(dir)
        .map_err(|e| safe::io_error(e, "the store's directory cannot be looked at", dir))?
        .mode();
    Ok(if mode & GROUP_WRITES == 0 {
        Finding::new(
            Severity::Good,
            "permissions",
            format!("{:o}", mode & 0o7777),
        )
    } else {
        Finding::new(
            Severity::Warning,
            "permissions",
            format!(
                "{:o}: the group may remove records; run chmod g-w on the directory",
                mode & 0o7777
            ),
        )
    })
}

fn identity(engine: &Engine) -> Result<Finding> {
    let floor = engine.records.root.lock_floor()?.get();
    let realm = engine.records.root.realm();
    Ok(Finding::new(
        Severity::Good,
        "identity",
        format!("realm {realm}, floor {floor}"),
    ))
}

fn sync_time(engine: &Engine) -> Result<Finding> {
    let took = engine.records.root.lock_floor()?.time_sync(&engine.clock)?;
    let detail = format!("{took:?} for one sync");
    Ok(if took.as_micros() < SYNC_MIN_US {
        Finding::new(
            Severity::Warning,
            "sync",
            format!(
                "{detail}: too fast for a disk; tokens may be told again after power loss (D1 only)"
            ),
        )
    } else if took.as_millis() > SYNC_SLOW_MS {
        Finding::new(
            Severity::Warning,
            "sync",
            format!("{detail}: first grants of a name will be slow"),
        )
    } else {
        Finding::new(Severity::Good, "sync", detail)
    })
}

fn boot_id(engine: &Engine) -> Finding {
    if engine.records.host.knows_boot() {
        Finding::new(Severity::Good, "boot id", engine.records.host.boot.clone())
    } else {
        Finding::new(
            Severity::Warning,
            "boot id",
            "cannot be read, so each token is synced alone; mount /proc",
        )
    }
}

fn notifications(engine: &Engine) -> Finding {
    if engine.notifier.is_available() {
        Finding::new(Severity::Good, "notifications", "inotify")
    } else {
        Finding::new(
            Severity::Warning,
            "notifications",
            "inotify is not available, so waiters look every 100 ms; raise fs.inotify.max_user_instances",
        )
    }
}

fn records(engine: &Engine) -> Result<Finding> {
    let (mut sound, mut held, mut damaged, mut foreign) = (0, 0, Vec::new(), 0);
    for key in engine.records.keys()? {
        let looked = match engine.name_of(&key) {
            Ok(Some(name)) => engine.inspect(&name, Pace::Patient),
            Ok(None) => {
                foreign += 1;
                continue;
            }
            Err(e) => Err(e.into()),
        };
        match looked {
            Ok(None) => {}
            Ok(Some(state)) => {
                sound += 1;
                held += usize::from(!state.holders.is_empty());
            }
            Err(_) => damaged.push(key),
        }
    }
    let detail = format!("{sound} sound, {held} of them held");
    Ok(if let Some(first) = damaged.first() {
        Finding::new(
            Severity::Bad,
            "records",
            format!(
                "{detail}, {} cannot be read, such as locks/{first}; mend them with fencelock repair",
                damaged.len()
            ),
        )
    } else if foreign > 0 {
        Finding::new(
            Severity::Warning,
            "records",
            format!("{detail}; {foreign} other files lie among them; move those away"),
        )
    } else {
        Finding::new(Severity::Good, "records", detail)
    })
}

fn liveness(engine: &Engine) -> Result<Finding> {
    let dead = engine.live.count_dead()?;
    Ok(Finding::new(
        Severity::Good,
        "liveness",
        format!("{dead} files of dead processes, which a prune or the next open removes"),
    ))
}
