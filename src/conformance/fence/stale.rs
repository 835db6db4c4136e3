//! Stale tokens are refused, whatever they come to do.

use super::*;
use crate::clock::unix_micros;

pub(super) async fn a_stale_put_is_refused_and_the_value_stands(lab: &Lab<'_>) {
    let today = lab.resource("today");
    put(&lab.a, &today, "by 33", &held_by(1, 33)).await;
    let written = put(&lab.b, &today, "by 34", &held_by(2, 34)).await;
    assert!(written.applied);
    assert_eq!(written.watermark.token, token(34));
    assert_eq!(written.watermark.holder, held_by(2, 34).holder());
    for store in lab.each() {
        let refusal = try_put(store, &today, "late", &held_by(1, 33))
            .await
            .unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Fenced);
        assert_eq!(number(refusal.token()), Some(33));
        assert_eq!(number(refusal.watermark()), Some(34));
        let said = refusal.to_string();
        assert!(said.contains("33") && said.contains("34"), "{said}");
    }
    assert_is(lab, &today, Some("by 34"), Some(34), 34).await;
    put(&lab.a, &today, "by 35", &held_by(3, 35)).await;
    assert_is(lab, &today, Some("by 35"), Some(35), 35).await;
}

pub(super) async fn a_stale_raise_and_delete_are_refused(lab: &Lab<'_>) {
    let resource = lab.resource("stale");
    put(&lab.a, &resource, "new", &fence(34)).await;
    assert_all_refused(lab, &resource, &held_by(2, 33), ErrorKind::Fenced).await;
    assert_all_refused(lab, &resource, &bare(33), ErrorKind::Fenced).await;
    assert_is(lab, &resource, Some("new"), Some(34), 34).await;
}

pub(super) async fn a_raise_refuses_what_is_below_it(lab: &Lab<'_>) {
    let resource = lab.resource("raised");
    put(&lab.a, &resource, "old", &held_by(1, 30)).await;
    lab.b.raise(&resource, &held_by(2, 40)).await.unwrap();
    assert_all_refused(lab, &resource, &held_by(1, 39), ErrorKind::Fenced).await;
    assert_all_refused(lab, &resource, &held_by(1, 30), ErrorKind::Fenced).await;
    assert_is(lab, &resource, Some("old"), Some(30), 40).await;

    let empty = lab.resource("raised-empty");
    lab.a.raise(&empty, &held_by(2, 40)).await.unwrap();
    assert_all_refused(lab, &empty, &held_by(1, 39), ErrorKind::Fenced).await;
    assert_is(lab, &empty, None, None, 40).await;
}

pub(super) async fn a_refused_write_leaves_nothing(lab: &Lab<'_>) {
    let resource = lab.resource("untouched");
    let written = put(&lab.a, &resource, "kept", &held_by(2, 34).with_seq(3)).await;
    assert_all_refused(
        lab,
        &resource,
        &held_by(1, 33).with_seq(9),
        ErrorKind::Fenced,
    )
    .await;
    let seen = get(&lab.b, &resource).await;
    assert_eq!(seen.watermark, Some(written.watermark));
    assert_eq!(text(seen).as_deref(), Some("kept"));
}

pub(super) async fn deleting_keeps_the_watermark(lab: &Lab<'_>) {
    let resource = lab.resource("deleted");
    put(&lab.a, &resource, "value", &held_by(1, 33)).await;
    let deleted = lab.b.delete(&resource, &held_by(2, 34)).await.unwrap();
    assert!(deleted.applied);
    assert_eq!(deleted.watermark.token, token(34));
    assert_is(lab, &resource, None, None, 34).await;
    assert_all_refused(lab, &resource, &held_by(1, 33), ErrorKind::Fenced).await;
    put(&lab.a, &resource, "again", &held_by(2, 34)).await;
    put(&lab.a, &resource, "newer", &held_by(3, 35)).await;
    assert_is(lab, &resource, Some("newer"), Some(35), 35).await;
}

