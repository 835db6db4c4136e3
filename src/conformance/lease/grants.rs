//! Who is granted, who is not, and what a repeated request finds.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::*;
use crate::conformance::faults::{FaultyLease, Op, Strike};
use crate::lease::HolderId;

pub(super) async fn a_held_lock_is_not_granted_to_another(lab: &Lab<'_>) {
    let mut request = long("held");
    request.info.label = Some("nightly".to_owned());
    let taken = take(&lab.a, request).await;
    for store in lab.each() {
        let contention = refuse(store, &long("held")).await;
        if let Some(free_in) = contention.free_in {
            let ttl = taken.grant.ttl.duration().unwrap();
            assert!(free_in <= ttl, "free_in={free_in:?} is more than the TTL");
            assert!(free_in > ttl / 2, "free_in={free_in:?} of a fresh grant");
        }
        if let Some(holder) = contention.holder {
            assert_eq!(holder.label.as_deref(), Some("nightly"));
        }
    }
    give(&lab.a, &taken).await;
    take(&lab.b, long("held")).await;
}

pub(super) async fn sixteen_at_once_are_one_grant(lab: &Lab<'_>) {
    for round in 0..8 {
        let name = format!("race-{round}");
        let (granted, held) = race(lab, 16, |_| long(&name)).await;
        assert_eq!((granted.len(), held), (1, 15), "round={round}");
        let seen = holders(&lab.b, &lock(&name)).await;
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].token, granted[0].token());
    }
}

/// Sends the requests at one moment, in turn through both clients.
pub(super) async fn race(
    lab: &Lab<'_>,
    count: usize,
    request: impl Fn(usize) -> AcquireRequest,
) -> (Vec<Taken>, usize) {
    let start = Arc::new(Barrier::new(count));
    let mut tasks = JoinSet::new();
    for i in 0..count {
        let (store, start, request) = (
            Arc::clone(lab.each()[i % 2]),
            Arc::clone(&start),
            request(i),
        );
        tasks.spawn(async move {
            start.wait().await;
            match store.acquire(&request).await.expect("an answer") {
                Attempt::Granted(grant) => Some(Taken { request, grant }),
                Attempt::Held(_) => None,
            }
        });
    }
    let answers = tasks.join_all().await;
    let granted: Vec<Taken> = answers.into_iter().flatten().collect();
    let held = count - granted.len();
    (granted, held)
}

pub(super) async fn the_same_request_finds_its_own_grant(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("again")).await;
    for store in lab.each() {
        assert_eq!(
            take(store, taken.request.clone()).await.token(),
            taken.token()
        );
    }
    // A whole TTL from now: of the longer one that the repeated request names.
    let mut longer = taken.request.clone();
    longer.ttl = long_ttl();
    assert_eq!(take(&lab.b, longer).await.token(), taken.token());
    lab.expire(&taken).await;
    assert_held(lab, &taken.request).await;
    assert_eq!(holders(&lab.a, &lock("again")).await.len(), 1);
    give(&lab.b, &taken).await;
    take(&lab.a, long("again")).await;
}

pub(super) async fn one_request_sent_twice_at_once_is_one_grant(lab: &Lab<'_>) {
    for round in 0..8 {
        let name = format!("twice-{round}");
        let request = long(&name);
        let (granted, held) = race(lab, 8, |_| request.clone()).await;
        assert_eq!((granted.len(), held), (8, 0), "round={round}");
        assert!(
            granted
                .iter()
                .all(|taken| taken.token() == granted[0].token())
        );
        assert_eq!(holders(&lab.a, &request.name).await.len(), 1);
        give(&lab.a, &granted[0]).await;
        take(&lab.b, long(&name)).await;
    }
}

pub(super) async fn a_lost_answer_is_found_by_the_retry(lab: &Lab<'_>) {
    let faulty = FaultyLease::new(Arc::clone(&lab.a));
    let lost = Strike::After(ErrorKind::Indeterminate);
    faulty.faults().next(Op::Acquire, lost);
    let store: Arc<dyn LeaseStore> = Arc::new(faulty.clone());
    let request = long("lost-answer");
    assert_eq!(
        kind_of(store.acquire(&request).await),
        ErrorKind::Indeterminate
    );
    let seen = holders(&lab.b, &request.name).await;
    assert_eq!(
        seen.len(),
        1,
        "the grant is there though its answer was lost"
    );
    let taken = take(&store, request).await;
    assert_eq!(taken.token(), seen[0].token);
    give(&store, &taken).await;
    take(&lab.b, long("lost-answer")).await;
    assert_eq!(faulty.faults().struck(), 1);
}

pub(super) async fn a_lost_answer_is_cleaned_up_by_the_holder_alone(lab: &Lab<'_>) {
    let faulty = FaultyLease::new(Arc::clone(&lab.a));
    let lost = Strike::After(ErrorKind::Indeterminate);
    faulty.faults().next(Op::Acquire, lost);
    let request = long("clean-up");
    assert_eq!(
        kind_of(faulty.acquire(&request).await),
        ErrorKind::Indeterminate
    );
    let lease = LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: None,
    };
    assert_eq!(release(&lab.b, &lease).await, Release::Released);
    assert_eq!(release(&lab.b, &lease).await, Release::NotHeld);
    take(&lab.b, long("clean-up")).await;
}

