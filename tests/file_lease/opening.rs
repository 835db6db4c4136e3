//! Opening, and what a probe finds.

use super::*;

#[test]
fn a_path_that_cannot_be_a_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kind = |path: &Path| FileStore::open(path).unwrap_err().kind();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(kind(&file), ErrorKind::Invalid);
    assert_eq!(kind(&file.join("below")), ErrorKind::Invalid);

    // Not even the superuser can make a directory there.
    for nowhere in ["/proc/none/store", "/sys/kernel/store"] {
        let error = FileStore::open(nowhere).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(nowhere), "{error}");
        assert!(error.to_string().contains("existing="), "{error}");
    }

    let open_to_all = dir.path().join("all");
    fs::create_dir(&open_to_all).unwrap();
    fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(kind(&open_to_all), ErrorKind::Invalid);

    let planted = dir.path().join("planted");
    fs::create_dir(&planted).unwrap();
    std::os::unix::fs::symlink(dir.path(), planted.join("locks")).unwrap();
    assert_eq!(kind(&planted), ErrorKind::Invalid);
}

#[tokio::test]
async fn files_are_for_their_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("deep/store");
    let store = FileStore::open(&root).unwrap();
    granted(&store, &request("a", LONG)).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for part in [root.clone(), root.join("locks"), root.join("live")] {
        assert_eq!(mode(&part), 0o700, "{part:?}");
    }
    let live = fs::read_dir(root.join("live"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    for file in [root.join("store"), root.join("locks/a"), live] {
        assert_eq!(mode(&file), 0o600, "{file:?}");
    }
}

#[test]
fn all_who_open_a_new_store_at_once_agree_on_its_realm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let realms: HashSet<String> = std::thread::scope(|scope| {
        let open = || FileStore::open(&path).unwrap().profile().realm.clone();
        let threads: Vec<_> = (0..50).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(realms.len(), 1);
    assert_eq!(
        fs::read_dir(&path).unwrap().count(),
        3,
        "half-made files were left"
    );
}

#[tokio::test]
async fn a_probe_tells_what_it_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    granted(&store, &request("a", LONG)).await;
    let findings = store.probe().await.unwrap();
    assert!(
        findings.iter().all(|f| f.severity < Severity::Bad),
        "{findings:?}"
    );
    let of = |subject: &str| {
        &findings
            .iter()
            .find(|f| f.subject == subject)
            .unwrap()
            .detail
    };
    assert!(of("identity").contains(&store.profile().realm));
    assert_eq!(of("records"), "1 sound, 1 of them held");
    fs::write(record_path(dir.path(), "broken"), "").unwrap();
    fs::set_permissions(
        record_path(dir.path(), "broken"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    let findings = store.probe().await.unwrap();
    let bad: Vec<_> = findings
        .iter()
        .filter(|f| f.severity == Severity::Bad)
        .collect();
    assert!(
        bad.len() == 1
            && bad[0].detail.contains("locks/broken")
            && bad[0]
                .detail
                .contains("`fencelock repair 'broken' --min-token N`"),
        "{bad:?}"
    );
    assert!(
        findings
            .iter()
            .any(|f| f.detail == "1 sound, 1 of them held")
    );

    // A damaged identity is a finding as well, and hides no other.
    fs::write(dir.path().join("store"), "damaged").unwrap();
    let findings = store.probe().await.unwrap();
    let identity = findings.iter().find(|f| f.subject == "identity").unwrap();
    assert_eq!(identity.severity, Severity::Bad);
    assert!(identity.detail.contains("?mend=N'"), "{identity:?}");
    assert!(findings.len() > 5, "{findings:?}");
}
