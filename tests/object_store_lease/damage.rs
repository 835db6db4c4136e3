//! Records that were removed, cut, exchanged or brought back by hand.

use std::sync::Arc;
use std::time::Duration;

use fencelock::lease::{LeaseStore as _, Release, Renewal};
use fencelock::object_store::BucketStore;
use fencelock::object_store::client::memory::InMemory;
use fencelock::object_store::client::path::Path;
use fencelock::object_store::client::{ObjectStore, ObjectStoreExt as _};
use fencelock::{ErrorKind, FencingToken};

use super::lab::{Aging, granted, lease, long, movable, record};

async fn body(store: &dyn ObjectStore, key: &str) -> Vec<u8> {
    let got = store.get(&Path::from(key)).await.unwrap();
    got.bytes().await.unwrap().to_vec()
}

async fn plant(store: &dyn ObjectStore, key: &str, body: Vec<u8>) {
    store.put(&Path::from(key), body.into()).await.unwrap();
}

#[tokio::test]
async fn a_record_that_was_removed_frees_the_lock_and_never_lowers_a_token() {
    let (options, clock) = movable();
    let objects = Aging::over(Arc::new(InMemory::new()));
    let store = options.open_locks(objects.clone(), "p").await.unwrap();
    let mine = long("removed");
    let mut last = granted(&store, &mine).await;
    for _ in 0..3 {
        let renewed = store.renew(&[(lease(&mine, &last), mine.ttl)]).await;
        assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
        objects.delete(&Path::from("p/lock/removed")).await.unwrap();
        // The store's time is told in whole seconds.
        clock.advance(Duration::from_secs(2));
        objects.advance(Duration::from_secs(2));
        let renewed = store.renew(&[(lease(&mine, &last), mine.ttl)]).await;
        assert!(matches!(renewed[..], [Renewal::Lost]), "{renewed:?}");
        let released = store.release(&lease(&mine, &last), Duration::ZERO).await;
        assert_eq!(released.unwrap(), Release::NotHeld);
        let next = granted(&store, &mine).await;
        assert!(next.token > last.token, "{next:?} {last:?}");
        last = next;
    }
}

#[tokio::test]
async fn an_old_copy_of_a_record_never_lowers_a_token() {
    let (options, clock) = movable();
    let objects = Aging::over(Arc::new(InMemory::new()));
    let store = options.open_locks(objects.clone(), "p").await.unwrap();
    let mut last = None;
    let mut copy = None;
    for _ in 0..5 {
        let mine = long("restored");
        let grant = granted(&store, &mine).await;
        assert!(last.is_none_or(|last| grant.token > last));
        last = Some(grant.token);
        store
            .release(&lease(&mine, &grant), Duration::ZERO)
            .await
            .unwrap();
        if copy.is_none() {
            copy = Some(body(&objects, "p/lock/restored").await);
        }
    }
    clock.advance(Duration::from_secs(2));
    objects.advance(Duration::from_secs(2));
    plant(&objects, "p/lock/restored", copy.unwrap()).await;
    let next = granted(&store, &long("restored")).await;
    assert!(Some(next.token) > last, "{next:?} {last:?}");
}

#[tokio::test]
async fn a_damaged_record_is_refused_until_it_is_repaired() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let store = BucketStore::from_store(Arc::clone(&objects), "p")
        .await
        .unwrap();
    let mine = long("damaged");
    let grant = granted(&store, &mine).await;
    granted(&store, &long("sound")).await;
    let key = "p/lock/damaged";
    let sound = body(&objects, key).await;
    let mut flipped = sound.clone();
    let digit = flipped.len() / 2;
    flipped[digit] ^= 1;
    let damages = [
        Vec::new(),
        sound[..sound.len() / 2].to_vec(),
        sound[..sound.len() - 1].to_vec(),
        flipped,
        b"{}".to_vec(),
        record("other", FencingToken::MIN).into_bytes(),
    ];
    for damage in damages {
        plant(&objects, key, damage.clone()).await;
        for _ in 0..2 {
            let error = store.acquire(&long("damaged")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
            assert!(error.to_string().contains("name=\"damaged\""), "{error}");
        }
        match &store.renew(&[(lease(&mine, &grant), mine.ttl)]).await[..] {
            [Renewal::Unknown(error)] => assert_eq!(error.kind(), ErrorKind::Corrupt),
            other => panic!("{other:?}"),
        }
        for error in [
            store
                .release(&lease(&mine, &grant), Duration::ZERO)
                .await
                .unwrap_err(),
            store.inspect(&mine.name).await.unwrap_err(),
            store.break_lock(&mine.name).await.unwrap_err(),
            store
                .raise_floor(&mine.name, grant.token, false)
                .await
                .unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        }
        let listed = store.list("", None, 10).await.unwrap();
        let damaged: Vec<_> = listed.iter().map(|lock| lock.damage.is_some()).collect();
        assert_eq!(damaged, [true, false], "{listed:?}");
        // Nothing was touched.
        assert_eq!(body(&objects, key).await, damage);
    }
    store
        .raise_floor(&mine.name, grant.token, true)
        .await
        .unwrap();
    let next = granted(&store, &long("damaged")).await;
    assert!(next.token > grant.token);
}

#[tokio::test]
async fn a_long_name_is_listed_by_what_its_record_says() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let store = BucketStore::from_store(Arc::clone(&objects), "p")
        .await
        .unwrap();
    let long_name = format!("l/{}", "x".repeat(300));
    granted(&store, &long(&long_name)).await;
    granted(&store, &long("l")).await;
    plant(&objects, "p/lock/Not-Ours", b"?".to_vec()).await;
    let listed = store.list("l", None, 10).await.unwrap();
    let names: Vec<_> = listed.iter().map(|lock| lock.name.as_str()).collect();
    assert_eq!(names, ["l", &long_name]);
    assert_eq!(store.list("l/", None, 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn another_realm_is_found_by_the_probe_and_damage_of_it_at_open() {
    let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open = async || BucketStore::from_store(Arc::clone(&objects), "p").await;
    let store = open().await.unwrap();
    assert_eq!(store.profile().realm, open().await.unwrap().profile().realm);
    let bad = async || {
        let findings = store.probe().await.unwrap();
        findings
            .iter()
            .any(|f| f.subject == "realm" && f.severity == fencelock::lease::Severity::Bad)
    };
    assert!(!bad().await);
    plant(&objects, "p/realm", b"0".repeat(32)).await;
    assert!(bad().await);
    objects.delete(&Path::from("p/realm")).await.unwrap();
    assert!(bad().await);
    plant(&objects, "p/realm", b"nonsense".to_vec()).await;
    assert_eq!(open().await.unwrap_err().kind(), ErrorKind::Corrupt);
    let named = BucketStore::options().realm("prod").unwrap();
    let named = named.open_locks(Arc::clone(&objects), "p").await.unwrap();
    assert_eq!(named.profile().realm, "prod");
}
