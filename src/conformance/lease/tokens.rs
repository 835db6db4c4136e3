//! Tokens are unique, increase, and are never forgotten.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::task::JoinSet;

use super::*;
use crate::conformance::missing_hook;
use crate::lease::{Durability, TokenSource};

pub(super) async fn tokens_increase_over_both_clients(lab: &Lab<'_>) {
    let mut last = 0;
    for i in 0..40 {
        let store = lab.each()[i % 2];
        let taken = take(store, long("increasing")).await;
        assert!(
            taken.token().get() > last,
            "token={} last={last}",
            taken.token()
        );
        last = taken.token().get();
        give(store, &taken).await;
    }
}

pub(super) async fn concurrent_grants_do_not_overlap(lab: &Lab<'_>) {
    let inside = Arc::new(AtomicU32::new(0));
    let mut tasks = JoinSet::new();
    for i in 0..8 {
        let (store, inside) = (Arc::clone(lab.each()[i % 2]), Arc::clone(&inside));
        tasks.spawn(async move {
            let mut told = Vec::new();
            while told.len() < 10 {
                let request = long("contended");
                if let Attempt::Granted(grant) = store.acquire(&request).await.expect("an answer") {
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                    let taken = Taken { request, grant };
                    told.push(taken.token());
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    give(&store, &taken).await;
                }
                tokio::task::yield_now().await;
            }
            told
        });
    }
    let per_task = tasks.join_all().await;
    assert!(per_task.iter().all(|told| told.is_sorted()), "{per_task:?}");
    let mut all: Vec<_> = per_task.into_iter().flatten().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 80, "two grants had the same token");
}

pub(super) async fn tokens_do_not_go_down(lab: &Lab<'_>) {
    let mut last = take(&lab.a, lab.short("forgetful")).await;
    lab.expire(&last).await;
    for step in [
        "lapse",
        "release",
        "clean-up",
        "break",
        "clean-up after break",
    ] {
        let next = take(&lab.b, long("forgetful")).await;
        assert!(next.token() > last.token(), "after {step}");
        match step {
            "release" | "clean-up after break" => give(&lab.a, &next).await,
            "clean-up" => {
                give(&lab.b, &next).await;
                lab.a.prune(Duration::ZERO).await.unwrap();
            }
            _ => {
                lab.a.break_lock(&next.request.name).await.unwrap();
                lab.b.prune(Duration::ZERO).await.unwrap();
            }
        }
        last = next;
    }
    let next = take(&lab.a, long("forgetful")).await;
    assert!(next.token() > last.token());
}

pub(super) async fn the_token_told_is_the_token_kept(lab: &Lab<'_>) {
    for store in lab.each() {
        let taken = take(store, long("told")).await;
        for other in lab.each() {
            let seen = state(other, &taken.request.name).await.expect("a record");
            assert_eq!(seen.last_token, Some(taken.token()));
            assert_eq!(seen.holders[0].token, taken.token());
        }
        give(store, &taken).await;
    }
}

pub(super) async fn above_makes_the_next_token_larger(lab: &Lab<'_>) {
    let first = take(&lab.a, long("above")).await;
    give(&lab.a, &first).await;
    let met = token(first.token().get() + 1_000);
    let mut request = long("above");
    request.above = Some(met);
    let second = take(&lab.b, request).await;
    assert!(second.token() > met, "token={} above={met}", second.token());
    give(&lab.b, &second).await;
    let mut request = long("above");
    request.above = Some(first.token());
    let third = take(&lab.a, request).await;
    assert!(third.token() > second.token());
    // Also where the name is new.
    let mut request = long("above-new");
    request.above = Some(third.token());
    assert!(take(&lab.b, request).await.token() > third.token());
}

pub(super) async fn an_implausible_above_is_refused_and_harms_nothing(lab: &Lab<'_>) {
    let first = take(&lab.a, long("above-bound")).await;
    give(&lab.a, &first).await;
    for name in ["above-bound", "above-bound-new"] {
        for forged in [token(1 << 62), FencingToken::MAX] {
            let mut request = long(name);
            request.above = Some(forged);
            assert_eq!(kind_of(lab.b.acquire(&request).await), ErrorKind::Invalid);
        }
        let next = take(&lab.a, long(name)).await;
        assert!(next.token() < token(1 << 61), "token={}", next.token());
        assert!(name != "above-bound" || next.token() > first.token());
    }
}

