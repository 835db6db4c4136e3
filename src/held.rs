//! One held lease: what its holder may believe, for how long, and why no longer.
//!
//! The guard asks, the keeper extends, and all changes pass through one small state under one
//! mutex: once lost, a lease is lost for good (L5).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::clock::{Clock, Tick};
use crate::error::{Error, Result};
use crate::lease::{LeaseRef, Renewal, Ttl};
use crate::token::FencingToken;

/// How often a lease that never lapses is verified.
const VERIFY_PERIOD: Duration = Duration::from_secs(5);

/// Why a lock is no longer held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The store says that the lease is not ours: it lapsed, was broken, or its data is gone.
    NotHeld,
    /// No renewal was confirmed in time, so another may get the lock from now on.
    Unconfirmed,
    /// The longest hold that was asked for is over.
    MaxHold,
    /// This is another process than the one that acquired: a child after fork(2).
    Forked,
}

impl LostReason {
    /// The reason as one word, for logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotHeld => "not_held",
            Self::Unconfirmed => "unconfirmed",
            Self::MaxHold => "max_hold",
            Self::Forked => "forked",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotHeld => "the store says that the lease is no longer ours",
            Self::Unconfirmed => "no renewal was confirmed before the lease could lapse",
            Self::MaxHold => "the longest hold is over",
            Self::Forked => "the guard crossed a fork into another process",
        })
    }
}

/// For how long after sending its request a holder believes in a grant of `ttl`.
///
/// The store's clock may run up to 2 % faster than ours (L4), and there is a margin between a check
/// and what it guards. The DynamoDB lock client and Redlock's `MIN_VALIDITY` count likewise.
pub(crate) fn belief(ttl: Ttl) -> Option<Duration> {
    let ttl = ttl.duration()?;
    let margin = (ttl / 50).clamp(Duration::from_millis(2), Duration::from_secs(1));
    Some((ttl * 100 / 102).saturating_sub(margin))
}

#[derive(Debug)]
pub(crate) struct Held {
    lease: LeaseRef,
    token: FencingToken,
    ttl: Ttl,
    renews: bool,
    acquired_at: Tick,
    min_hold_ends: Tick,
    max_hold_ends: Tick,
    pid: u32,
    keeper_id: AtomicU64,
    seq: AtomicU64,
    state: Mutex<State>,
    /// Made when somebody first asks for it: most leases are never lost, and nobody looks.
    lost: OnceLock<CancellationToken>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The holder believes until here (L4).
    deadline: Tick,
    /// The store has let the lease lapse by here for certain.
    lapses: Tick,
    renew_at: Tick,
    renewing: bool,
    /// The last renewal was not answered: the next one is asked for alone, so that what holds up
    /// one lease does not lose the others of its batch.
    unanswered: bool,
    backoff: Backoff,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Lost(LostReason),
    /// Given up by its holder: answers to renewals no longer count.
    Ended,
}

/// What a new [`Held`] is made of.
#[derive(Debug)]
pub(crate) struct Granted {
    pub(crate) lease: LeaseRef,
    pub(crate) token: FencingToken,
    pub(crate) ttl: Ttl,
    /// When the request that was granted was sent.
    pub(crate) sent: Tick,
    /// When its answer came.
    pub(crate) answered: Tick,
    pub(crate) renews: bool,
    pub(crate) min_hold: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) pid: u32,
}

impl Held {
    pub(crate) fn new(granted: Granted) -> Self {
        let Granted { ttl, sent, .. } = granted;
        let third = ttl.duration().map_or(VERIFY_PERIOD, |d| d / 3);
        Self {
            state: Mutex::new(State {
                phase: Phase::Held,
                deadline: belief(ttl).map_or(Tick::NEVER, |b| sent.after(b)),
                lapses: lapse_bound(ttl, granted.answered),
                renew_at: sent.after(third),
                renewing: false,
                unanswered: false,
                // Several tries have to fit into what is left of the TTL.
                backoff: Backoff::new((third / 10).max(Duration::from_millis(5)), third / 3),
            }),
            min_hold_ends: sent.after(granted.min_hold),
            max_hold_ends: granted.max_hold.map_or(Tick::NEVER, |m| sent.after(m)),
            lease: granted.lease,
            token: granted.token,
            ttl,
            renews: granted.renews,
            acquired_at: sent,
            pid: granted.pid,
            keeper_id: AtomicU64::new(0),
            seq: AtomicU64::new(0),
            lost: OnceLock::new(),
        }
    }

    pub(crate) fn lease(&self) -> &LeaseRef {
        &self.lease
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.token
    }

    pub(crate) fn ttl(&self) -> Ttl {
        self.ttl
    }

