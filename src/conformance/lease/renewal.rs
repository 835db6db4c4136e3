//! Renew and release act for the same holder and token only, and revive nothing.

use super::*;
use crate::lease::HolderId;

pub(super) async fn renewing_keeps_the_token_and_extends(lab: &Lab<'_>) {
    for (i, store) in lab.each().into_iter().enumerate() {
        let taken = take(&lab.a, lab.short(&format!("renew-{i}"))).await;
        assert_renewed(&renew(store, taken.lease(), long_ttl()).await);
        lab.expire(&taken).await;
        assert_held(lab, &taken.request).await;
        let seen = holders(&lab.b, &taken.request.name).await;
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].token, taken.token());
        assert_renewed(&renew(store, taken.lease(), long_ttl()).await);
        give(&lab.b, &taken).await;
    }
}

/// Everything that is almost, but not, this grant.
fn strangers(taken: &Taken) -> Vec<LeaseRef> {
    let lease = taken.lease();
    let with = |change: &dyn Fn(&mut LeaseRef)| {
        let mut lease = lease.clone();
        change(&mut lease);
        lease
    };
    vec![
        with(&|lease| lease.holder = HolderId::random()),
        with(&|lease| lease.token = Some(another_token(taken.token()))),
        with(&|lease| {
            lease.holder = HolderId::random();
            lease.token = None;
        }),
        with(&|lease| lease.name = lock("another-name")),
    ]
}

pub(super) async fn renewing_needs_the_holder_and_the_token(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("renew-needs")).await;
    for stranger in strangers(&taken) {
        for store in lab.each() {
            assert_lost(&renew(store, stranger.clone(), long_ttl()).await);
        }
    }
    assert_held(lab, &taken.request).await;
    // None of them extended it.
    lab.expire(&taken).await;
    take(&lab.b, long("renew-needs")).await;
}

pub(super) async fn releasing_needs_the_holder_and_the_token(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("release-needs")).await;
    for stranger in strangers(&taken) {
        for store in lab.each() {
            assert_eq!(
                release(store, &stranger).await,
                Release::NotHeld,
                "{stranger:?}"
            );
        }
    }
    assert_held(lab, &taken.request).await;
    assert_renewed(&renew(&lab.b, taken.lease(), long_ttl()).await);
    give(&lab.b, &taken).await;
}

pub(super) async fn a_lapsed_lease_is_not_renewed_though_nobody_took_it(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("late-renewal")).await;
    lab.expire(&taken).await;
    for store in lab.each() {
        assert_lost(&renew(store, taken.lease(), long_ttl()).await);
    }
    let next = take(&lab.b, long("late-renewal")).await;
    assert!(next.token() > taken.token());
}

pub(super) async fn a_lapsed_lease_is_not_released(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("late-release")).await;
    lab.expire(&taken).await;
    for store in lab.each() {
        assert_eq!(release(store, &taken.lease()).await, Release::NotHeld);
    }
}

pub(super) async fn a_former_holder_does_not_touch_the_next(lab: &Lab<'_>) {
    let former = take(&lab.a, lab.short("next")).await;
    lab.expire(&former).await;
    let next = take(&lab.b, lab.short("next")).await;
    for token in [Some(former.token()), Some(next.token()), None] {
        let mut lease = former.lease();
        lease.token = token;
        assert_lost(&renew(&lab.a, lease.clone(), long_ttl()).await);
        assert_eq!(release(&lab.a, &lease).await, Release::NotHeld);
    }
    refuse(&lab.a, &former.request).await;
    let seen = holders(&lab.a, &next.request.name).await;
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].token, next.token());
    assert_eq!(seen[0].ttl, next.grant.ttl);
    // Neither shortened nor prolonged.
    assert_renewed(&renew(&lab.b, next.lease(), next.request.ttl).await);
    assert_lost(&renew(&lab.a, former.lease(), long_ttl()).await);
    lab.expire(&next).await;
    take(&lab.a, long("next")).await;
}

pub(super) async fn after_a_break_the_holder_has_lost(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("broken")).await;
    lab.b.break_lock(&taken.request.name).await.unwrap();
    assert_lost(&renew(&lab.a, taken.lease(), long_ttl()).await);
    assert_eq!(release(&lab.a, &taken.lease()).await, Release::NotHeld);
    let next = take(&lab.b, long("broken")).await;
    assert!(next.token() > taken.token());
    assert_lost(&renew(&lab.a, taken.lease(), long_ttl()).await);
    assert_eq!(release(&lab.a, &taken.lease()).await, Release::NotHeld);
    refuse(&lab.a, &taken.request).await;
    assert_renewed(&renew(&lab.b, next.lease(), long_ttl()).await);
}

