//! An acquire under way: asked, queued and asked again, until it is granted or given up.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::backoff::Backoff;
use crate::clock::{Tick, unix_micros};
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::guard::LockGuard;
use crate::held::{Granted, Held, LostReason, belief};
use crate::keeper::silent;
use crate::lease::{
    AcquireRequest, Attempt, Contention, Grant, HolderId, LeaseRef, NoWatch, Watch,
};
use crate::locks::Inner;
use crate::random;
use crate::runtime;

/// The longest pause where it does: a notification is only a hint, and may be lost.
const NOTIFIED_POLL_MAX: Duration = Duration::from_secs(5);

/// How long the answer to a request is waited for, however short the wait for the lock.
const ANSWER_MIN: Duration = Duration::from_secs(1);

/// Pauses between retries of a request that failed.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// An acquire under way. Runs on the driver to its end, whatever becomes of the caller, and returns
/// guards, which give back in `Drop` what nobody takes.
pub(crate) struct Operation {
    pub(crate) locks: Arc<Inner>,
    pub(crate) request: AcquireRequest,
    pub(crate) wait: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) renews: bool,
    /// Cancelled when the caller's future is gone.
    pub(crate) abandoned: CancellationToken,
}

enum Answer {
    Granted(LockGuard),
    Held(Contention),
}

impl Operation {
    /// One answer: a guard, or `None` where somebody else holds it.
    pub(crate) async fn ask_once(mut self) -> Result<Option<LockGuard>> {
        let span = self.span();
        let answer = self.attempt(Tick::NEVER).instrument(span).await;
        count(match &answer {
            Ok(Answer::Granted(_)) => "granted",
            Ok(Answer::Held(_)) => "held",
            Err(error) => error.kind().as_str(),
        });
        match answer? {
            Answer::Granted(guard) => Ok(Some(guard)),
            Answer::Held(_) => Ok(None),
        }
    }

    /// A guard, or `Timeout` at the end of the wait.
    pub(crate) async fn wait_for_it(mut self) -> Result<LockGuard> {
        let started = self.locks.clock.now();
        let deadline = self.wait.map_or(Tick::NEVER, |wait| started.after(wait));
        let span = self.span();
        let answer = self.contend(deadline).instrument(span).await;
        count(match &answer {
            Ok(_) => "granted",
            Err(error) => error.kind().as_str(),
        });
        let guard = answer?;
        let waited = guard.acquired_at().since(started);
        metrics::histogram!("fencelock_wait_seconds").record(waited.as_secs_f64());
        Ok(guard)
    }

    fn span(&self) -> Span {
        tracing::debug_span!("fencelock.acquire", name = %self.request.name)
    }

    /// Tries at once where nobody queues, else queues and then tries until granted.
    async fn contend(&mut self, deadline: Tick) -> Result<LockGuard> {
        let locks = Arc::clone(&self.locks);
        let name = self.request.name.clone();
        let mut contention = None;
        if !locks.queues.has_waiters(&name) {
            match self.attempt_or_retry(deadline, false).await? {
                Answer::Granted(guard) => return Ok(guard),
                Answer::Held(held) => contention = Some(held),
            }
        }
        let place = locks.queues.join(&name);
        let Some(_turn) = self.until(deadline, place.turn()).await else {
            return Err(self.timed_out(contention.as_ref()));
        };
        // Made before the next attempt, so that no change between the two is missed.
        let watching = self.until(deadline, self.watch()).await;
        let Some((mut watch, notified)) = watching else {
            return Err(self.timed_out(contention.as_ref()));
        };
        let (shortest, longest) = locks.store.profile().poll;
        let mut poll = Backoff::new(shortest, longest);
        let mut answered = contention.is_some();
        loop {
            let held = match self.attempt_or_retry(deadline, answered).await? {
                Answer::Granted(guard) => return Ok(guard),
                Answer::Held(held) => held,
            };
            answered = true;
            let pause = pause(&held, notified, &mut poll);
            let changed = async {
                tokio::select! {
                    biased;
                    () = watch.changed() => {}
                    () = place.freed() => {}
                    () = runtime::sleep(pause) => {}
                }
            };
            if self.until(deadline, changed).await.is_none() {
                return Err(self.timed_out(Some(&held)));
            }
        }
    }

    /// What `work` yields, or `None` at the deadline or where the caller is gone.
    async fn until<T>(&self, deadline: Tick, work: impl Future<Output = T>) -> Option<T> {
        let left = deadline.since(self.locks.clock.now());
        tokio::select! {
            biased;
            () = self.abandoned.cancelled() => None,
            value = work => Some(value),
            () = runtime::sleep(left), if deadline != Tick::NEVER => None,
        }
    }

    /// A source of hints, and whether it gives any: without one, waiting is polling.
    async fn watch(&self) -> (Box<dyn Watch>, bool) {
        let limit = self.locks.request_limit;
        let store = &self.locks.store;
        let watch = within(limit, store.watch(&self.request.name))
            .await
            .unwrap_or_else(|| Err(silent("watch", limit)));
        match watch {
            Ok(watch) => (watch, store.profile().wakes_waiters),
            Err(error) => {
                tracing::warn!(name = %self.request.name, %error, "no notifications; polling instead");
                (Box::new(NoWatch), false)
            }
        }
    }

