//! `fencelock run`: a command that lives no longer than the lock that it runs under.
//!
//! Three things end the command in time. While `run` is well, it watches the lease and ends the
//! command itself ([`supervise`]). If `run` is killed, the kernel kills the command ([`launch`]).
//! If `run` is stopped, or was killed while the command had processes of its own, the [`warden`]
//! kills the command's group at the time until which `run` may believe in its lease, which is
//! before the store grants the lock again (L4).

mod child;
mod group;
pub(crate) mod launch;
mod supervise;
mod terminal;
pub(crate) mod warden;

use std::any::Any;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::time::Duration;

use fencelock::file::FileStore;
use fencelock::{ErrorKind, LockGuard, LockName, Locks};

use self::child::Child;
use self::supervise::{End, Supervision, Why};
use self::terminal::Terminal;
use self::warden::{READY_LIMIT, Warden};
use crate::acquire::{self, Claim, FAREWELL, FAREWELL_IN_SHORT, Hold};
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::fenced::Destination;
use crate::signals::{self, Signals};
use crate::store::StoreUrl;

/// The same where the lock is lost, and most likely gone.
const FAREWELL_WHEN_LOST: Duration = Duration::from_millis(100);

/// All that `run` was asked for, validated.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) claim: Claim,
    pub(crate) min_hold: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) kill_after: Duration,
    pub(crate) raise: Vec<String>,
    /// The exit code where somebody else holds the lock; `None` is success, in silence.
    pub(crate) conflict_code: Option<u8>,
    pub(crate) command: OsString,
    pub(crate) args: Vec<OsString>,
}

/// Runs the command and returns the exit code.
pub(crate) async fn run(plan: &Plan, store: &StoreUrl) -> Result<u8> {
    let mut signals = Signals::listen()?;
    // Before the lock, so that a destination that cannot be opened costs nobody the lock.
    let mut destinations = Vec::with_capacity(plan.raise.len());
    for dest in &plan.raise {
        destinations.push(Destination::open(dest).await?);
    }
    let (locks, wait) = tokio::select! {
        biased;
        signal = signals.ending() => return Ok(signals::exit_code(signal)),
        opened = plan.claim.open(store) => opened?,
    };
    let hold = Hold::Kept {
        at_least: plan.min_hold,
    };
    let acquired = tokio::select! {
        biased;
        signal = signals.ending() => Err(signal),
        acquired = plan.claim.take(&locks, wait, hold) => Ok(acquired),
    };
    let (result, patience) = match acquired {
        Err(signal) => (Ok(signals::exit_code(signal)), FAREWELL),
        Ok(Err(error)) if error.kind() == ErrorKind::Timeout => {
            (conflict(plan, &locks).await, FAREWELL_IN_SHORT)
        }
        Ok(Err(error)) => (Err(error.into()), FAREWELL_IN_SHORT),
        Ok(Ok(None)) => (conflict(plan, &locks).await, FAREWELL_IN_SHORT),
        Ok(Ok(Some(guard))) => {
            let result = under_lock(plan, store, &locks, guard, &destinations, &mut signals).await;
            let patience = match &result {
                Err(failure) if failure.code() == exit_codes::LOST => FAREWELL_WHEN_LOST,
                _ => FAREWELL,
            };
            (result, patience)
        }
    };
    // What was dropped above is given back by the library's thread.
    let _ = tokio::time::timeout(patience, locks.drain()).await;
    result
}

async fn conflict(plan: &Plan, locks: &Locks) -> Result<u8> {
    let Some(code) = plan.conflict_code else {
        // cron(8) mails whatever is said.
        return Ok(exit_codes::OK);
    };
    say(&acquire::held_by(&plan.claim, locks).await);
    Ok(code)
}

