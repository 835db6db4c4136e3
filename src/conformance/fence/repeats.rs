//! Equal tokens: one holder's writes in order, and nobody else's.

use tokio::task::JoinSet;

use super::*;
use crate::conformance::faults::{FaultyFence, Op, Strike};

pub(super) async fn an_equal_token_is_for_its_holder_only(lab: &Lab<'_>) {
    let resource = lab.resource("equal");
    put(&lab.a, &resource, "one", &held_by(1, 34)).await;
    put(&lab.b, &resource, "two", &held_by(1, 34)).await;
    assert_all_refused(lab, &resource, &held_by(2, 34), ErrorKind::Fenced).await;
    let refusal = try_put(&lab.a, &resource, "no", &held_by(2, 34))
        .await
        .unwrap_err();
    assert_eq!(number(refusal.token()), Some(34));
    assert_eq!(number(refusal.watermark()), Some(34));
    assert_is(lab, &resource, Some("two"), Some(34), 34).await;

    // A raise binds the number to its holder as a write does.
    let raised = lab.resource("equal-raised");
    lab.a.raise(&raised, &held_by(1, 34)).await.unwrap();
    lab.b.raise(&raised, &held_by(1, 34)).await.unwrap();
    assert_all_refused(lab, &raised, &held_by(2, 34), ErrorKind::Fenced).await;
    put(&lab.b, &raised, "mine", &held_by(1, 34)).await;
    lab.a.delete(&raised, &held_by(1, 34)).await.unwrap();
    assert_all_refused(lab, &raised, &held_by(2, 34), ErrorKind::Fenced).await;
}

pub(super) async fn own_writes_are_ordered(lab: &Lab<'_>) {
    let resource = lab.resource("ordered");
    put(&lab.a, &resource, "second", &fence(34).with_seq(2)).await;
    for store in lab.each() {
        let late = try_put(store, &resource, "first", &fence(34).with_seq(1)).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
        let late = store.delete(&resource, &fence(34).with_seq(1)).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    }
    assert_is(lab, &resource, Some("second"), Some(34), 34).await;
    put(&lab.b, &resource, "third", &fence(34).with_seq(3)).await;
    // A write without a sequence has no place in the order: it is taken as it comes, and what had
    // a place keeps it.
    put(&lab.a, &resource, "loose", &fence(34)).await;
    let late = try_put(&lab.a, &resource, "second again", &fence(34).with_seq(2)).await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    assert_is(lab, &resource, Some("loose"), Some(34), 34).await;
}

pub(super) async fn a_repeat_is_acknowledged_and_not_applied(lab: &Lab<'_>) {
    let resource = lab.resource("repeat");
    let first = fence(34).with_seq(1);
    assert!(put(&lab.a, &resource, "first", &first).await.applied);
    for store in lab.each() {
        // Another value shows whether it was applied after all.
        let again = put(store, &resource, "changed", &first).await;
        assert!(!again.applied);
        assert_eq!(again.watermark.token, token(34));
        assert_eq!(again.watermark.seq, 1);
    }
    assert_is(lab, &resource, Some("first"), Some(34), 34).await;
    // After a later write without a sequence, the later value stands.
    put(&lab.b, &resource, "later", &fence(34)).await;
    assert!(!put(&lab.a, &resource, "first", &first).await.applied);
    assert_is(lab, &resource, Some("later"), Some(34), 34).await;
    put(&lab.b, &resource, "second", &fence(34).with_seq(2)).await;
    let late = try_put(&lab.a, &resource, "first", &first).await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    assert_is(lab, &resource, Some("second"), Some(34), 34).await;
}

pub(super) async fn a_repeated_delete_is_acknowledged(lab: &Lab<'_>) {
    let resource = lab.resource("repeat-delete");
    put(&lab.a, &resource, "value", &fence(34).with_seq(1)).await;
    let delete = fence(34).with_seq(2);
    assert!(lab.a.delete(&resource, &delete).await.unwrap().applied);
    assert!(!lab.b.delete(&resource, &delete).await.unwrap().applied);
    put(&lab.b, &resource, "later", &fence(34)).await;
    assert!(!lab.a.delete(&resource, &delete).await.unwrap().applied);
    assert_is(lab, &resource, Some("later"), Some(34), 34).await;
}

pub(super) async fn a_repeat_after_a_higher_token_is_refused(lab: &Lab<'_>) {
    let resource = lab.resource("repeat-stale");
    let first = held_by(1, 33).with_seq(1);
    put(&lab.a, &resource, "first", &first).await;
    lab.b.raise(&resource, &held_by(2, 34)).await.unwrap();
    let late = try_put(&lab.a, &resource, "first", &first).await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    assert_is(lab, &resource, Some("first"), Some(33), 34).await;
}

