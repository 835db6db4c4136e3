//! The one place that starts tasks of the driver's runtime and waits for time to pass.
//!
//! That runtime is tokio's. Under the feature `simulation` a test may put a world of its own in its
//! place; without the feature nothing here costs anything.

use std::future::Future;
use std::time::Duration;

#[cfg(feature = "simulation")]
use crate::simulation;

/// Runs `work` as a task of the runtime that the caller is on.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    #[cfg(feature = "simulation")]
    if let Some(world) = simulation::current() {
        return world.spawn(Box::pin(work));
    }
    tokio::spawn(work);
}

/// Resolves after `duration`.
pub(crate) async fn sleep(duration: Duration) {
    #[cfg(feature = "simulation")]
    {
        let world = simulation::current().map(|world| world.sleep(duration));
        if let Some(asleep) = world {
            return asleep.await;
        }
    }
    tokio::time::sleep(duration).await;
}

/// What `work` yields, or `None` where it takes longer than `limit`.
pub(crate) async fn timeout<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        value = work => Some(value),
        () = sleep(limit) => None,
    }
}
