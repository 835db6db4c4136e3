//! What the core's files expect around them.

pub(crate) mod sync {
    pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard, PoisonError};
    /// One step: what it is made from is cheap and harmless to make twice.
    pub(crate) use std::sync::OnceLock;

    pub(crate) mod atomic {
        pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    }
}

pub(crate) mod backoff {
    use std::time::Duration;

    /// Pauses that do not grow: there is no time here but what a model lets pass.
    #[derive(Debug)]
    pub(crate) struct Backoff(Duration);

    impl Backoff {
        pub(crate) fn new(floor: Duration, _: Duration) -> Self {
            Self(floor)
        }

        pub(crate) fn next(&mut self) -> Duration {
            self.0
        }

        pub(crate) fn reset(&mut self) {}
    }
}

pub(crate) mod clock {
    pub(crate) use fencelock::clock::{Clock, Tick};
}

pub(crate) mod error {
    pub(crate) use fencelock::error::{Error, ErrorKind, Result};
}

pub(crate) mod lease {
    pub(crate) use fencelock::lease::{LeaseRef, LeaseStore, Release, Renewal, Ttl};
}

pub(crate) mod name {
    pub(crate) use fencelock::LockName;
}

pub(crate) mod token {
    pub(crate) use fencelock::FencingToken;
}

pub(crate) mod driver {
    use std::future::Future;
    use std::time::Duration;

    use fencelock::Result;

    #[derive(Debug)]
    pub(crate) struct Driver;

    impl Driver {
        pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> Result<()> {
            super::runtime::spawn(work);
            Ok(())
        }
    }

    pub(crate) async fn within<T>(_: Duration, work: impl Future<Output = T>) -> Option<T> {
        Some(work.await)
    }
}

pub(crate) mod runtime {
    use std::cell::RefCell;
    use std::future::Future;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use fencelock::clock::Clock;
    use tokio::sync::Notify;

    /// The time of one execution.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Time {
        nanos: Arc<AtomicU64>,
        passed: Arc<Notify>,
    }

    thread_local! {
        // All threads of an execution are one thread of the host.
        static TIME: RefCell<Time> = RefCell::default();
    }

    impl Time {
        /// Begins an execution.
        pub(crate) fn begin() -> Self {
            let time = Self::default();
            TIME.set(time.clone());
            time
        }

        pub(crate) fn clock(&self) -> Clock {
            Clock::manual(Arc::clone(&self.nanos))
        }

        pub(crate) fn pass(&self, by: Duration) {
            let by = u64::try_from(by.as_nanos()).unwrap();
            self.nanos.fetch_add(by, Ordering::SeqCst);
            self.passed.notify_waiters();
        }

        fn now(&self) -> u64 {
            self.nanos.load(Ordering::SeqCst)
        }
    }

    pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
        drop(shuttle::future::spawn(work));
    }

    pub(crate) async fn sleep(duration: Duration) {
        let time = TIME.with_borrow(Time::clone);
        let until = time.now() + u64::try_from(duration.as_nanos()).unwrap();
        loop {
            let mut passed = std::pin::pin!(time.passed.notified());
            passed.as_mut().enable();
            if time.now() >= until {
                return;
            }
            passed.await;
        }
    }
}