pub(super) async fn a_raise_is_not_a_write(lab: &Lab<'_>) {
    let resource = lab.resource("raise-seq");
    let first = fence(34).with_seq(1);
    lab.a.raise(&resource, &first).await.unwrap();
    assert!(put(&lab.b, &resource, "first", &first).await.applied);
    put(&lab.b, &resource, "third", &fence(34).with_seq(3)).await;
    for seq in [1, 3, 9] {
        let snapshot = lab
            .a
            .raise(&resource, &fence(34).with_seq(seq))
            .await
            .unwrap();
        assert_eq!(text(snapshot).as_deref(), Some("third"));
    }
    assert!(
        put(&lab.a, &resource, "fourth", &fence(34).with_seq(4))
            .await
            .applied
    );
}

pub(super) async fn sequences_begin_anew_with_each_token(lab: &Lab<'_>) {
    let resource = lab.resource("anew");
    put(&lab.a, &resource, "old", &held_by(1, 33).with_seq(7)).await;
    assert!(
        put(&lab.b, &resource, "new", &held_by(2, 34).with_seq(1))
            .await
            .applied
    );
    assert_is(lab, &resource, Some("new"), Some(34), 34).await;
    // A raise, too, forgets the sequence of the token before.
    lab.a.raise(&resource, &held_by(3, 35)).await.unwrap();
    assert!(
        put(&lab.a, &resource, "newest", &held_by(3, 35).with_seq(1))
            .await
            .applied
    );
    assert_is(lab, &resource, Some("newest"), Some(35), 35).await;
}

pub(super) async fn shuffled_sequences_leave_the_last(lab: &Lab<'_>) {
    let resource = lab.resource("shuffled");
    let mut tasks = JoinSet::new();
    for i in 0..20_u64 {
        // 7 and 20 have no common divisor, so that each comes once.
        let seq = i * 7 % 20 + 1;
        let store = Arc::clone(lab.each()[usize::from(i % 2 == 0)]);
        let resource = resource.clone();
        tasks.spawn(async move {
            let answer = try_put(
                &store,
                &resource,
                &seq.to_string(),
                &fence(34).with_seq(seq),
            )
            .await;
            answer.map(|_| ()).or_else(|error| match error.kind() {
                ErrorKind::Fenced => Ok(()),
                _ => Err(error),
            })
        });
    }
    for answer in tasks.join_all().await {
        answer.expect("accepted or fenced");
    }
    assert_is(lab, &resource, Some("20"), Some(34), 34).await;
}

pub(super) async fn a_lost_answer_can_be_asked_for_again(lab: &Lab<'_>) {
    let resource = lab.resource("lost-answer");
    let faulty = FaultyFence::new(Arc::clone(&lab.a));
    let store: Arc<dyn FencedStore> = Arc::new(faulty.clone());
    let first = fence(34).with_seq(1);
    faulty
        .faults()
        .next(Op::Put, Strike::After(ErrorKind::Indeterminate));
    let lost = try_put(&store, &resource, "first", &first).await;
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Indeterminate);
    assert_is(lab, &resource, Some("first"), Some(34), 34).await;
    assert!(!put(&store, &resource, "first", &first).await.applied);
    assert_eq!(faulty.faults().struck(), 1);
}

pub(super) async fn bare_numbers_are_ordered(lab: &Lab<'_>) {
    let resource = lab.resource("bare");
    put(&lab.a, &resource, "one", &bare(34)).await;
    assert!(put(&lab.b, &resource, "two", &bare(34)).await.applied);
    assert_all_refused(lab, &resource, &bare(33), ErrorKind::Fenced).await;
    assert_is(lab, &resource, Some("two"), Some(34), 34).await;
    lab.a.raise(&resource, &bare(35)).await.unwrap();
    assert_all_refused(lab, &resource, &bare(34), ErrorKind::Fenced).await;
    // The first holder that shows the number has it.
    put(&lab.a, &resource, "three", &held_by(1, 35)).await;
    assert_all_refused(lab, &resource, &held_by(2, 35), ErrorKind::Fenced).await;
    put(&lab.b, &resource, "four", &bare(35)).await;
    assert_all_refused(lab, &resource, &held_by(2, 35), ErrorKind::Fenced).await;
    assert_is(lab, &resource, Some("four"), Some(35), 35).await;
}
