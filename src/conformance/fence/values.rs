//! Values come back as they were put, with what is known of them.

use std::io::{Seek as _, Write as _};

use super::*;
use crate::lease::Severity;

pub(super) async fn a_resource_that_was_never_written_is_empty(lab: &Lab<'_>) {
    let resource = lab.resource("never");
    for store in lab.each() {
        for _ in 0..2 {
            let seen = get(store, &resource).await;
            assert!(seen.value.is_none() && seen.watermark.is_none() && seen.writer.is_none());
        }
    }
    let seen = lab.a.raise(&resource, &fence(5)).await.unwrap();
    assert!(seen.value.is_none() && seen.writer.is_none());
    assert_eq!(
        seen.watermark.expect("the raised watermark").token,
        token(5)
    );
    put(&lab.b, &resource, "first", &fence(5)).await;
    assert_is(lab, &resource, Some("first"), Some(5), 5).await;
}

pub(super) async fn a_raise_returns_the_value(lab: &Lab<'_>) {
    let resource = lab.resource("read");
    put(&lab.a, &resource, "one", &held_by(1, 33)).await;
    let seen = lab.b.raise(&resource, &held_by(2, 34)).await.unwrap();
    assert_eq!(number(seen.writer), Some(33));
    assert_eq!(seen.watermark.as_ref().unwrap().token, token(34));
    assert_eq!(
        seen.watermark.as_ref().unwrap().holder,
        held_by(2, 34).holder()
    );
    assert_eq!(text(seen).as_deref(), Some("one"));
    put(&lab.b, &resource, "two", &held_by(2, 34)).await;
    let again = lab.a.raise(&resource, &held_by(2, 34)).await.unwrap();
    assert_eq!(number(again.writer), Some(34));
    assert_eq!(text(again).as_deref(), Some("two"));
}

pub(super) async fn values_come_back_exactly(lab: &Lab<'_>) {
    let large: Vec<u8> = (0..lab.harness.large_value_bytes())
        .map(|i| u8::try_from(i * 31 % 251).unwrap())
        .collect();
    let all_bytes: Vec<u8> = (0..=255).collect();
    let values = [
        Vec::new(),
        b"\0".to_vec(),
        b"line\r\nline\n\n".to_vec(),
        all_bytes.repeat(3),
        large,
        b"short again".to_vec(),
    ];
    let resource = lab.resource("exact");
    for (i, value) in (1..).zip(values) {
        lab.a
            .put(&resource, value.clone().into(), &fence(i))
            .await
            .unwrap();
        let seen = get(&lab.b, &resource).await;
        assert_eq!(
            seen.value.as_ref().map(Body::len),
            u64::try_from(value.len()).ok()
        );
        assert!(
            bytes(seen).as_ref() == Some(&value),
            "the value of {} bytes",
            value.len()
        );
        let raised = lab.b.raise(&resource, &fence(i)).await.unwrap();
        assert!(
            bytes(raised).as_ref() == Some(&value),
            "the value of {} bytes",
            value.len()
        );
    }
    let mut file = temporary_file();
    file.write_all(b"skipped, and kept").unwrap();
    file.seek(std::io::SeekFrom::Start(9)).unwrap();
    lab.b
        .put(&resource, Body::from_file(file).unwrap(), &fence(90))
        .await
        .unwrap();
    assert_is(lab, &resource, Some("and kept"), Some(90), 90).await;
}

/// An open file without a name.
fn temporary_file() -> std::fs::File {
    let holder = crate::lease::HolderId::random().reveal();
    let path = std::env::temp_dir().join(format!("fencelock-conformance-{holder}"));
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .expect("a temporary file is made");
    std::fs::remove_file(&path).expect("a temporary file is unlinked");
    file
}

pub(super) async fn get_tells_the_writer(lab: &Lab<'_>) {
    let resource = lab.resource("writer");
    put(&lab.a, &resource, "by 33", &held_by(1, 33)).await;
    lab.a.raise(&resource, &held_by(2, 34)).await.unwrap();
    assert_is(lab, &resource, Some("by 33"), Some(33), 34).await;
    lab.b.delete(&resource, &held_by(2, 34)).await.unwrap();
    assert_is(lab, &resource, None, None, 34).await;
    put(&lab.b, &resource, "by 36", &bare(36)).await;
    assert_is(lab, &resource, Some("by 36"), Some(36), 36).await;
}

pub(super) async fn resources_are_independent(lab: &Lab<'_>) {
    let (one, two) = (lab.resource("one"), lab.resource("two"));
    put(&lab.a, &one, "high", &fence(90)).await;
    put(&lab.b, &two, "low", &of_another_lock(3)).await;
    lab.a.delete(&one, &fence(91)).await.unwrap();
    assert_is(lab, &one, None, None, 91).await;
    assert_is(lab, &two, Some("low"), Some(3), 3).await;
}

pub(super) async fn odd_names_are_different_resources(lab: &Lab<'_>) {
    let mut taken = Vec::new();
    for name in odd_names() {
        let resource = ResourceName::new(&name).unwrap();
        match try_put(&lab.a, &resource, &name, &fence(5)).await {
            Ok(_) => taken.push(resource),
            Err(refusal) => {
                assert_eq!(refusal.kind(), ErrorKind::Invalid, "{name:?}: {refusal:?}");
                // Whoever cannot write it cannot read something else under it.
                if let Ok(seen) = lab.b.get(&resource).await {
                    assert!(seen.value.is_none(), "{name:?}");
                }
            }
        }
    }
    for resource in &taken {
        assert_is(lab, resource, Some(resource.as_str()), Some(5), 5).await;
    }
    assert!(!taken.is_empty(), "the storage took no name at all");
    // Raised one by one, each is itself only.
    for (i, resource) in taken.iter().enumerate() {
        lab.b.raise(resource, &fence(9)).await.unwrap();
        for other in taken.iter().skip(i + 1) {
            let seen = get(&lab.a, other).await;
            assert_eq!(
                seen.watermark.unwrap().token,
                token(5),
                "{resource:?} {other:?}"
            );
        }
    }
}

pub(super) async fn a_write_is_seen_by_the_other_client(lab: &Lab<'_>) {
    let resource = lab.resource("shared");
    for i in 1..=30 {
        let [writer, reader] = if i % 2 == 0 {
            [&lab.a, &lab.b]
        } else {
            [&lab.b, &lab.a]
        };
        put(writer, &resource, &i.to_string(), &fence(i)).await;
        let seen = get(reader, &resource).await;
        assert_eq!(number(seen.writer), Some(i));
        assert_eq!(text(seen), Some(i.to_string()));
    }
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
}
