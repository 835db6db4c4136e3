//! `fencelock acquire`: a lease that stays in the store, and what all acquires share.

use std::io;
use std::time::Duration;

use fencelock::acquire::Acquire;
use fencelock::clock::Clock;
use fencelock::lease::LeaseRef;
use fencelock::{Detached, ErrorKind, LockGuard, LockName, Locks, Ttl};
use serde_json::json;

use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::output;
use crate::signals::{self, Signals};
use crate::store::StoreUrl;

/// How long the end of the process waits for releases that are under way.
pub(crate) const FAREWELL: Duration = Duration::from_secs(5);

/// The same where the store did not answer, or a wait is over: its bound has to hold.
pub(crate) const FAREWELL_IN_SHORT: Duration = Duration::from_secs(1);

/// Even who waits for less gives the store this long to open.
const OPENING_MIN: Duration = Duration::from_secs(1);

/// The pauses between tries to open a store that cannot be reached.
const REOPEN_MIN: Duration = Duration::from_millis(100);
const REOPEN_MAX: Duration = Duration::from_secs(2);

/// How long to wait for a lock that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    No,
    /// For at most this long.
    AtMost(Duration),
    /// As long as it takes.
    Forever,
}

impl Wait {
    /// What is left of it.
    fn after(self, waited: Duration) -> Self {
        match self {
            Self::AtMost(wait) => Self::AtMost(wait.saturating_sub(waited)),
            other => other,
        }
    }
}

/// What becomes of a lock that was granted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hold {
    /// It is renewed until it is given back.
    Kept { at_least: Duration },
    /// It stays in the store for one TTL.
    Detached,
}

/// What `work` yields, or `None` where it takes longer than `limit`.
async fn within<T>(limit: Option<Duration>, work: impl Future<Output = T>) -> Option<T> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, work).await.ok(),
        None => Some(work.await),
    }
}

/// A lock, and how it is asked for.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) name: LockName,
    /// `None` leaves it to the store's URL.
    pub(crate) ttl: Option<Ttl>,
    pub(crate) wait: Wait,
    pub(crate) permits: u32,
    pub(crate) label: Option<String>,
}

