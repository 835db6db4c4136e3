//! Lost answers, pauses, kills, and locks that somebody else keeps.

use fencelock::lease::{Attempt, LeaseStore};
use fencelock::{ErrorKind, FencingToken};
use fencelock_testbed::postgres::Postgres;

use crate::lab::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_stopped_waiting_for_its_standby_is_indeterminate() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let store = store(&server.url()).await;
    let admin = client(&server.url()).await;
    admin
        .batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'ghost'")
        .await
        .unwrap();
    admin
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    let request = long("unreplicated");
    let asking = tokio::spawn({
        let (store, request) = (store.clone(), request.clone());
        async move { store.acquire(&request).await }
    });
    let cancel = "SELECT count(*) FILTER (WHERE pg_cancel_backend(pid)) FROM pg_stat_activity
                  WHERE wait_event = 'SyncRep'";
    loop {
        let row = admin.query_one(cancel, &[]).await.unwrap();
        if row.get::<_, i64>(0) > 0 || asking.is_finished() {
            break;
        }
    }
    let error = asking.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    assert!(error.to_string().contains("standby"), "{error}");
    admin
        .batch_execute("ALTER SYSTEM RESET synchronous_standby_names")
        .await
        .unwrap();
    admin
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    // It is committed here, so the same request finds it.
    let (grant, _) = in_time(async {
        loop {
            if let Ok(Attempt::Granted(grant)) = store.acquire(&request).await {
                break grant;
            }
        }
    })
    .await;
    assert_eq!(grant.token, FencingToken::MIN);
}