async fn under_lock(
    plan: &Plan,
    store: &StoreUrl,
    locks: &Locks,
    guard: LockGuard,
    destinations: &[Destination],
    signals: &mut Signals,
) -> Result<u8> {
    // So that from here on no older holder can write there any more (S1).
    for destination in destinations {
        destination
            .raise(&guard)
            .await
            .map_err(|failure| failure.within("the command was not started"))?;
    }
    let liveness = liveness(locks)?;
    let (end, status) = supervised(plan, store, &guard, liveness.as_ref(), signals).await?;
    let name = guard.name().clone();
    let token = guard.token();
    match end {
        End::Own => {
            let code = child::exit_code(status);
            if let Err(error) = guard.release().await {
                return after_the_end(code, error);
            }
            Ok(code)
        }
        End::Ended(why) | End::Overtaken(why) => {
            // Where it is still ours, it is given back; where it is not, nobody is kept waiting.
            let patience = match why {
                Why::MaxHold | Why::Warden => FAREWELL,
                Why::Unrenewed | Why::Lost(_) => FAREWELL_WHEN_LOST,
            };
            let _ = tokio::time::timeout(patience, guard.release()).await;
            let what = match end {
                End::Overtaken(_) => format!(
                    "lock lost by the time the command was seen to have ended by itself ({status})"
                ),
                _ => "lock lost while the command ran, so the command was ended".to_owned(),
            };
            Err(Failure::new(
                exit_codes::LOST,
                format!("{what}: {why} name={:?} token={token}", name.as_str()),
            ))
        }
    }
}

/// The command ended by itself, and then the release failed.
fn after_the_end(code: u8, error: fencelock::Error) -> Result<u8> {
    if error.kind() == ErrorKind::Lost {
        return Err(Failure::from(error).within("the lock was lost before the command ended"));
    }
    // The command's result stands, and the lock lapses by its TTL.
    Failure::from(error)
        .within("the command ended, but the release is not confirmed")
        .report();
    Ok(code)
}

/// What tells a file store that its holder lives; other stores have no such thing.
fn liveness(locks: &Locks) -> Result<Option<OwnedFd>> {
    let store: &dyn Any = &**locks.store();
    let files = store.downcast_ref::<FileStore>();
    Ok(files.map(FileStore::liveness).transpose()?)
}

/// Starts the command under guard, sees it to its end, and reaps it.
async fn supervised(
    plan: &Plan,
    store: &StoreUrl,
    guard: &LockGuard,
    liveness: Option<&OwnedFd>,
    signals: &mut Signals,
) -> Result<(End, ExitStatus)> {
    let mut warden = Warden::start(liveness)?;
    let mut child = match Child::start(&plan.command, &plan.args, &environment(store, guard)) {
        Ok(child) => child,
        Err(failure) => {
            warden.dismiss();
            return Err(failure);
        }
    };
    let started = start(&mut warden, &mut child, guard);
    let (group, terminal) = match started {
        Ok(started) => started,
        Err(failure) => {
            child.abandon();
            warden.dismiss();
            return Err(failure);
        }
    };
    let mut supervision = Supervision::new(plan, guard, group, warden, liveness, terminal.as_ref());
    let end = supervision.until_the_end(&mut child, signals).await;
    // The warden goes first: until the command is reaped, its number means its group.
    supervision.dismiss_warden();
    let killed = supervision.warden_has_killed();
    drop(terminal);
    let status = child.reap()?;
    let end = match end {
        End::Overtaken(why) if killed && child::was_killed(status) => End::Ended(why),
        end => end,
    };
    Ok((end, status))
}

/// From the gate to the command's first instruction.
fn start(
    warden: &mut Warden,
    child: &mut Child,
    guard: &LockGuard,
) -> Result<(group::Group, Option<Terminal>)> {
    let group = child.group()?;
    warden.guard(group, supervise::belief_ends(guard))?;
    warden.ready(READY_LIMIT)?;
    // A lease that ran out meanwhile must not start anything.
    guard.check()?;
    let terminal = Terminal::shared_with(group);
    child.go()?;
    Ok((group, terminal))
}

fn environment(store: &StoreUrl, guard: &LockGuard) -> [(&'static str, OsString); 4] {
    let name: &LockName = guard.name();
    [
        (env::NAME, name.as_str().into()),
        (env::TOKEN, guard.token().to_string().into()),
        // Without a sequence: the command's processes write in the order of their arrival.
        (env::FENCE, guard.fence().without_seq().to_string().into()),
        (env::STORE, store.reveal().into()),
    ]
}