pub(super) async fn raising_the_floor_leaves_the_grant(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("floor")).await;
    let floor = token(taken.token().get() + 500);
    let last = lab
        .b
        .raise_floor(&taken.request.name, floor, false)
        .await
        .unwrap();
    assert!(last >= floor, "last={last} floor={floor}");
    assert_held(lab, &taken.request).await;
    assert_eq!(
        take(&lab.a, taken.request.clone()).await.token(),
        taken.token()
    );
    assert_renewed(&renew(&lab.a, taken.lease(), long_ttl()).await);
    give(&lab.a, &taken).await;
    assert!(take(&lab.b, long("floor")).await.token() > floor);

    // Before the first grant, too.
    let last = lab
        .a
        .raise_floor(&lock("floor-new"), floor, false)
        .await
        .unwrap();
    assert!(last >= floor);
    assert!(take(&lab.b, long("floor-new")).await.token() > floor);
}

pub(super) async fn the_floor_is_never_lowered(lab: &Lab<'_>) {
    let name = lock("lower");
    let high = token(5_000);
    let last = lab.a.raise_floor(&name, high, false).await.unwrap();
    for low in [1, 4_999, 5_000] {
        let counts_as = lab.b.raise_floor(&name, token(low), false).await.unwrap();
        assert!(counts_as >= last, "counts_as={counts_as} last={last}");
    }
    assert!(take(&lab.a, long("lower")).await.token() > last);
}

pub(super) async fn a_raised_floor_survives_a_clean_up(lab: &Lab<'_>) {
    let floor = token(70_000);
    lab.a
        .raise_floor(&lock("floor-kept"), floor, false)
        .await
        .unwrap();
    let taken = take(&lab.a, long("floor-used")).await;
    let used = token(taken.token().get() + 70_000);
    lab.a
        .raise_floor(&lock("floor-used"), used, false)
        .await
        .unwrap();
    give(&lab.a, &taken).await;
    lab.b.prune(Duration::ZERO).await.unwrap();
    assert!(take(&lab.a, long("floor-kept")).await.token() > floor);
    assert!(take(&lab.a, long("floor-used")).await.token() > used);
}

pub(super) async fn an_implausible_floor_is_refused_and_harms_nothing(lab: &Lab<'_>) {
    let taken = take(&lab.a, long("floor-bound")).await;
    for name in ["floor-bound", "floor-bound-new"] {
        for forged in [token(1 << 62), FencingToken::MAX] {
            for mend in [false, true] {
                let answer = lab.b.raise_floor(&lock(name), forged, mend).await;
                assert_eq!(kind_of(answer), ErrorKind::Invalid);
            }
        }
    }
    assert_renewed(&renew(&lab.a, taken.lease(), long_ttl()).await);
    give(&lab.a, &taken).await;
    for name in ["floor-bound", "floor-bound-new"] {
        let next = take(&lab.b, long(name)).await;
        assert!(next.token() < token(1 << 61), "token={}", next.token());
    }
}

pub(super) async fn tokens_end_at_the_ceiling_and_never_wrap(lab: &Lab<'_>) {
    let ceiling = lab.a.profile().token_max;
    let name = lock("ceiling");
    let before = token(ceiling.get() - 1);
    let Some(store) = lab.harness.with_last_token(&name, before).await else {
        missing_hook("with_last_token");
    };
    // An engine that reserves tokens ahead, or counts in steps, may end a little early.
    if let Ok(Attempt::Granted(grant)) = store.acquire(&long("ceiling")).await {
        assert_eq!(grant.token, ceiling);
        store.break_lock(&name).await.unwrap();
    } else {
        assert_ne!(
            store.profile().tokens,
            TokenSource::Counter,
            "the last token is a token"
        );
    }
    for _ in 0..3 {
        assert_eq!(
            kind_of(store.acquire(&long("ceiling")).await),
            ErrorKind::Exhausted
        );
    }
    assert!(holders(&store, &name).await.is_empty());
}

pub(super) async fn tokens_survive_a_restart(lab: &Lab<'_>) {
    if lab.a.profile().durability == Durability::D0Memory {
        return;
    }
    let released = take(&lab.a, long("restart-released")).await;
    give(&lab.a, &released).await;
    let lapsed = take(&lab.b, lab.short("restart-lapsed")).await;
    lab.expire(&lapsed).await;
    let held = take(&lab.b, long("restart-held")).await;
    let pruned = take(&lab.a, long("restart-pruned")).await;
    give(&lab.a, &pruned).await;
    lab.a.prune(Duration::ZERO).await.unwrap();
    let realm = lab.a.profile().realm.clone();

    let Some([a, b]) = lab.harness.restart().await else {
        missing_hook("restart");
    };
    assert_eq!(a.profile().realm, realm, "the same data is the same realm");
    b.break_lock(&held.request.name).await.unwrap();
    for former in [released, lapsed, held, pruned] {
        let next = take(&a, long(former.request.name.as_str())).await;
        assert!(next.token() > former.token(), "{former:?} {next:?}");
    }
}
