//! A lock of several permits.

use super::grants::race;
use super::*;
use crate::lease::PERMITS_MAX;

fn permit(name: &str, permits: u32) -> AcquireRequest {
    let mut request = long(name);
    request.permits = permits;
    request
}

pub(super) async fn n_permits_are_n_holders(lab: &Lab<'_>) {
    let first = take(&lab.a, permit("pool", 3)).await;
    let second = take(&lab.b, permit("pool", 3)).await;
    let third = take(&lab.a, permit("pool", 3)).await;
    assert!(first.token() < second.token() && second.token() < third.token());
    assert_held(lab, &first.request).await;
    for store in lab.each() {
        assert_eq!(
            take(store, second.request.clone()).await.token(),
            second.token()
        );
    }
    let seen = state(&lab.b, &lock("pool")).await.unwrap();
    assert_eq!(seen.capacity, Some(3));
    let mut tokens: Vec<_> = seen.holders.iter().map(|holder| holder.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [first.token(), second.token(), third.token()]);

    give(&lab.b, &second).await;
    let fourth = take(&lab.b, permit("pool", 3)).await;
    assert!(fourth.token() > third.token());
    assert_held(lab, &first.request).await;
    for taken in [&first, &third, &fourth] {
        assert_renewed(&renew(&lab.a, taken.lease(), long_ttl()).await);
    }
    // One holder does not renew or release with another's token.
    let mut mixed = first.lease();
    mixed.token = Some(third.token());
    assert_lost(&renew(&lab.a, mixed.clone(), long_ttl()).await);
    assert_eq!(release(&lab.a, &mixed).await, Release::NotHeld);
}

pub(super) async fn a_hundred_holders_share_the_largest_capacity(lab: &Lab<'_>) {
    let mut all = Vec::new();
    for i in 0..100 {
        all.push(take(lab.each()[i % 2], permit("pool-large", PERMITS_MAX)).await);
    }
    let mut tokens: Vec<_> = all.iter().map(Taken::token).collect();
    assert!(tokens.is_sorted());
    tokens.dedup();
    assert_eq!(tokens.len(), 100);
    assert_eq!(holders(&lab.b, &lock("pool-large")).await.len(), 100);
    let batch: Vec<_> = all
        .iter()
        .map(|taken| (taken.lease(), long_ttl()))
        .collect();
    lab.b.renew(&batch).await.iter().for_each(assert_renewed);
    give(&lab.b, &all[50]).await;
    assert_eq!(holders(&lab.a, &lock("pool-large")).await.len(), 99);
}

pub(super) async fn racing_for_permits_grants_exactly_as_many(lab: &Lab<'_>) {
    for round in 0..4 {
        let name = format!("pool-race-{round}");
        let (granted, held) = race(lab, 16, |_| permit(&name, 4)).await;
        assert_eq!((granted.len(), held), (4, 12), "round={round}");
        let mut tokens: Vec<_> = granted.iter().map(Taken::token).collect();
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), 4);
    }
}

pub(super) async fn another_capacity_is_refused_while_held(lab: &Lab<'_>) {
    let taken = take(&lab.a, permit("capacity", 3)).await;
    for wrong in [1, 2, 517] {
        let error = lab.b.acquire(&permit("capacity", wrong)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = error.to_string();
        for number in [wrong, 3] {
            assert!(text.contains(&format!("={number}")), "{text}");
        }
    }
    take(&lab.b, permit("capacity", 3)).await;
    lab.a.break_lock(&taken.request.name).await.unwrap();
    take(&lab.b, permit("capacity", 517)).await;
    assert_eq!(
        state(&lab.a, &lock("capacity")).await.unwrap().capacity,
        Some(517)
    );
}

pub(super) async fn a_lapsed_permit_frees_itself_only(lab: &Lab<'_>) {
    let mut short = lab.short("pool-lapse");
    short.permits = 2;
    let lapsing = take(&lab.a, short).await;
    let staying = take(&lab.b, permit("pool-lapse", 2)).await;
    assert_held(lab, &staying.request).await;
    lab.expire(&lapsing).await;
    let next = take(&lab.a, permit("pool-lapse", 2)).await;
    assert!(next.token() > staying.token());
    assert_held(lab, &staying.request).await;
    assert_lost(&renew(&lab.a, lapsing.lease(), long_ttl()).await);
    assert_eq!(release(&lab.a, &lapsing.lease()).await, Release::NotHeld);
    assert_renewed(&renew(&lab.a, staying.lease(), long_ttl()).await);
}

pub(super) async fn a_break_takes_every_permit(lab: &Lab<'_>) {
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(take(&lab.a, permit("pool-break", 3)).await);
    }
    let before = lab
        .b
        .break_lock(&lock("pool-break"))
        .await
        .unwrap()
        .expect("a record");
    assert_eq!(before.holders.len(), 3);
    for taken in &all {
        assert_lost(&renew(&lab.a, taken.lease(), long_ttl()).await);
    }
    let next = take(&lab.b, long("pool-break")).await;
    assert!(all.iter().all(|taken| taken.token() < next.token()));
}