impl Claim {
    /// Opens the store, and tells what is left of the wait. A store that cannot be reached is tried
    /// again for as long as the lock is waited for.
    pub(crate) async fn open(&self, store: &StoreUrl) -> Result<(Locks, Wait)> {
        let limit = match self.wait {
            Wait::No => return Ok((store.open().await?, Wait::No)),
            Wait::AtMost(wait) => Some(wait.max(OPENING_MIN)),
            Wait::Forever => None,
        };
        let clock = Clock::system();
        let started = clock.now();
        let waited = || clock.now().since(started);
        let mut pause = REOPEN_MIN;
        loop {
            let left = limit.map(|limit| limit.saturating_sub(waited()));
            let failure = match within(left, store.open()).await {
                Some(Ok(locks)) => return Ok((locks, self.wait.after(waited()))),
                Some(Err(failure)) => failure,
                None => Failure::new(
                    exit_codes::UNAVAILABLE,
                    format!(
                        "store {store}: it did not open within {}; nothing was applied, try again",
                        output::human(limit.unwrap_or_default())
                    ),
                ),
            };
            let is_over = left.is_some_and(|left| left <= pause);
            if failure.code() != exit_codes::UNAVAILABLE || is_over {
                return Err(failure);
            }
            if pause == REOPEN_MIN {
                say(&format!("{failure}; waiting for it"));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(REOPEN_MAX);
        }
    }

    /// The lock; `None` where somebody else holds it and we do not wait.
    pub(crate) async fn take(
        &self,
        locks: &Locks,
        wait: Wait,
        hold: Hold,
    ) -> fencelock::Result<Option<LockGuard>> {
        let name = &self.name;
        match wait {
            Wait::No => self.described(locks.try_acquire(name), hold).await,
            Wait::AtMost(wait) => {
                let acquire = self.described(locks.acquire(name), hold);
                acquire.wait(wait).await.map(Some)
            }
            Wait::Forever => {
                let acquire = self.described(locks.acquire(name), hold);
                acquire.wait_forever().await.map(Some)
            }
        }
    }

    fn described<Mode>(&self, acquire: Acquire<Mode>, hold: Hold) -> Acquire<Mode> {
        let mut acquire = match hold {
            Hold::Kept { at_least } => acquire.min_hold(at_least),
            Hold::Detached => acquire.detached(),
        };
        if let Some(ttl) = self.ttl {
            acquire = match ttl.duration() {
                Some(ttl) => acquire.ttl(ttl),
                None => acquire.no_expiry(),
            };
        }
        if let Some(label) = &self.label {
            acquire = acquire.label(label);
        }
        if let Some(trace_id) = env::trace_id() {
            acquire = acquire.trace_id(trace_id);
        }
        acquire.permits(self.permits)
    }
}

/// Acquires and prints the lease. The lock stays until it is released, or its TTL is over.
pub(crate) async fn acquire(store: &StoreUrl, claim: &Claim, json: bool) -> Result<u8> {
    let mut signals = Signals::listen()?;
    let (locks, wait) = tokio::select! {
        biased;
        signal = signals.ending() => return Ok(signals::exit_code(signal)),
        opened = claim.open(store) => opened?,
    };
    let acquired = tokio::select! {
        biased;
        signal = signals.ending() => Err(signal),
        acquired = claim.take(&locks, wait, Hold::Detached) => Ok(acquired),
    };
    let lease = match acquired {
        Ok(Ok(Some(guard))) => guard.detach(),
        Ok(Ok(None)) => return Err(conflict(claim, &locks).await),
        Ok(Err(error)) if error.kind() == ErrorKind::Timeout => {
            return Err(conflict(claim, &locks).await);
        }
        Ok(Err(error)) => return Err(error.into()),
        Err(signal) => {
            // A grant that was on its way is given back by the library's thread.
            let _ = tokio::time::timeout(FAREWELL, locks.drain()).await;
            return Ok(signals::exit_code(signal));
        }
    };
    let printed = if json {
        print_json(&lease)
    } else {
        print_text(&lease)
    };
    if let Err(error) = printed {
        // Nobody can release what nobody was told of.
        let unheard = LeaseRef {
            name: lease.name,
            holder: lease.holder,
            token: Some(lease.token),
        };
        locks.release(&unheard, Duration::ZERO).await?;
        return Err(Failure::system(
            "the lease cannot be printed and was released",
            error,
        ));
    }
    Ok(exit_codes::OK)
}

fn print_json(lease: &Detached) -> io::Result<()> {
    output::object(&json!({
        "name": lease.name.as_str(),
        "token": output::token(lease.token),
        "holder": lease.holder.reveal(),
        "fence": lease.fence.to_string(),
        "ttl_ms": lease.ttl.as_millis(),
        "expires_in_ms": output::millis_or_null(lease.expires_in),
    }))
}

fn print_text(lease: &Detached) -> io::Result<()> {
    let duration = |d: Option<Duration>| d.map_or("never".to_owned(), output::human);
    let row = |key: &str, value: String| vec![key.to_owned(), value];
    let table = output::table(&[
        row("name", output::name(&lease.name)),
        row("token", lease.token.to_string()),
        row("holder", lease.holder.reveal()),
        row("fence", lease.fence.to_string()),
        row("ttl", duration(lease.ttl.duration())),
        row("expires_in", duration(lease.expires_in)),
    ]);
    output::line(table.trim_end())
}

async fn conflict(claim: &Claim, locks: &Locks) -> Failure {
    Failure::new(exit_codes::HELD, held_by(claim, locks).await)
}

/// Says that a lock was not to be had, and who holds it.
pub(crate) async fn held_by(claim: &Claim, locks: &Locks) -> String {
    let name = claim.name.as_str();
    let what = not_free(claim);
    let inspected = tokio::time::timeout(FAREWELL_IN_SHORT, locks.inspect(&claim.name)).await;
    let holder = match inspected {
        Ok(Ok(Some(state))) => state.holders.into_iter().next(),
        // It was held a moment ago, and by whom is only for people.
        Ok(Ok(None) | Err(_)) | Err(_) => None,
    };
    let Some(holder) = holder else {
        return format!("{what} name={name:?}");
    };
    let label = holder
        .info
        .label
        .map_or(String::new(), |label| format!(" label={label:?}"));
    let expiry = holder.expires_in.map_or("never".to_owned(), output::human);
    format!(
        "{what} name={name:?} host={:?} pid={}{label} token={} expires_in={expiry:?}",
        holder.info.host, holder.info.pid, holder.token
    )
}

fn not_free(claim: &Claim) -> String {
    let permits = claim.permits;
    match (claim.wait, permits) {
        (Wait::AtMost(wait), 1) => format!(
            "lock was not free within {}: somebody else holds it",
            output::human(wait)
        ),
        (Wait::AtMost(wait), _) => format!(
            "no permit was free within {}: all {permits} permits are taken",
            output::human(wait)
        ),
        (_, 1) => "lock is held by somebody else; --wait waits for it".to_owned(),
        _ => format!("all {permits} permits are taken; --wait waits for one"),
    }
}
