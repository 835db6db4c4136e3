//! Watching the command and the lease at the same time, until one of them ends.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use fencelock::clock::{Clock, Tick};
use fencelock::{LockGuard, LostReason};
use rustix::process::Signal;

use super::Plan;
use super::child::{Child, Event};
use super::group::Group;
use super::terminal::{Terminal, stop_self};
use super::warden::{READY_LIMIT, Warden};
use crate::failure::say;
use crate::signals::Signals;

/// The part of a TTL that is kept for ending the command before the lease lapses. Renewals come
/// after a third of it, so that two fail before this is reached.
const GRACE_SHARE: u32 = 4;

/// The longest grace where the lease is certainly gone: somebody else may hold it already.
const GRACE_WHEN_GONE: Duration = Duration::from_secs(1);

/// How often the lease is looked at.
const LOOK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(2));

/// How often, as a part of the TTL and within bounds, once a renewal is due: until the warden hears
/// of it, a stop of ours lets it kill a command whose lease is good.
const LOOK_FOR_RENEWAL: (u32, Duration, Duration) =
    (1_000, Duration::from_millis(2), Duration::from_millis(250));

/// How often the group is looked at once the command itself has ended and others of it have not.
const REST_LOOK: Duration = Duration::from_millis(20);

/// How the command ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// By itself, while the lock was ours.
    Own,
    /// By us.
    Ended(Why),
    /// By itself or by the warden, and when that was seen the lock was no longer ours.
    Overtaken(Why),
}

/// Why the command was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Renewals failed for so long that the lease is about to lapse.
    Unrenewed,
    /// The lease is lost.
    Lost(LostReason),
    /// The warden killed it, as we did not say in time that the lease was renewed.
    Warden,
    /// `--max-hold` is over.
    MaxHold,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unrenewed => {
                f.write_str("no renewal was confirmed, and the lease is about to lapse")
            }
            Self::Lost(reason) => reason.fmt(f),
            Self::Warden => f.write_str(
                "fencelock was stopped or held up until the end of the last lease that its warden knew of",
            ),
            Self::MaxHold => f.write_str("the longest hold (--max-hold) is over"),
        }
    }
}

/// Until when `guard` may be believed, on the clock that the warden shares. Never later than the
/// guard's own deadline, as the clock is read before the guard is asked.
pub(super) fn belief_ends(guard: &LockGuard) -> Tick {
    let now = Clock::system().now();
    guard
        .remaining()
        .map_or(Tick::NEVER, |left| now.after(left))
}

/// What is known about the command under way.
pub(super) struct Supervision<'a> {
    guard: &'a LockGuard,
    group: Group,
    warden: Option<Warden>,
    liveness: Option<&'a OwnedFd>,
    terminal: Option<&'a Terminal>,
    clock: Clock,
    /// How long before the lease's end the command is asked to end.
    grace: Duration,
    kill_after: Duration,
    max_hold_ends: Tick,
    /// What the warden was last told.
    told: Tick,
    warden_has_killed: bool,
}

impl<'a> Supervision<'a> {
    pub(super) fn new(
        plan: &Plan,
        guard: &'a LockGuard,
        group: Group,
        warden: Warden,
        liveness: Option<&'a OwnedFd>,
        terminal: Option<&'a Terminal>,
    ) -> Self {
        let clock = Clock::system();
        let share = guard
            .ttl()
            .duration()
            .map_or(Duration::MAX, |ttl| ttl / GRACE_SHARE);
        Self {
            guard,
            group,
            warden: Some(warden),
            liveness,
            terminal,
            grace: plan.kill_after.min(share),
            kill_after: plan.kill_after,
            max_hold_ends: plan
                .max_hold
                .map_or(Tick::NEVER, |max| clock.now().after(max)),
            told: Tick::from_nanos(0),
            warden_has_killed: false,
            clock,
        }
    }

    /// Returns when the command has ended and is not yet reaped.
    pub(super) async fn until_the_end(&mut self, child: &mut Child, signals: &mut Signals) -> End {
        let why = loop {
            if let Some(why) = self.look().await {
                break why;
            }
            tokio::select! {
                biased;
                event = child.event() => match event {
                    Event::Ended => return self.seen_ended(),
                    Event::Stopped => self.stopped(),
                },
                signal = signals.next() => self.pass_on(signal),
                reason = self.guard.lost() => break Why::Lost(reason),
                () = tokio::time::sleep(self.pause()) => {}
            }
        };
        // After a pause of ours, its end may be older than what we have just found.
        if child.has_ended() {
            return self.seen_ended();
        }
        say(&format!("ending the command: {why}"));
        self.end(why, child, signals).await;
        End::Ended(why)
    }

    pub(super) fn dismiss_warden(&mut self) {
        if let Some(warden) = self.warden.take() {
            self.warden_has_killed |= warden.dismiss();
        }
    }

    /// True where the warden killed the group. Known for good once it is dismissed.
    pub(super) fn warden_has_killed(&self) -> bool {
        self.warden_has_killed
    }