pub(super) async fn deleting_what_is_not_there_raises(lab: &Lab<'_>) {
    let resource = lab.resource("not-there");
    lab.a.delete(&resource, &held_by(2, 34)).await.unwrap();
    assert_is(lab, &resource, None, None, 34).await;
    lab.b.delete(&resource, &held_by(2, 34)).await.unwrap();
    assert_all_refused(lab, &resource, &held_by(1, 33), ErrorKind::Fenced).await;
}

pub(super) async fn one_bad_number_cannot_brick_a_resource(lab: &Lab<'_>) {
    for (stem, used) in [("bricked", true), ("bricked-new", false)] {
        let resource = lab.resource(stem);
        if used {
            put(&lab.a, &resource, "before", &fence(7)).await;
        }
        for forged in [fence(1 << 62), Fence::from(FencingToken::MAX)] {
            assert_all_refused(lab, &resource, &forged, ErrorKind::Invalid).await;
            let rebind = lab.b.rebind(&resource, &forged).await;
            assert_eq!(rebind.unwrap_err().kind(), ErrorKind::Invalid);
        }
        if used {
            assert_is(lab, &resource, Some("before"), Some(7), 7).await;
        } else {
            assert!(get(&lab.b, &resource).await.watermark.is_none());
        }
        put(&lab.b, &resource, "after", &fence(8)).await;
        assert_is(lab, &resource, Some("after"), Some(8), 8).await;
    }
}

pub(super) async fn first_tokens_of_counters_and_of_clocks_pass(lab: &Lab<'_>) {
    let now = unix_micros();
    let (counted, clocked) = (lab.resource("counted"), lab.resource("clocked"));
    put(&lab.a, &counted, "first", &fence(1)).await;
    put(&lab.a, &clocked, "first", &fence(now)).await;
    put(&lab.b, &clocked, "second", &fence(now + 1)).await;
    // From a counter to a clock, and by a large step.
    put(&lab.b, &counted, "jump", &fence(1 << 32)).await;
    put(&lab.b, &counted, "clock", &fence(now)).await;
    assert_is(lab, &counted, Some("clock"), Some(now), now).await;
    assert_is(lab, &clocked, Some("second"), Some(now + 1), now + 1).await;
}

pub(super) async fn watermarks_survive_a_restart(lab: &Lab<'_>) {
    let (written, raised, deleted) = (
        lab.resource("restart-written"),
        lab.resource("restart-raised"),
        lab.resource("restart-deleted"),
    );
    let full = held_by(2, 34).with_seq(5);
    put(&lab.a, &written, "kept", &full).await;
    put(&lab.a, &raised, "kept", &held_by(1, 33)).await;
    lab.a.raise(&raised, &held_by(2, 34)).await.unwrap();
    put(&lab.a, &deleted, "gone", &held_by(1, 33)).await;
    lab.a.delete(&deleted, &held_by(2, 34)).await.unwrap();

    let Some([a, b]) = lab.harness.restart().await else {
        missing_hook("restart");
    };
    let lab = Lab {
        harness: lab.harness,
        a,
        b,
    };
    assert_is(&lab, &written, Some("kept"), Some(34), 34).await;
    assert_is(&lab, &raised, Some("kept"), Some(33), 34).await;
    assert_is(&lab, &deleted, None, None, 34).await;
    for resource in [&written, &raised, &deleted] {
        assert_all_refused(&lab, resource, &held_by(1, 33), ErrorKind::Fenced).await;
        assert_all_refused(&lab, resource, &held_by(3, 34), ErrorKind::Fenced).await;
        assert_all_refused(
            &lab,
            resource,
            &of_another_lock(99),
            ErrorKind::DomainMismatch,
        )
        .await;
    }
    assert!(!put(&lab.b, &written, "repeat", &full).await.applied);
    assert_is(&lab, &written, Some("kept"), Some(34), 34).await;
}
