//! What an operator's instruments are told.

use std::sync::Arc;
use std::time::Duration;

use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{Fenced, FencingToken, Locks, LostReason};
use metrics_exporter_prometheus::PrometheusBuilder;

#[tokio::test]
async fn acquires_losses_and_stale_writes_are_counted() {
    let prometheus = PrometheusBuilder::new().install_recorder().unwrap();
    let store = Arc::new(MemoryStore::new());
    let locks = Locks::from_arc(store);
    let data = Fenced::new(FencedMemory::new());

    let guard = locks
        .acquire("a")
        .ttl(Duration::from_millis(300))
        .await
        .unwrap();
    assert!(locks.try_acquire("a").await.unwrap().is_none());
    assert!(prometheus.render().contains("fencelock_held 1"));
    locks.break_lock("a").await.unwrap();
    assert_eq!(guard.lost().await, LostReason::NotHeld);
    drop(guard);
    data.put("r", "new", FencingToken::new(2).unwrap())
        .await
        .unwrap();
    data.put("r", "old", FencingToken::new(1).unwrap())
        .await
        .unwrap_err();

    let told = prometheus.render();
    for line in [
        "fencelock_acquires_total{outcome=\"granted\"} 1",
        "fencelock_acquires_total{outcome=\"held\"} 1",
        "fencelock_held 0",
        "fencelock_hold_seconds_count 1",
        "fencelock_lost_total{reason=\"not_held\"} 1",
        "fencelock_renewals_total{outcome=\"lost\"} 1",
        "fencelock_fenced_operations_total{operation=\"put\",outcome=\"fenced\"} 1",
        "fencelock_fenced_operations_total{operation=\"put\",outcome=\"ok\"} 1",
    ] {
        assert!(told.contains(line), "{line} in:\n{told}");
    }
}
