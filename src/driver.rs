//! The thread on which fencelock does its own work.
//!
//! Renewals must go on while the user's executor is blocked or starved (workers that were alive
//! were declared dead elsewhere for this reason), and a grant must be given back even where the
//! caller's future is dropped. So every store operation that does not end at once runs on a
//! current-thread tokio runtime of our own, on a thread of its own. Nothing here needs a runtime
//! in the calling thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind, Result};
use crate::runtime;
#[cfg(feature = "simulation")]
use crate::simulation;

/// A future that owns all it needs.
pub(crate) type Owned<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The runtime thread, started when it is first needed.
#[derive(Debug, Default)]
pub(crate) struct Driver {
    running: OnceLock<Running>,
}

#[derive(Debug)]
struct Running {
    handle: Handle,
    stop: CancellationToken,
}

impl Driver {
    /// The handle of the runtime.
    ///
    /// # Errors
    /// `Unavailable` where no thread can be started.
    pub(crate) fn handle(&self) -> Result<&Handle> {
        if let Some(running) = self.running.get() {
            return Ok(&running.handle);
        }
        let started = start()?;
        // A thread that lost this race stops when its `Running` is dropped.
        Ok(&self.running.get_or_init(|| started).handle)
    }

    /// Starts `work` as a task of its own.
    ///
    /// # Errors
    /// `Unavailable` where no thread can be started.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        #[cfg(feature = "simulation")]
        if let Some(world) = simulation::current() {
            world.spawn(Box::pin(work));
            return Ok(());
        }
        self.handle()?.spawn(work);
        Ok(())
    }

    /// Polls `work` once in place, inside the driver's context.
    fn poll_once<T>(&self, work: &mut Owned<T>) -> Result<Poll<T>> {
        // The task's own waker replaces this one at its first poll.
        let mut nobody = Context::from_waker(Waker::noop());
        #[cfg(feature = "simulation")]
        if simulation::current().is_some() {
            return Ok(work.as_mut().poll(&mut nobody));
        }
        let _context = self.handle()?.enter();
        Ok(work.as_mut().poll(&mut nobody))
    }

    /// Runs `work` to its end whatever becomes of the caller.
    ///
    /// It is polled once in place, inside the driver's context: what ends at once costs no task.
    /// Otherwise it goes on as a task of the driver. If the returned future is dropped, `work`
    /// still ends, and what it returned is dropped; so it returns values that clean up in `Drop`.
    pub(crate) async fn run<T: Send + 'static>(&self, mut work: Owned<T>) -> Result<T> {
        if let Poll::Ready(value) = self.poll_once(&mut work)? {
            return Ok(value);
        }
        let (sender, receiver) = oneshot::channel();
        self.spawn(async move {
            // An abandoned receiver drops the value, which is the clean-up.
            let _ = sender.send(work.await);
        })?;
        receiver.await.map_err(|_| {
            Error::new(
                ErrorKind::Indeterminate,
                "fencelock's runtime thread ended during the operation",
            )
        })
    }
}

/// What `work` yields, or `None` where it takes longer than `limit`.
///
/// Starts no timer for what ends at its first poll.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let first = std::future::poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
    match first {
        Poll::Ready(value) => Some(value),
        Poll::Pending => runtime::timeout(limit, work).await,
    }
}

/// Runs `work`, which blocks, where that stops nobody.
///
/// Inside a tokio runtime, the driver's among them, on its pool. That pool is as old as the runtime: a
/// child that was forked and opens a store again gets a new one, while the process-wide pool, which
/// serves callers without a runtime, does not survive a fork.
pub(crate) fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T>> + Send {
    // Started here and not at the first poll, so that several run at the same time.
    let started = match Handle::try_current() {
        Ok(handle) => Ok(handle.spawn_blocking(work)),
        Err(_) => Err(blocking::unblock(work)),
    };
    async move {
        match started {
            Ok(on_the_runtime) => on_the_runtime.await.map_err(|error| {
                Error::indeterminate("the work ended without an answer").with_source(error)
            }),
            Err(on_the_process) => Ok(on_the_process.await),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn start() -> Result<Running> {
    let failed = |e: std::io::Error| {
        Error::unavailable("fencelock's runtime thread cannot be started").with_source(e)
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed)?;
    let handle = runtime.handle().clone();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    std::thread::Builder::new()
        .name("fencelock".to_owned())
        .spawn(move || runtime.block_on(stopped.cancelled()))
        .map_err(failed)?;
    Ok(Running { handle, stop })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn ready_work_needs_no_task() {
        let driver = Driver::default();
        let thread = std::thread::current().id();
        let ran_on =
            pollster::block_on(driver.run(Box::pin(async move { std::thread::current().id() })));
        assert_eq!(ran_on.unwrap(), thread);
    }

    #[test]
    fn abandoned_work_still_ends_and_its_value_is_dropped() {
        struct Flag(Arc<AtomicBool>, std::sync::mpsc::Sender<()>);
        impl Drop for Flag {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
                self.1.send(()).unwrap();
            }
        }
        let driver = Driver::default();
        let dropped = Arc::new(AtomicBool::new(false));
        let (go, gate) = oneshot::channel::<()>();
        let (sender, done) = std::sync::mpsc::channel();
        let flag = Flag(Arc::clone(&dropped), sender);
        let mut call = Box::pin(driver.run(Box::pin(async move {
            gate.await.unwrap();
            flag
        })));
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        drop(call);
        assert!(!dropped.load(Ordering::SeqCst));
        go.send(()).unwrap();
        done.recv().unwrap();
        assert!(dropped.load(Ordering::SeqCst));
    }
}