pub(super) async fn an_acquire_dropped_on_the_way_is_one_grant_at_most(lab: &Lab<'_>) {
    for delay_us in [0, 50, 200, 1_000, 5_000] {
        let name = format!("dropped-{delay_us}");
        let (store, request) = (Arc::clone(&lab.a), long(&name));
        let copy = request.clone();
        let task = tokio::spawn(async move { store.acquire(&copy).await });
        tokio::time::sleep(Duration::from_micros(delay_us)).await;
        task.abort();
        drop(task.await);
        let taken = take(&lab.a, request.clone()).await;
        assert_eq!(holders(&lab.b, &request.name).await.len(), 1);
        give(&lab.a, &taken).await;
        take(&lab.b, long(&name)).await;
    }
}

pub(super) async fn the_ttl_given_is_at_least_the_ttl_asked(lab: &Lab<'_>) {
    let least = lab.a.profile().ttl_min;
    let asked = [
        Ttl::MIN,
        Duration::from_millis(1_500),
        Duration::from_micros(10_000_001),
        Ttl::MAX,
    ];
    for (i, asked) in asked.into_iter().enumerate() {
        let request = AcquireRequest::new(lock(&format!("ttl-{i}")), Ttl::new(asked).unwrap());
        let taken = take(&lab.a, request).await;
        let given = taken.grant.ttl.duration().expect("an expiry");
        assert!(given >= asked, "given={given:?} asked={asked:?}");
        assert!(given >= least, "given={given:?} ttl_min={least:?}");
        assert!(
            given <= asked.max(least) + Duration::from_secs(1),
            "given={given:?} asked={asked:?}"
        );
        for holder in holders(&lab.b, &taken.request.name).await {
            let left = holder.expires_in.expect("an expiry");
            assert!(left <= given, "left={left:?} given={given:?}");
            assert_eq!(holder.ttl, taken.grant.ttl);
        }
    }
}

pub(super) async fn a_lease_without_end_is_taken_or_refused(lab: &Lab<'_>) {
    let request = AcquireRequest::new(lock("endless"), Ttl::NONE);
    if !lab.a.profile().sees_dead_holders {
        let kind = kind_of(lab.a.acquire(&request).await);
        assert!(
            matches!(kind, ErrorKind::Unsupported | ErrorKind::Invalid),
            "{kind:?}"
        );
        assert!(holders(&lab.b, &request.name).await.is_empty());
        return;
    }
    let taken = take(&lab.a, request).await;
    assert_eq!(taken.grant.ttl, Ttl::NONE);
    let ttl = lab.short_ttl().duration().unwrap();
    lab.harness.expire(&taken.request.name, ttl).await;
    assert_held(lab, &long("endless")).await;
    let answer = renew(&lab.a, taken.lease(), Ttl::NONE).await;
    assert!(matches!(answer, Renewal::StillHeld), "{answer:?}");
    assert_eq!(holders(&lab.b, &lock("endless")).await[0].expires_in, None);
    give(&lab.a, &taken).await;
    take(&lab.b, long("endless")).await;

    let mut detached = AcquireRequest::new(lock("endless-detached"), Ttl::NONE);
    detached.detached = true;
    assert_eq!(kind_of(lab.a.acquire(&detached).await), ErrorKind::Invalid);
    take(&lab.b, long("endless-detached")).await;
}

pub(super) async fn a_detached_grant_is_a_grant(lab: &Lab<'_>) {
    let mut request = lab.short("detached");
    request.detached = true;
    let taken = take(&lab.a, request.clone()).await;
    assert_held(lab, &request).await;
    assert_eq!(take(&lab.b, request.clone()).await.token(), taken.token());
    assert_renewed(&renew(&lab.b, taken.lease(), request.ttl).await);
    lab.expire(&taken).await;
    assert_lost(&renew(&lab.a, taken.lease(), request.ttl).await);
    request.holder = HolderId::random();
    let next = take(&lab.b, request).await;
    assert!(next.token() > taken.token());
    give(&lab.a, &next).await;
    take(&lab.a, long("detached")).await;
}

pub(super) async fn a_lapsed_lock_is_granted_to_the_next(lab: &Lab<'_>) {
    let first = take(&lab.a, lab.short("lapse")).await;
    assert_held(lab, &first.request).await;
    lab.expire(&first).await;
    let second = take(&lab.b, lab.short("lapse")).await;
    assert!(second.token() > first.token());
    lab.expire(&second).await;
    let third = take(&lab.a, long("lapse")).await;
    assert!(third.token() > second.token());
}

pub(super) async fn a_lapsed_grant_is_not_revived_by_its_request(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("revive")).await;
    lab.expire(&taken).await;
    for store in lab.each() {
        let again = take(store, taken.request.clone()).await;
        assert!(again.token() > taken.token(), "a lapsed grant came back");
    }
    let again = take(&lab.a, taken.request.clone()).await;
    // The former token is not this grant's.
    assert_lost(&renew(&lab.a, taken.lease(), long_ttl()).await);
    assert_eq!(release(&lab.b, &taken.lease()).await, Release::NotHeld);
    assert_renewed(&renew(&lab.b, again.lease(), long_ttl()).await);
}