    /// An attempt that rides out a store that does not serve: until the deadline where it has
    /// `answered` before, since a fail-over passes; else for a while only, since the reason may be a
    /// wrong address.
    async fn attempt_or_retry(&mut self, deadline: Tick, answered: bool) -> Result<Answer> {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut give_up = None;
        loop {
            let error = match self.attempt(deadline).await {
                Err(error) => error,
                answer => return answer,
            };
            let passes = match error.kind() {
                // A grant whose answer took longer than its lease lasts was not taken.
                ErrorKind::Unavailable | ErrorKind::Lost => true,
                ErrorKind::Indeterminate => answered,
                _ => false,
            };
            let (pause, now) = (backoff.next(), self.locks.clock.now());
            let patience = if answered {
                deadline
            } else {
                deadline.min(now.after(self.locks.patience))
            };
            let give_up = *give_up.get_or_insert(patience);
            if !passes || self.abandoned.is_cancelled() || now.after(pause) >= give_up {
                return Err(error);
            }
            tracing::debug!(name = %self.request.name, %error, "store does not serve; trying again");
            runtime::sleep(pause).await;
        }
    }

    /// One request, repeated as the same request while its outcome is unknown (L7): not much longer
    /// than until `deadline`, and not for longer than the store's users have patience.
    async fn attempt(&mut self, deadline: Tick) -> Result<Answer> {
        let locks = Arc::clone(&self.locks);
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut maybe_granted = false;
        let mut give_up = None;
        self.request.info.since_unix_us = unix_micros();
        loop {
            // A grant counts from before its request is sent (L4).
            let sent = locks.clock.now();
            let give_up = *give_up.get_or_insert(
                sent.after(locks.patience)
                    .min(deadline.max(sent.after(ANSWER_MIN))),
            );
            let left = give_up.since(sent).min(locks.request_limit);
            let answer = within(left, locks.store.acquire(&self.request))
                .await
                .unwrap_or_else(|| Err(silent("acquire", left)));
            let error = match answer {
                Ok(Attempt::Granted(grant)) => {
                    let answer = self.accept(grant, sent);
                    if answer.is_err() {
                        // What came too late is given back; the next request must not be.
                        self.request.holder = HolderId::random();
                    }
                    return answer;
                }
                Ok(Attempt::Held(contention)) => return Ok(Answer::Held(contention)),
                Err(error) => error,
            };
            maybe_granted |= error.kind() == ErrorKind::Indeterminate;
            if !maybe_granted {
                return Err(error);
            }
            let retriable = matches!(
                error.kind(),
                ErrorKind::Indeterminate | ErrorKind::Unavailable
            );
            let pause = backoff.next();
            if !retriable
                || self.abandoned.is_cancelled()
                || locks.clock.now().after(pause) >= give_up
            {
                self.give_back_whatever_was_granted();
                // The next request must not be given back with this one.
                self.request.holder = HolderId::random();
                return Err(if retriable {
                    error.into_kind(ErrorKind::Indeterminate)
                } else {
                    error
                });
            }
            tracing::debug!(name = %self.request.name, %error, "acquire unconfirmed; asking again");
            runtime::sleep(pause).await;
        }
    }

    fn accept(&self, grant: Grant, sent: Tick) -> Result<Answer> {
        let locks = &self.locks;
        let answered = locks.clock.now();
        let lease = LeaseRef {
            name: self.request.name.clone(),
            holder: self.request.holder,
            token: Some(grant.token),
        };
        let held = Arc::new(Held::new(Granted {
            lease,
            token: grant.token,
            ttl: grant.ttl,
            sent,
            answered,
            renews: self.renews,
            min_hold: self.min_hold,
            max_hold: self.max_hold,
            pid: locks.pid,
        }));
        if belief(grant.ttl).is_some_and(|belief| answered >= sent.after(belief)) {
            // Whoever asks for a lock must not get one that may have lapsed already.
            self.give_back_whatever_was_granted();
            return Err(held.lost_error(LostReason::Unconfirmed));
        }
        // In the keeper's care before anybody sees the grant.
        locks.keeper.keep(&locks.driver, &held)?;
        tracing::debug!(name = %self.request.name, token = %grant.token, "lock acquired");
        Ok(Answer::Granted(LockGuard::new(held, Arc::clone(locks))))
    }

    fn give_back_whatever_was_granted(&self) {
        let lease = LeaseRef {
            name: self.request.name.clone(),
            holder: self.request.holder,
            token: None,
        };
        let lapses = match self.request.ttl.duration() {
            Some(ttl) => self.locks.clock.now().after(ttl * 102 / 100),
            None => Tick::NEVER,
        };
        Inner::give_back(&self.locks, lease, Duration::ZERO, lapses);
    }

    fn timed_out(&self, contention: Option<&Contention>) -> Error {
        let error = Error::new(
            ErrorKind::Timeout,
            "the lock is held by somebody else; the wait for it is over",
        )
        .with("name", format_args!("{:?}", self.request.name));
        match contention.and_then(|c| c.holder.as_ref()) {
            Some(info) => {
                let error = error.with("host", &info.host).with("pid", info.pid);
                match &info.label {
                    Some(label) => error.with("label", format_args!("{label:?}")),
                    None => error,
                }
            }
            None => error,
        }
    }
}

/// How long to wait for a hint before asking again: until the lock lapses, with some jitter so that
/// not all wake at once; or by growing pauses where the engine sends no hints.
fn pause(held: &Contention, notified: bool, poll: &mut Backoff) -> Duration {
    let at_the_most = if notified {
        NOTIFIED_POLL_MAX
    } else {
        poll.next()
    };
    let lapse = held.free_in.map_or(at_the_most, |free_in| {
        free_in + random::between(Duration::from_millis(1), Duration::from_millis(25))
    });
    lapse.min(at_the_most)
}

fn count(outcome: &'static str) {
    metrics::counter!("fencelock_acquires_total", "outcome" => outcome).increment(1);
}