    pub(crate) fn acquired_at(&self) -> Tick {
        self.acquired_at
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Cancelled when the lease is lost.
    pub(crate) fn lost(&self) -> &CancellationToken {
        let token = self.lost.get_or_init(CancellationToken::new);
        // Either `lose` finds the token, or we find that the lease was lost before.
        if self.lost_reason().is_some() {
            token.cancel();
        }
        token
    }

    pub(crate) fn keeper_id(&self) -> u64 {
        self.keeper_id.load(Ordering::Acquire)
    }

    pub(crate) fn set_keeper_id(&self, id: u64) {
        self.keeper_id.store(id, Ordering::Release);
    }

    /// The sequence of the next write (S7).
    pub(crate) fn next_seq(&self) -> u64 {
        self.seq.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Is the lease good right now? Compares the clock with the deadline; no I/O.
    pub(crate) fn check(&self, clock: &Clock) -> Result<()> {
        self.lapse(clock.now());
        match self.state().phase {
            Phase::Held => Ok(()),
            Phase::Lost(reason) => Err(self.lost_error(reason)),
            Phase::Ended => Err(self.lost_error(LostReason::NotHeld)),
        }
    }

    /// As [`check`](Self::check), for whoever does not ask why.
    pub(crate) fn is_good(&self, now: Tick) -> bool {
        self.lapse(now);
        self.state().phase == Phase::Held
    }

    pub(crate) fn lost_error(&self, reason: LostReason) -> Error {
        Error::lost(format!("lock lost: {reason}"))
            .with("name", format_args!("{:?}", self.lease.name))
            .with("token", self.token)
    }

    /// How much longer the holder may believe; `None` where the lease does not lapse.
    pub(crate) fn remaining(&self, clock: &Clock) -> Option<Duration> {
        let now = clock.now();
        let state = self.state();
        match state.phase {
            Phase::Held => {
                let deadline = state.deadline.min(self.max_hold_ends);
                (deadline != Tick::NEVER).then(|| deadline.since(now))
            }
            Phase::Lost(_) | Phase::Ended => Some(Duration::ZERO),
        }
    }

    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        match self.state().phase {
            Phase::Lost(reason) => Some(reason),
            Phase::Held | Phase::Ended => None,
        }
    }

    /// The rest of the minimum hold.
    pub(crate) fn linger(&self, now: Tick) -> Duration {
        self.min_hold_ends.since(now)
    }

    pub(crate) fn lapses(&self) -> Tick {
        self.state().lapses
    }

    /// Declares the lease lost where its time is up.
    pub(crate) fn lapse(&self, now: Tick) {
        let reason = {
            let state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            if now >= state.deadline {
                LostReason::Unconfirmed
            } else if now >= self.max_hold_ends {
                LostReason::MaxHold
            } else {
                return;
            }
        };
        self.lose(reason);
    }

    /// Declares the lease lost, once and for good.
    pub(crate) fn lose(&self, reason: LostReason) {
        {
            let mut state = self.state();
            if state.phase != Phase::Held {
                return;
            }
            state.phase = Phase::Lost(reason);
        }
        reason.report(self);
        if let Some(lost) = self.lost.get() {
            lost.cancel();
        }
    }

    /// Gives the lease up. Returns why it was lost before, if it was; `None` for a second call.
    pub(crate) fn end(&self) -> Option<Option<LostReason>> {
        let mut state = self.state();
        let before = std::mem::replace(&mut state.phase, Phase::Ended);
        match before {
            Phase::Held => Some(None),
            Phase::Lost(reason) => Some(Some(reason)),
            Phase::Ended => None,
        }
    }

    /// When the keeper has to look at this lease next.
    pub(crate) fn next_event(&self) -> Tick {
        let state = self.state();
        if state.phase != Phase::Held {
            return Tick::NEVER;
        }
        let end = state.deadline.min(self.max_hold_ends);
        if self.renews && !state.renewing {
            end.min(state.renew_at)
        } else {
            end
        }
    }

    /// True where a renewal is due at `now`; it is then under way until
    /// [`end_renewal`](Self::end_renewal).
    pub(crate) fn begin_renewal(&self, now: Tick) -> bool {
        let mut state = self.state();
        let due =
            self.renews && state.phase == Phase::Held && !state.renewing && now >= state.renew_at;
        state.renewing |= due;
        due
    }

    /// How long a renewal waits for its answer: so short that a second one still fits before the
    /// lease is lost.
    pub(crate) fn renewal_limit(&self, request_limit: Duration) -> Duration {
        self.ttl
            .duration()
            .map_or(request_limit, |ttl| request_limit.min(ttl / 4))
    }

    /// True where the last renewal was not answered.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.state().unanswered
    }