    /// Looks at the clock and the lease: why the command has to end, if it has to.
    async fn look(&mut self) -> Option<Why> {
        self.tell_warden();
        if self.warden_has_killed {
            return Some(Why::Warden);
        }
        if self.clock.now() >= self.max_hold_ends {
            return Some(Why::MaxHold);
        }
        if self.left() > self.grace {
            return None;
        }
        // We may have been stopped, or starved: one try of our own decides.
        let renewed = tokio::time::timeout(self.grace / 4, self.guard.renew()).await;
        self.tell_warden();
        if let Some(reason) = self.guard.lost_reason() {
            return Some(Why::Lost(reason));
        }
        let saved = matches!(renewed, Ok(Ok(()))) && self.left() > self.grace;
        (!saved).then_some(Why::Unrenewed)
    }

    /// The command has ended, and not by us. Where we were stopped for too long ourselves, that was
    /// the warden, whose word alone tells: the lease may have been renewed without its knowledge.
    fn seen_ended(&mut self) -> End {
        self.dismiss_warden();
        match self.guard.lost_reason() {
            Some(reason) => End::Overtaken(Why::Lost(reason)),
            None if self.warden_has_killed => End::Overtaken(Why::Warden),
            None => End::Own,
        }
    }

    fn left(&self) -> Duration {
        self.guard.remaining().unwrap_or(Duration::MAX)
    }

    /// How long until the next look.
    fn pause(&self) -> Duration {
        let to_max_hold = self.max_hold_ends.since(self.clock.now());
        let to_renewal = match self.guard.ttl().duration() {
            // Renewed at a third of the TTL, which is a little later than this: a lease is believed
            // in for a little less than its TTL.
            Some(ttl) => {
                let (part, least, most) = LOOK_FOR_RENEWAL;
                let due = self.left().saturating_sub(ttl * 2 / 3);
                (ttl / 12)
                    .clamp(LOOK.0, LOOK.1)
                    .min(due)
                    .max((ttl / part).clamp(least, most))
            }
            None => LOOK.1,
        };
        to_renewal
            .min(self.left().saturating_sub(self.grace))
            .min(to_max_hold)
    }

    /// Passes the lease's present end on to the warden, and replaces a warden that was killed.
    fn tell_warden(&mut self) {
        let until = belief_ends(self.guard);
        // A clock is read twice, so that an unchanged deadline may look a little later.
        if until <= self.told.after(LOOK.0) || self.guard.lost_reason().is_some() {
            return;
        }
        let told = self.warden.as_mut().map(|warden| warden.until(until));
        match told {
            Some(Ok(())) => self.told = until,
            Some(Err(_)) | None => self.replace_warden(until),
        }
    }

    fn replace_warden(&mut self, until: Tick) {
        self.dismiss_warden();
        if self.warden_has_killed {
            return;
        }
        let limit = READY_LIMIT.min(self.grace);
        let replaced = Warden::start(self.liveness).and_then(|mut warden| {
            let ready = warden
                .guard(self.group, until)
                .and_then(|()| warden.ready(limit));
            match ready {
                Ok(()) => Ok(warden),
                Err(failure) => {
                    // Dropped, it would take us for dead.
                    warden.end();
                    Err(failure)
                }
            }
        });
        match replaced {
            Ok(warden) => {
                self.warden = Some(warden);
                self.told = until;
            }
            // Tried again at the next renewal; until then the death signal stands guard.
            Err(failure) => failure.report(),
        }
    }

    fn pass_on(&self, signal: Signal) {
        self.group.signal(signal);
        match signal {
            // We took this signal over, so stopping is up to us.
            Signal::TSTP => stop_self(),
            // The shell may have brought us to the foreground.
            Signal::CONT => {
                if let Some(terminal) = self.terminal {
                    terminal.hand_on();
                }
            }
            _ => {}
        }
    }

    /// The command was stopped. Where it has the terminal, our caller's shell has to hear of it.
    fn stopped(&self) {
        if let Some(terminal) = self.terminal {
            terminal.stop_with_command();
            self.group.signal(Signal::CONT);
        }
    }

    /// Ends the whole group: TERM, and KILL when the time is up.
    async fn end(&mut self, why: Why, child: &mut Child, signals: &mut Signals) {
        let now = self.clock.now();
        let grace = match why {
            // The lease is renewed on while the command ends, and it is watched below.
            Why::MaxHold => self.kill_after,
            Why::Unrenewed => self.grace.min(self.left()),
            // Another may be granted the lock at any moment now.
            Why::Warden | Why::Lost(LostReason::Unconfirmed) => Duration::ZERO,
            Why::Lost(_) => self.kill_after.min(GRACE_WHEN_GONE),
        };
        let kill_at = now.after(grace);
        self.group.signal(Signal::TERM);
        // A stopped process heeds TERM only once it goes on.
        self.group.signal(Signal::CONT);
        let mut leader_lives = true;
        loop {
            self.tell_warden();
            let now = self.clock.now();
            let lapsed = why == Why::MaxHold && self.left().is_zero();
            if now >= kill_at || lapsed {
                break;
            }
            let mut pause = kill_at.since(now).min(self.pause().max(LOOK.0));
            if !leader_lives {
                if !self.group.has_live_members(true) {
                    return;
                }
                pause = pause.min(REST_LOOK);
            }
            tokio::select! {
                biased;
                event = child.event(), if leader_lives => {
                    leader_lives = event != Event::Ended;
                }
                signal = signals.next() => self.pass_on(signal),
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.group.signal(Signal::KILL);
        while leader_lives {
            leader_lives = child.event().await != Event::Ended;
        }
    }
}
