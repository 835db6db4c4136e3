//! Hints for waiters: none is lost where the engine gives any.

use super::*;
use crate::lease::Watch;

/// Far more than a hint takes, and far less than a lease lasts.
const HEARD_WITHIN: Duration = Duration::from_secs(20);

/// A watch whose first changes, from before it was made, are over. `None` where the backend has no
/// notifications; then a call must not answer.
async fn quiet_watch(
    lab: &Lab<'_>,
    store: &Arc<dyn LeaseStore>,
    name: &str,
) -> Option<Box<dyn Watch>> {
    let mut watch = store.watch(&lock(name)).await.expect("a watch is made");
    if !lab.a.profile().wakes_waiters {
        return None;
    }
    // Spurious answers are fine, but a watch that never rests would hide a lost one.
    for _ in 0..100 {
        if !heard(&mut watch, Duration::from_millis(100)).await {
            return Some(watch);
        }
    }
    panic!("the watch of a quiet lock does not rest");
}

async fn heard(watch: &mut Box<dyn Watch>, within: Duration) -> bool {
    tokio::time::timeout(within, watch.changed()).await.is_ok()
}

pub(super) async fn a_watcher_hears_of_a_release(lab: &Lab<'_>) {
    for (taker, watcher) in [(&lab.a, &lab.b), (&lab.a, &lab.a)] {
        let taken = take(taker, long("heard")).await;
        let watch = quiet_watch(lab, watcher, "heard").await;
        if let Some(mut watch) = watch {
            let waiting = tokio::spawn(async move { heard(&mut watch, HEARD_WITHIN).await });
            // Most often it waits by now; if not, the next case's rule applies.
            tokio::time::sleep(Duration::from_millis(20)).await;
            give(taker, &taken).await;
            assert!(waiting.await.unwrap(), "the release was not heard");
        } else {
            give(taker, &taken).await;
        }
        let next = take(watcher, long("heard")).await;
        give(watcher, &next).await;
    }
}

pub(super) async fn a_watcher_hears_of_a_break(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("heard-break")).await;
    let Some(mut watch) = quiet_watch(lab, &lab.b, "heard-break").await else {
        return;
    };
    lab.a.break_lock(&taken.request.name).await.unwrap();
    assert!(
        heard(&mut watch, HEARD_WITHIN).await,
        "the break was not heard"
    );
}

pub(super) async fn a_change_before_the_first_call_is_heard(lab: &Lab<'_>) {
    if !lab.a.profile().wakes_waiters {
        return;
    }
    for round in 0..20 {
        let name = format!("early-{round}");
        let taken = take(&lab.a, long(&name)).await;
        let mut watch = lab.b.watch(&taken.request.name).await.unwrap();
        give(&lab.a, &taken).await;
        assert!(heard(&mut watch, HEARD_WITHIN).await, "round={round}");
    }
}

pub(super) async fn a_cancelled_wait_loses_no_change(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("cancelled")).await;
    let Some(mut watch) = quiet_watch(lab, &lab.b, "cancelled").await else {
        return;
    };
    assert!(!heard(&mut watch, Duration::from_millis(10)).await);
    give(&lab.a, &taken).await;
    assert!(
        heard(&mut watch, HEARD_WITHIN).await,
        "the change after the wait"
    );
}

pub(super) async fn many_waiters_all_hear(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("crowd")).await;
    if !lab.a.profile().wakes_waiters {
        return;
    }
    let mut watches = Vec::new();
    for i in 0..10 {
        watches.push(lab.each()[i % 2].watch(&taken.request.name).await.unwrap());
    }
    give(&lab.a, &taken).await;
    for (i, watch) in watches.iter_mut().enumerate() {
        assert!(heard(watch, HEARD_WITHIN).await, "watch={i}");
    }
}
