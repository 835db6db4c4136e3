//! A resource accepts the tokens of one lock.

use super::*;

pub(super) async fn another_lock_is_refused(lab: &Lab<'_>) {
    let resource = lab.resource("bound");
    put(&lab.a, &resource, "bound", &fence(34)).await;
    for number in [33, 34, 35, 1_000] {
        let other = of_another_lock(number);
        assert_all_refused(lab, &resource, &other, ErrorKind::DomainMismatch).await;
    }
    let seen = get(&lab.b, &resource).await;
    assert_eq!(seen.watermark.unwrap().domain, Some(domain("lock")));
    assert_is(lab, &resource, Some("bound"), Some(34), 34).await;

    // A raise and a delete bind as a put does.
    for (stem, delete) in [("bound-raise", false), ("bound-delete", true)] {
        let resource = lab.resource(stem);
        if delete {
            lab.a.delete(&resource, &fence(34)).await.unwrap();
        } else {
            lab.a.raise(&resource, &fence(34)).await.unwrap();
        }
        let other = of_another_lock(35);
        assert_all_refused(lab, &resource, &other, ErrorKind::DomainMismatch).await;
        put(&lab.b, &resource, "mine", &fence(35)).await;
    }
}

pub(super) async fn a_rebind_moves_a_resource_to_another_lock(lab: &Lab<'_>) {
    let resource = lab.resource("rebound");
    put(&lab.a, &resource, "kept", &fence(34)).await;
    let rebound = lab.b.rebind(&resource, &of_another_lock(35)).await.unwrap();
    assert!(rebound.applied);
    assert_eq!(rebound.watermark.domain, Some(domain("another")));
    assert_is(lab, &resource, Some("kept"), Some(34), 35).await;
    for number in [34, 36, 1_000] {
        assert_all_refused(lab, &resource, &fence(number), ErrorKind::DomainMismatch).await;
    }
    put(&lab.a, &resource, "moved", &of_another_lock(35)).await;
    put(&lab.b, &resource, "on", &of_another_lock(36)).await;
    assert_is(lab, &resource, Some("on"), Some(36), 36).await;
}

pub(super) async fn a_rebind_that_does_not_raise_is_refused(lab: &Lab<'_>) {
    let resource = lab.resource("rebind-low");
    put(&lab.a, &resource, "kept", &fence(34)).await;
    for number in [33, 34] {
        let refusal = lab
            .b
            .rebind(&resource, &of_another_lock(number))
            .await
            .unwrap_err();
        assert_eq!(refusal.kind(), ErrorKind::Fenced, "{refusal:?}");
        assert_eq!(number_of_watermark(&refusal), Some(34));
    }
    assert_eq!(
        lab.b
            .rebind(&resource, &fence(33))
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Fenced,
    );
    put(&lab.a, &resource, "still", &fence(34)).await;
    assert_is(lab, &resource, Some("still"), Some(34), 34).await;
}

pub(super) async fn a_bare_number_rebinds_nothing(lab: &Lab<'_>) {
    let resource = lab.resource("rebind-bare");
    put(&lab.a, &resource, "kept", &fence(34)).await;
    let refusal = lab.b.rebind(&resource, &bare(99)).await.unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::Invalid, "{refusal:?}");
    // It would have unbound the resource: the other lock is still refused, and the former is not.
    let other = of_another_lock(100);
    assert_all_refused(lab, &resource, &other, ErrorKind::DomainMismatch).await;
    put(&lab.a, &resource, "still", &fence(35)).await;
}

fn number_of_watermark(refusal: &Error) -> Option<u64> {
    number(refusal.watermark())
}

pub(super) async fn a_bare_number_binds_nothing(lab: &Lab<'_>) {
    let resource = lab.resource("unbound");
    put(&lab.a, &resource, "bare", &bare(30)).await;
    assert_eq!(get(&lab.b, &resource).await.watermark.unwrap().domain, None);
    put(&lab.b, &resource, "bound", &fence(31)).await;
    let other = of_another_lock(40);
    assert_all_refused(lab, &resource, &other, ErrorKind::DomainMismatch).await;
    put(&lab.a, &resource, "bare again", &bare(32)).await;
    // It passed, and the resource is bound as before.
    assert_all_refused(lab, &resource, &other, ErrorKind::DomainMismatch).await;
    assert_is(lab, &resource, Some("bare again"), Some(32), 32).await;
}