    /// Takes the answer to a renewal that was sent at `sent`.
    pub(crate) fn end_renewal(&self, answer: &Renewal, sent: Tick, now: Tick) {
        // A lease that ran out while the answer was on its way is not revived (L5).
        self.lapse(now);
        let mut state = self.state();
        state.renewing = false;
        state.unanswered = matches!(answer, Renewal::Unknown(_));
        if state.phase != Phase::Held {
            return;
        }
        let third = self.ttl.duration().map_or(VERIFY_PERIOD, |d| d / 3);
        match answer {
            Renewal::Renewed | Renewal::StillHeld => {
                if matches!(answer, Renewal::Renewed) {
                    let deadline = belief(self.ttl).map_or(Tick::NEVER, |b| sent.after(b));
                    state.deadline = state.deadline.max(deadline);
                    state.lapses = lapse_bound(self.ttl, now);
                }
                state.renew_at = sent.after(third);
                state.backoff.reset();
            }
            Renewal::Unknown(_) => {
                // It may have been applied, so the store may hold the lease longer than we believe.
                state.lapses = state.lapses.max(lapse_bound(self.ttl, now));
                let pause = state.backoff.next();
                state.renew_at = now.after(pause);
            }
            Renewal::Lost => {
                drop(state);
                self.lose(LostReason::NotHeld);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment, so a panic elsewhere does not spoil the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// By when the store has let a lease lapse that it extended at the latest at `now`, though its
/// clock may run 2 % slower than ours.
fn lapse_bound(ttl: Ttl, now: Tick) -> Tick {
    ttl.duration()
        .map_or(Tick::NEVER, |d| now.after(d * 102 / 100))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::HolderId;

    const TTL: Duration = Duration::from_secs(3);

    fn held(sent: Tick, max_hold: Option<Duration>) -> Held {
        Held::new(Granted {
            lease: LeaseRef {
                name: "a".parse().unwrap(),
                holder: HolderId::random(),
                token: Some(FencingToken::MIN),
            },
            token: FencingToken::MIN,
            ttl: Ttl::new(TTL).unwrap(),
            sent,
            answered: sent.after(Duration::from_millis(500)),
            renews: true,
            min_hold: Duration::ZERO,
            max_hold,
            pid: 1,
        })
    }

    fn at(millis: u64) -> Tick {
        Tick::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn belief_ends_before_a_store_that_runs_two_percent_fast_lets_go() {
        for millis in [100, 101, 1_000, 30_000, 31_536_000_000] {
            let ttl = Duration::from_millis(millis);
            let belief = belief(Ttl::new(ttl).unwrap()).unwrap();
            assert!(belief * 102 / 100 < ttl, "{ttl:?}");
            assert!(belief > ttl * 9 / 10, "{ttl:?}");
        }
    }

    #[test]
    fn belief_counts_from_the_sending_and_ends_for_good() {
        let held = held(at(1_000), None);
        held.lapse(at(3_800));
        assert_eq!(held.lost_reason(), None);
        held.lapse(at(4_000));
        assert_eq!(held.lost_reason(), Some(LostReason::Unconfirmed));
        assert!(held.lost().is_cancelled());
        assert!(!held.begin_renewal(at(4_000)));
        held.end_renewal(&Renewal::Renewed, at(3_900), at(4_001));
        assert_eq!(held.lost_reason(), Some(LostReason::Unconfirmed));
    }

    #[test]
    fn a_renewal_extends_from_its_own_sending() {
        let held = held(at(0), None);
        assert!(!held.begin_renewal(at(999)));
        assert!(held.begin_renewal(at(1_000)));
        assert!(!held.begin_renewal(at(1_001)), "one at a time");
        held.end_renewal(&Renewal::Renewed, at(1_000), at(2_500));
        held.lapse(at(3_800));
        assert_eq!(held.lost_reason(), None);
        held.lapse(at(4_000));
        assert_eq!(held.lost_reason(), Some(LostReason::Unconfirmed));
    }

    #[test]
    fn an_unknown_answer_extends_nothing() {
        let held = held(at(0), None);
        assert!(held.begin_renewal(at(1_000)));
        let unknown = Renewal::Unknown(Error::indeterminate("silence"));
        held.end_renewal(&unknown, at(1_000), at(2_000));
        assert!(held.lapses() >= at(5_000), "the store may have extended it");
        held.lapse(at(3_000));
        assert_eq!(held.lost_reason(), Some(LostReason::Unconfirmed));
    }

    #[test]
    fn an_answer_that_comes_too_late_revives_nothing() {
        let held = held(at(0), None);
        assert!(held.begin_renewal(at(1_000)));
        held.end_renewal(&Renewal::Renewed, at(1_000), at(2_999));
        assert_eq!(held.lost_reason(), Some(LostReason::Unconfirmed));
    }

    #[test]
    fn answers_after_the_end_do_not_count() {
        let held = held(at(0), None);
        assert!(held.begin_renewal(at(1_000)));
        assert_eq!(held.end(), Some(None));
        held.end_renewal(&Renewal::Lost, at(1_000), at(1_001));
        assert!(!held.lost().is_cancelled());
        assert_eq!(held.end(), None);
    }

    #[test]
    fn the_longest_hold_ends_it() {
        let held = held(at(0), Some(Duration::from_millis(1_500)));
        assert!(held.next_event() <= at(1_000));
        held.lapse(at(1_500));
        assert_eq!(held.lost_reason(), Some(LostReason::MaxHold));
    }
}
