//! Names are exact bytes, and lists are in their order.

use super::*;

pub(super) async fn odd_names_are_different_locks(lab: &Lab<'_>) {
    let mut all = Vec::new();
    for name in odd_names() {
        all.push(take(&lab.a, long(&name)).await);
    }
    for taken in &all {
        assert_held(lab, &taken.request).await;
        let seen = state(&lab.b, &taken.request.name).await.expect("a record");
        assert_eq!(seen.name, taken.request.name);
        assert_eq!(seen.holders[0].token, taken.token());
    }
    let listed = lab.b.list("", None, 1_000).await.unwrap();
    let listed: Vec<String> = listed.iter().map(|s| s.name.as_str().to_owned()).collect();
    let mut expected = odd_names();
    expected.sort();
    assert_eq!(listed, expected);
    // Freed one by one, each frees itself only.
    while let Some(taken) = all.pop() {
        give(&lab.b, &taken).await;
        for other in &all {
            assert_eq!(
                holders(&lab.b, &other.request.name).await.len(),
                1,
                "{other:?}"
            );
        }
    }
}

pub(super) async fn a_lock_and_a_path_below_it_do_not_meet(lab: &Lab<'_>) {
    for below in ["a/b", "a/", "a:0", "a:fence", "a.lock", "a/b/c"] {
        let taken = take(&lab.a, long(below)).await;
        let other = take(&lab.b, long("a")).await;
        lab.b.break_lock(&lock("a")).await.unwrap();
        let floor = token(other.token().get() + 9);
        lab.b.raise_floor(&lock("a"), floor, false).await.unwrap();
        assert_lost(&renew(&lab.b, other.lease(), long_ttl()).await);
        assert_renewed(&renew(&lab.a, taken.lease(), long_ttl()).await);
        assert_held(lab, &taken.request).await;
        lab.a.break_lock(&taken.request.name).await.unwrap();
    }
}

const LISTED: [&str; 12] = [
    "%", "Job/1", "_", "a%", "ab", "job", "job/1", "job/10", "job/2", "job_1", "jobs/1", "é",
];

async fn take_listed(lab: &Lab<'_>) {
    for name in LISTED.iter().rev() {
        take(&lab.a, long(name)).await;
    }
}

async fn list(lab: &Lab<'_>, prefix: &str, after: Option<&str>, limit: usize) -> Vec<String> {
    let after = after.map(lock);
    let states = lab.b.list(prefix, after.as_ref(), limit).await.unwrap();
    states
        .iter()
        .map(|state| state.name.as_str().to_owned())
        .collect()
}

pub(super) async fn names_are_listed_by_prefix_in_order(lab: &Lab<'_>) {
    take_listed(lab).await;
    assert_eq!(list(lab, "", None, 100).await, LISTED);
    assert_eq!(
        list(lab, "job/", None, 100).await,
        ["job/1", "job/10", "job/2"]
    );
    assert_eq!(list(lab, "job/1", None, 100).await, ["job/1", "job/10"]);
    assert_eq!(list(lab, "J", None, 100).await, ["Job/1"]);
    assert_eq!(list(lab, "%", None, 100).await, ["%"]);
    assert_eq!(list(lab, "_", None, 100).await, ["_"]);
    assert_eq!(list(lab, "a%", None, 100).await, ["a%"]);
    assert_eq!(list(lab, "job_", None, 100).await, ["job_1"]);
    for nothing in ["*", "?", "[a]", "jobx", "zz", ".*", "job/1\0"] {
        assert!(
            list(lab, nothing, None, 100).await.is_empty(),
            "{nothing:?}"
        );
    }
    let seen = lab.b.list("job/2", None, 1).await.unwrap();
    assert_eq!(seen[0].holders.len(), 1);
    assert_eq!(seen[0].last_token, Some(seen[0].holders[0].token));
}

pub(super) async fn a_list_is_read_in_pages(lab: &Lab<'_>) {
    take_listed(lab).await;
    let mut paged: Vec<String> = Vec::new();
    loop {
        let page = list(lab, "", paged.last().map(String::as_str), 5).await;
        assert!(page.len() <= 5);
        if page.is_empty() {
            break;
        }
        paged.extend(page);
        assert!(
            paged.len() <= LISTED.len(),
            "a name was shown twice: {paged:?}"
        );
    }
    assert_eq!(paged, LISTED);
    assert_eq!(list(lab, "job/", Some("job/1"), 1).await, ["job/10"]);
    // After a name that is not there, or is not of the prefix.
    assert_eq!(list(lab, "job/", Some("job/11"), 100).await, ["job/2"]);
    assert_eq!(list(lab, "job/", Some("a"), 2).await, ["job/1", "job/10"]);
    assert!(list(lab, "job/", Some("z"), 100).await.is_empty());
    assert!(list(lab, "", None, 0).await.is_empty());
}
