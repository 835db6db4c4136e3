//! A world of its own for fencelock's core: time, tasks and randomness that a test owns.
//!
//! For fencelock's own tests, and no part of what semver covers. Inside [`enter`], all that the core
//! asks of its surroundings goes to a [`World`], on the thread that entered it: so that one seed is
//! one history, however busy the machine is.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::guard::LockGuard;
use crate::held::Held;
use crate::locks::Locks;

/// Work without a result.
pub type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What the core asks of its surroundings.
pub trait World {
    /// Runs `work` to its end, as a task of its own.
    fn spawn(&self, work: Work);

    /// Resolves after `duration` of this world's time.
    fn sleep(&self, duration: Duration) -> Work;

    /// The next 64 random bits.
    fn random(&self) -> u64;

    /// The wall clock.
    fn unix_micros(&self) -> u64;
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<dyn World>>> = const { RefCell::new(None) };
}

/// Makes `world` the present thread's until the value is dropped.
#[must_use]
pub fn enter(world: Rc<dyn World>) -> Entered {
    Entered {
        before: CURRENT.replace(Some(world)),
    }
}

/// The world that this thread is in.
pub(crate) fn current() -> Option<Rc<dyn World>> {
    CURRENT.with_borrow(Option::clone)
}

/// Leaves a world when it is dropped.
pub struct Entered {
    before: Option<Rc<dyn World>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.before.take());
    }
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered").finish_non_exhaustive()
    }
}

/// What a holder believes, seen from outside: looking changes nothing, as `check()` may, and keeps
/// no lock held.
#[derive(Clone, Debug)]
pub struct Belief {
    held: Arc<Held>,
    clock: Clock,
}

impl Belief {
    /// Would `check()` agree now?
    #[must_use]
    pub fn stands(&self) -> bool {
        self.held
            .remaining(&self.clock)
            .is_none_or(|left| !left.is_zero())
    }
}

impl LockGuard {
    /// What this guard's holder believes, now and later.
    #[doc(hidden)]
    #[must_use]
    pub fn belief(&self) -> Belief {
        let (held, clock) = self.parts();
        Belief { held, clock }
    }
}

/// What [`Locks`] have not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Leases in the keeper's care.
    pub kept: usize,
    /// Releases and raises in the background.
    pub background: usize,
    /// Places in line.
    pub waiters: usize,
    /// Names that somebody waits for.
    pub lines: usize,
}

impl Locks {
    /// What is not finished yet.
    #[doc(hidden)]
    #[must_use]
    pub fn unfinished(&self) -> Unfinished {
        let (kept, background) = self.inner().keeper.load();
        let (waiters, lines) = self.inner().queues.load();
        Unfinished {
            kept,
            background,
            waiters,
            lines,
        }
    }
}