pub(super) async fn a_released_lease_is_gone(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("gone")).await;
    give(&lab.b, &taken).await;
    for store in lab.each() {
        assert_eq!(release(store, &taken.lease()).await, Release::NotHeld);
        assert_lost(&renew(store, taken.lease(), long_ttl()).await);
    }
    let next = take(&lab.b, long("gone")).await;
    assert!(next.token() > taken.token());
    assert_eq!(release(&lab.a, &taken.lease()).await, Release::NotHeld);
    assert_held(lab, &next.request).await;
}

pub(super) async fn a_lingering_release_keeps_others_out_and_then_frees(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("linger")).await;
    let linger = lab.short_ttl().duration().unwrap();
    let answer = lab.a.release(&taken.lease(), linger).await.unwrap();
    assert_eq!(answer, Release::Released);
    assert_held(lab, &taken.request).await;
    // An engine may keep whole seconds only; a case may not assume finer ones.
    let rounded = linger + Duration::from_secs(1);
    lab.harness.expire(&taken.request.name, rounded).await;
    let next = take(&lab.b, long("linger")).await;
    assert!(next.token() > taken.token());
}

pub(super) async fn a_lingering_lease_is_not_renewed(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("linger-renewal")).await;
    let linger = lab.short_ttl().duration().unwrap();
    lab.a.release(&taken.lease(), linger).await.unwrap();
    for store in lab.each() {
        assert_lost(&renew(store, taken.lease(), long_ttl()).await);
        assert_eq!(release(store, &taken.lease()).await, Release::NotHeld);
    }
    assert_held(lab, &taken.request).await;
    let rounded = linger + Duration::from_secs(1);
    lab.harness.expire(&taken.request.name, rounded).await;
    take(&lab.b, long("linger-renewal")).await;
}

pub(super) async fn a_batch_is_answered_each_in_order(lab: &Lab<'_>) {
    assert!(lab.a.renew(&[]).await.is_empty());
    let mut batch = Vec::new();
    let mut good = Vec::new();
    for i in 0..12 {
        let taken = take(&lab.a, lab.short(&format!("batch-{i}"))).await;
        match i % 4 {
            0 => give(&lab.b, &taken).await,
            1 => drop(lab.b.break_lock(&taken.request.name).await.unwrap()),
            _ => {}
        }
        let mut lease = taken.lease();
        if i % 4 == 2 {
            lease.holder = HolderId::random();
        } else if i % 4 == 3 {
            good.push(taken);
        }
        batch.push((lease, long_ttl()));
    }
    // The good ones neither first nor in the same place of every page.
    batch.rotate_left(2);
    let answers = lab.b.renew(&batch).await;
    assert_eq!(answers.len(), batch.len());
    for ((lease, _), answer) in batch.iter().zip(&answers) {
        if good.iter().any(|taken| taken.lease() == *lease) {
            assert_renewed(answer);
        } else {
            assert_lost(answer);
        }
    }
    for taken in &good {
        lab.expire(taken).await;
        assert_held(lab, &taken.request).await;
    }
}

pub(super) async fn a_holder_is_named_without_its_token(lab: &Lab<'_>) {
    let taken = take(&lab.a, lab.short("tokenless")).await;
    let mut lease = taken.lease();
    lease.token = None;
    assert_renewed(&renew(&lab.b, lease.clone(), long_ttl()).await);
    lab.expire(&taken).await;
    assert_held(lab, &taken.request).await;
    let mut stranger = lease.clone();
    stranger.holder = HolderId::random();
    assert_eq!(release(&lab.b, &stranger).await, Release::NotHeld);
    assert_held(lab, &taken.request).await;
    assert_eq!(release(&lab.b, &lease).await, Release::Released);
    take(&lab.a, long("tokenless")).await;
}

pub(super) async fn two_hundred_locks_are_held_at_once(lab: &Lab<'_>) {
    let mut all = Vec::new();
    for i in 0..200 {
        all.push(take(&lab.a, long(&format!("many-{i}"))).await);
    }
    let batch: Vec<_> = all
        .iter()
        .map(|taken| (taken.lease(), long_ttl()))
        .collect();
    let answers = lab.a.renew(&batch).await;
    assert_eq!(answers.len(), 200);
    answers.iter().for_each(assert_renewed);
    for taken in &all {
        refuse(
            &lab.b,
            &AcquireRequest::new(taken.request.name.clone(), long_ttl()),
        )
        .await;
    }
    for taken in &all {
        give(&lab.a, taken).await;
    }
}
