//! What each operation costs: requests are paid for.

use std::sync::Arc;
use std::time::Duration;

use fencelock::lease::{LeaseStore as _, Release, Renewal};
use fencelock::object_store::BucketStore;
use fencelock::object_store::client::memory::InMemory;
use fencelock::{ErrorKind, Locks};

use super::lab::{Aging, granted, held, lease, long, movable};

#[tokio::test]
async fn requests_are_as_few_as_the_documentation_says() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let open = async || BucketStore::from_store(objects.clone(), "p").await.unwrap();
    let (a, b) = (open().await, open().await);
    objects.requests();

    // (puts, gets). The first name that was never there asks for the store's time as well.
    let mine = long("trips");
    let grant = granted(&a, &mine).await;
    assert_eq!(objects.requests(), (2, 2), "the first acquire");
    granted(&a, &long("another")).await;
    assert_eq!(objects.requests(), (1, 1), "another name");

    let renewed = a.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
    assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
    assert_eq!(objects.requests(), (1, 0), "renew");

    held(&b, &long("trips")).await;
    assert_eq!(objects.requests(), (1, 2), "the first look at a held lock");
    held(&b, &long("trips")).await;
    assert_eq!(objects.requests(), (0, 1), "another look at it");

    let released = a.release(&lease(&mine, &grant), Duration::ZERO).await;
    assert_eq!(released.unwrap(), Release::Released);
    assert_eq!(objects.requests(), (1, 0), "release");

    let again = long("trips");
    let grant = granted(&a, &again).await;
    assert_eq!(objects.requests(), (1, 0), "what this client left free");
    a.release(&lease(&again, &grant), Duration::ZERO)
        .await
        .unwrap();
    objects.requests();
    let theirs = long("trips");
    let grant = granted(&b, &theirs).await;
    assert_eq!(objects.requests(), (1, 1), "what another client left free");
    b.release(&lease(&theirs, &grant), Duration::ZERO)
        .await
        .unwrap();
    objects.requests();
    // What this client remembers is not so any more.
    granted(&a, &long("trips")).await;
    assert_eq!(objects.requests(), (2, 1), "a wrong memory");
}

/// However many locks there are, a renewal of all of them does not ask for hundreds of connections.
#[tokio::test]
async fn many_locks_are_renewed_thirty_two_at_once() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let store = BucketStore::from_store(objects.clone(), "p").await.unwrap();
    let mut leases = Vec::new();
    for i in 0..4 * 32 {
        let request = long(&format!("many-{i}"));
        let grant = granted(&store, &request).await;
        leases.push((lease(&request, &grant), request.ttl));
    }
    assert_eq!(objects.most_at_once(), 1, "one after the other");
    objects.requests();
    objects.gather(32);
    let answers = store.renew(&leases).await;
    assert_eq!(answers.len(), leases.len());
    for answer in answers {
        assert!(matches!(answer, Renewal::Renewed), "{answer:?}");
    }
    assert_eq!(objects.requests(), (4 * 32, 0));
    assert_eq!(objects.most_at_once(), 32);
}

#[tokio::test]
async fn what_a_client_remembers_never_decides_against_anybody() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let open = async || BucketStore::from_store(objects.clone(), "p").await.unwrap();
    let (a, b) = (open().await, open().await);
    let former = long("remembered");
    let grant = granted(&a, &former).await;
    a.release(&lease(&former, &grant), Duration::ZERO)
        .await
        .unwrap();
    // The first client remembers a free lock, which is somebody's by now.
    let mine = long("remembered");
    let grant = granted(&b, &mine).await;
    let renewed = a.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
    assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
    let renewed = b.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
    assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
    let released = a.release(&lease(&mine, &grant), Duration::ZERO).await;
    assert_eq!(released.unwrap(), Release::Released);
    let released = b.release(&lease(&mine, &grant), Duration::ZERO).await;
    assert_eq!(released.unwrap(), Release::NotHeld);
}

#[tokio::test]
async fn a_list_of_the_dead_looks_at_the_clock_once() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let (options, clock) = movable();
    let store = options.open_locks(objects.clone(), "p").await.unwrap();
    for i in 0..50 {
        granted(&store, &long(&format!("dead-{i}"))).await;
    }
    let by = Duration::from_secs(604);
    clock.advance(by);
    objects.advance(by);
    objects.requests();
    let listed = store.list("", None, 100).await.unwrap();
    assert!(listed.len() == 50 && listed.iter().all(|lock| lock.holders.is_empty()));
    let (puts, gets) = objects.requests();
    // Those that were under way together wait for one look, or for the next.
    assert!(puts <= 2 && gets <= 52, "puts={puts} gets={gets}");
}

#[tokio::test]
async fn all_permits_of_a_process_are_renewed_by_one_write() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let store = BucketStore::from_store(objects.clone(), "p").await.unwrap();
    let mut leases = Vec::new();
    for _ in 0..5 {
        let mut request = long("permits");
        request.permits = 5;
        let grant = granted(&store, &request).await;
        leases.push((lease(&request, &grant), request.ttl));
    }
    store.renew(&leases).await;
    objects.requests();
    let renewed = store.renew(&leases).await;
    assert!(renewed.iter().all(|r| matches!(r, Renewal::Renewed)));
    assert_eq!(objects.requests(), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_asks_once_in_a_few_seconds() {
    let objects = Aging::over(Arc::new(InMemory::new()));
    let open = async || {
        let store = BucketStore::from_store(objects.clone(), "p").await.unwrap();
        Locks::new(store)
    };
    let (a, b) = (open().await, open().await);
    let guard = a.acquire("waited").no_renew().await.unwrap();
    objects.requests();
    let waited = b.acquire("waited").wait(Duration::from_secs(8)).await;
    assert_eq!(waited.unwrap_err().kind(), ErrorKind::Timeout);
    let (puts, gets) = objects.requests();
    // Eight or nine; without a growing pause it would be 32.
    assert!(puts <= 1 && gets <= 20, "puts={puts} gets={gets}");
    guard.release().await.unwrap();
}
