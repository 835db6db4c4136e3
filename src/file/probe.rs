//! What an operator should know of a file store.

use std::os::unix::fs::MetadataExt as _;

use crate::clock::Tick;
use crate::error::Result;
use crate::file::engine::Engine;
use crate::file::records::{Halt, Pace};
use crate::file::root::WAIT_MAX;
use crate::file::safe;
use crate::lease::{Finding, Severity};
use crate::netfs::{self, FileSystem};

/// A sync that is faster than this was not one.
const SYNC_MIN_US: u128 = 20;

/// A sync that is slower than this is felt.
const SYNC_SLOW_MS: u128 = 50;

const GROUP_WRITES: u32 = 0o020;

/// How many records that cannot be read are told one by one.
const TOLD_MAX: usize = 20;

/// Looks at the directory, the identity, each record and the system. What fails is a finding too,
/// and hides no other.
pub(crate) fn findings(engine: &Engine) -> Vec<Finding> {
    let until = safe::within(WAIT_MAX);
    let or_bad =
        |subject, found: Result<Finding>| found.unwrap_or_else(|e| Finding::bad(subject, &e));
    let mut found = vec![
        or_bad("file system", file_system(engine)),
        or_bad("permissions", permissions(engine)),
        or_bad("identity", identity(engine, until)),
        or_bad("sync", sync_time(engine, until)),
        boot_id(engine),
        notifications(engine),
        or_bad("liveness", liveness(engine)),
    ];
    match records(engine, until) {
        Ok(records) => found.extend(records),
        Err(e) => found.push(Finding::bad("records", &e)),
    }
    found
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

fn identity(engine: &Engine, until: Tick) -> Result<Finding> {
    let floor = engine.records.root.lock_floor(until)?.get();
    let realm = engine.records.root.realm();
    Ok(Finding::new(
        Severity::Good,
        "identity",
        format!("realm {realm}, floor {floor}"),
    ))
}

fn sync_time(engine: &Engine, until: Tick) -> Result<Finding> {
    let took = engine
        .records
        .root
        .lock_floor(until)?
        .time_sync(&engine.clock)?;
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

/// One finding for all sound records, and one for each that cannot be read.
fn records(engine: &Engine, until: Tick) -> Result<Vec<Finding>> {
    let (mut sound, mut held, mut foreign) = (0, 0, 0);
    let (mut bad, mut untold) = (Vec::new(), 0_u64);
    engine.records.root.check_same()?;
    for key in engine.records.keys()? {
        let looked = match engine.name_of(&key, until) {
            Ok(Some(name)) => engine.inspect(&name, Pace::Until(until)),
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
            Err(Halt::Failed(e)) if bad.len() < TOLD_MAX => bad.push(e.to_string()),
            Err(_) => untold += 1,
        }
    }
    let detail = format!("{sound} sound, {held} of them held");
    let mut found = vec![if foreign > 0 {
        Finding::new(
            Severity::Warning,
            "records",
            format!("{detail}; {foreign} other files lie among them; move those away"),
        )
    } else {
        Finding::new(Severity::Good, "records", detail)
    }];
    found.extend(
        bad.into_iter()
            .map(|detail| Finding::new(Severity::Bad, "record", detail)),
    );
    if untold > 0 {
        found.push(Finding::new(
            Severity::Bad,
            "record",
            format!("{untold} more cannot be read; fencelock list shows them"),
        ));
    }
    Ok(found)
}

fn liveness(engine: &Engine) -> Result<Finding> {
    let dead = engine.live.count_dead()?;
    Ok(Finding::new(
        Severity::Good,
        "liveness",
        format!("{dead} files of dead processes, which a prune or the next open removes"),
    ))
}
