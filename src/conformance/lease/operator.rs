//! What operators see and do.

use super::*;
use crate::fence::{Domain, HolderTag};
use crate::lease::{HolderId, INFO_TEXT_MAX_BYTES, Severity};

pub(super) async fn an_operator_sees_the_holder_and_not_its_secret(lab: &Lab<'_>) {
    let mut request = long("seen");
    request.info.host = "host-1".to_owned();
    request.info.pid = 4_242;
    request.info.label = Some("nightly \"export\"\n'; --".to_owned());
    request.info.since_unix_us = 1_796_000_000_000_000;
    request.info.trace_id = Some("4bf92f3577b34da6".to_owned());
    let taken = take(&lab.a, request).await;
    for store in lab.each() {
        let seen = state(store, &taken.request.name).await.expect("a record");
        assert_eq!(seen.capacity, Some(1));
        assert_eq!(seen.holders.len(), 1);
        let holder = &seen.holders[0];
        assert_eq!(holder.token, taken.token());
        assert_eq!(holder.tag, HolderTag::of(&taken.request.holder));
        assert_eq!(holder.ttl, taken.grant.ttl);
        assert_eq!(holder.info, taken.request.info);
        let left = holder.expires_in.expect("an expiry");
        let ttl = taken.grant.ttl.duration().unwrap();
        assert!(left <= ttl && left > ttl / 2, "left={left:?} ttl={ttl:?}");

        let bytes = format!("{:?}", taken.request.holder.as_bytes());
        let contention = refuse(store, &long("seen")).await;
        for shown in [
            format!("{seen:?}"),
            format!("{contention:?}"),
            format!("{store:?}"),
        ] {
            assert!(!shown.contains(&taken.request.holder.reveal()), "{shown}");
            assert!(!shown.contains(&bytes), "{shown}");
        }
    }
}

pub(super) async fn the_longest_info_comes_back(lab: &Lab<'_>) {
    let mut request = long("long-info");
    let longest = "🔒".repeat(INFO_TEXT_MAX_BYTES / 4);
    request.info.host = "h".repeat(INFO_TEXT_MAX_BYTES);
    request.info.label = Some(longest.clone());
    request.info.trace_id = Some(longest);
    request.info.pid = u32::MAX;
    request.permits = 3;
    for _ in 0..3 {
        request.holder = HolderId::random();
        take(&lab.a, request.clone()).await;
    }
    let seen = holders(&lab.b, &request.name).await;
    assert_eq!(seen.len(), 3);
    assert!(
        seen.iter().all(|holder| holder.info == request.info),
        "{seen:?}"
    );
}

pub(super) async fn an_unknown_name_has_no_record(lab: &Lab<'_>) {
    let name = lock("nobody");
    let lease = LeaseRef {
        name: name.clone(),
        holder: long("nobody").holder,
        token: Some(token(1)),
    };
    assert_lost(&renew(&lab.a, lease.clone(), long_ttl()).await);
    assert_eq!(release(&lab.a, &lease).await, Release::NotHeld);
    assert_eq!(lab.a.break_lock(&name).await.unwrap(), None);
    drop(lab.a.watch(&name).await.unwrap());
    for store in lab.each() {
        assert_eq!(state(store, &name).await, None);
        assert!(store.list("", None, 10).await.unwrap().is_empty());
        assert_eq!(store.prune(Duration::ZERO).await.unwrap().removed, 0);
    }
}

pub(super) async fn a_free_lock_shows_no_holders(lab: &Lab<'_>) {
    let released = take(&lab.a, long("free")).await;
    give(&lab.a, &released).await;
    let lapsed = take(&lab.a, lab.short("free-lapsed")).await;
    lab.expire(&lapsed).await;
    for store in lab.each() {
        for name in [&released.request.name, &lapsed.request.name] {
            assert!(holders(store, name).await.is_empty(), "{name:?}");
        }
        let listed = store.list("free", None, 10).await.unwrap();
        assert!(
            listed.iter().all(|state| state.holders.is_empty()),
            "{listed:?}"
        );
    }
    let before = lab.b.break_lock(&lapsed.request.name).await.unwrap();
    assert!(before.is_none_or(|state| state.holders.is_empty()));
}

pub(super) async fn breaking_returns_the_state_before(lab: &Lab<'_>) {
    let mut request = long("break");
    request.info.label = Some("stuck".to_owned());
    let taken = take(&lab.a, request).await;
    let before = lab
        .b
        .break_lock(&taken.request.name)
        .await
        .unwrap()
        .expect("a record");
    assert_eq!(before.name, taken.request.name);
    assert_eq!(before.last_token, Some(taken.token()));
    assert_eq!(before.holders.len(), 1);
    assert_eq!(before.holders[0].token, taken.token());
    assert_eq!(before.holders[0].info.label.as_deref(), Some("stuck"));
    let again = lab.a.break_lock(&taken.request.name).await.unwrap();
    assert!(again.is_none_or(|state| state.holders.is_empty()));
    let next = take(&lab.b, long("break")).await;
    assert!(next.token() > taken.token());
}

pub(super) async fn cleaning_up_removes_idle_records_only(lab: &Lab<'_>) {
    let held = take(&lab.a, long("prune-held")).await;
    let idle = take(&lab.a, long("prune-idle")).await;
    give(&lab.a, &idle).await;
    let recent = lab.b.prune(Duration::from_secs(86_400)).await.unwrap();
    assert_eq!(
        recent.removed, 0,
        "a record that was used today is not idle for a day"
    );
    assert!(recent.kept >= 1, "{recent:?}");

    let pruned = lab.b.prune(Duration::ZERO).await.unwrap();
    assert!(pruned.removed <= 1, "{pruned:?}");
    assert!(pruned.kept >= 1, "{pruned:?}");
    assert_held(lab, &held.request).await;
    assert_renewed(&renew(&lab.a, held.lease(), long_ttl()).await);
    assert_eq!(
        take(&lab.b, held.request.clone()).await.token(),
        held.token()
    );
    assert!(take(&lab.b, long("prune-idle")).await.token() > idle.token());
}

pub(super) async fn the_profile_is_sane_and_the_same_for_both_clients(lab: &Lab<'_>) {
    let profile = lab.a.profile();
    assert_eq!(profile, lab.b.profile());
    assert!(!profile.kind.is_empty() && !profile.realm.is_empty());
    assert!(
        profile.kind.bytes().all(|b| b.is_ascii_lowercase()),
        "{profile:?}"
    );
    let domain = Domain::new(profile.kind, &profile.realm, &lock("a/B"));
    assert_eq!(domain.as_str().parse::<Domain>().unwrap(), domain);
    assert!(
        profile.ttl_min >= Ttl::MIN && profile.ttl_min <= Ttl::MAX,
        "{profile:?}"
    );
    // What a double holds exactly is the least that is enough.
    assert!(profile.token_max.get() >= (1 << 53) - 1, "{profile:?}");
}

pub(super) async fn a_probe_answers(lab: &Lab<'_>) {
    for store in lab.each() {
        let findings = store.probe().await.unwrap();
        assert!(!findings.is_empty(), "a probe says what it looked at");
        for finding in findings {
            assert!(
                !finding.subject.is_empty() && !finding.detail.is_empty(),
                "{finding:?}"
            );
            assert_ne!(finding.severity, Severity::Bad, "{finding:?}");
        }
    }
    // It leaves nothing behind that looks like a lock.
    assert!(lab.a.list("", None, 10).await.unwrap().is_empty());
}
