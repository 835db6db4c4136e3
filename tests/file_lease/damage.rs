//! Damage: nothing is granted, nothing is hidden, and the whole remedy is told.

use super::*;

/// All that could grant or tell a token refuses, and names the lock, the file and what mends it.
async fn assert_corrupt(store: &FileStore, text: &str, how: &str) {
    let file = name(text).encoded();
    for error in [
        store.acquire(&request(text, LONG)).await.unwrap_err(),
        store.inspect(&name(text)).await.unwrap_err(),
        store.break_lock(&name(text)).await.unwrap_err(),
        store
            .raise_floor(&name(text), token(1), false)
            .await
            .unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{how}: {error}");
        assert!(
            error.to_string().contains(&format!("locks/{file}")),
            "{how}: {error}"
        );
        assert!(
            error
                .to_string()
                .contains(&format!("`fencelock repair '{text}' --min-token N`")),
            "{how}: {error}"
        );
    }
}

#[tokio::test]
async fn a_record_cut_short_at_any_length_is_corrupt_until_mended() {
    for length in [0, 1, 20, 4_095, 4_096, 8_191, 8_192, 12_287, 12_288, 16_383] {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let last = granted(&store, &request("a", LONG)).await.token;
        let file = fs::OpenOptions::new()
            .write(true)
            .open(record_path(dir.path(), "a"))
            .unwrap();
        file.set_len(length).unwrap();
        assert_corrupt(&store, "a", &format!("cut to {length}")).await;
        let counts_as = store.raise_floor(&name("a"), token(1), true).await.unwrap();
        assert!(counts_as >= last);
        assert!(granted(&store, &request("a", LONG)).await.token > counts_as);
    }
}

#[tokio::test]
async fn a_record_that_was_emptied_or_overwritten_is_corrupt() {
    let (reservation, state, all) = ((0, 8_192), (8_192, 16_384), (0, 16_384));
    for (from, to) in [reservation, state, all] {
        for filler in [0, 0xff, b'x'] {
            let dir = tempfile::tempdir().unwrap();
            let store = FileStore::open(dir.path()).unwrap();
            granted(&store, &request("a", LONG)).await;
            let file = fs::OpenOptions::new()
                .write(true)
                .open(record_path(dir.path(), "a"))
                .unwrap();
            file.write_all_at(&vec![filler; to - from], u64::try_from(from).unwrap())
                .unwrap();
            assert_corrupt(&store, "a", &format!("{from}..{to} filled with {filler}")).await;
        }
    }
}

#[tokio::test]
async fn a_flipped_byte_anywhere_neither_frees_the_lock_nor_repeats_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let path = record_path(dir.path(), "a");
    cycle(&a, "a").await;
    let last = granted(&a, &request("a", LONG)).await.token;
    let sound = fs::read(&path).unwrap();
    let written: Vec<usize> = (0..sound.len()).filter(|at| sound[*at] != 0).collect();
    for at in written {
        let mut flipped = sound.clone();
        flipped[at] ^= 0x5a;
        // In place: a new file would be another record.
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&flipped, 0)
            .unwrap();
        match b.acquire(&request("a", LONG)).await {
            Ok(Attempt::Held(_)) => {}
            Ok(Attempt::Granted(_)) => panic!("byte {at} freed the lock"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Corrupt, "byte {at}: {e}"),
        }
    }
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(&sound, 0)
        .unwrap();
    b.break_lock(&name("a")).await.unwrap();
    assert_eq!(cycle(&b, "a").await, last.get() + 1);
}

#[tokio::test]
async fn a_record_of_another_name_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    cycle(&store, "a").await;
    fs::copy(record_path(dir.path(), "a"), record_path(dir.path(), "b")).unwrap();
    fs::set_permissions(
        record_path(dir.path(), "b"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    assert_corrupt(&store, "b", "copied").await;
}

#[tokio::test]
async fn a_deleted_record_starts_above_every_token_it_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let mut last = 0;
    for _ in 0..5 {
        for _ in 0..40 {
            let next = cycle(&store, "a").await;
            assert!(next > last);
            last = next;
        }
        fs::remove_file(record_path(dir.path(), "a")).unwrap();
    }
}

#[tokio::test]
async fn what_is_planted_in_a_records_place_is_refused_and_leads_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let path = record_path(dir.path(), "a");
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();

    std::os::unix::fs::symlink(&victim, &path).unwrap();
    assert_corrupt(&store, "a", "symlink").await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    store.raise_floor(&name("a"), token(7), true).await.unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(cycle(&store, "a").await > 7);
    fs::remove_file(&path).unwrap();

    std::os::unix::fs::symlink(dir.path().join("nowhere"), &path).unwrap();
    assert_corrupt(&store, "a", "dangling symlink").await;
    assert!(!dir.path().join("nowhere").exists());
    fs::remove_file(&path).unwrap();

    assert!(
        Command::new("mkfifo")
            .arg(&path)
            .status()
            .unwrap()
            .success()
    );
    assert_corrupt(&store, "a", "pipe").await;
    store.raise_floor(&name("a"), token(7), true).await.unwrap();
    assert!(cycle(&store, "a").await > 7);
    fs::remove_file(&path).unwrap();

    fs::create_dir(&path).unwrap();
    assert_corrupt(&store, "a", "directory").await;
    store
        .raise_floor(&name("a"), token(7), true)
        .await
        .unwrap_err();
    fs::remove_dir(&path).unwrap();

    fs::hard_link(&victim, &path).unwrap();
    assert_corrupt(&store, "a", "hard link").await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

#[tokio::test]
async fn a_store_without_its_identity_tells_no_token_until_it_is_mended() {
    for damage in ["deleted", "emptied", "overwritten", "symlink"] {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let last = cycle(&store, "a").await;
        let path = dir.path().join("store");
        match damage {
            "deleted" => fs::remove_file(&path).unwrap(),
            "emptied" => fs::write(&path, "").unwrap(),
            "overwritten" => fs::write(&path, vec![b'x'; 8_192]).unwrap(),
            _ => {
                fs::rename(&path, dir.path().join("elsewhere")).unwrap();
                std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
            }
        }
        let error = FileStore::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{damage}: {error}");
        // The message holds the whole remedy, ready to be run.
        let told = error.to_string();
        let remedy = format!("--store 'file://{}?mend=N'", dir.path().display());
        assert!(told.contains(&remedy), "{damage}: {told}");
        let new_name = store.acquire(&request("new", LONG)).await.unwrap_err();
        assert!(
            matches!(new_name.kind(), ErrorKind::Corrupt | ErrorKind::Unavailable),
            "{damage}: {new_name}"
        );

        let mended = FileStore::options()
            .mend(token(300))
            .open(dir.path())
            .unwrap();
        assert_ne!(mended.profile().realm, store.profile().realm, "{damage}");
        assert!(cycle(&mended, "a").await > last);
        assert!(cycle(&mended, "new").await > 300);
        // The tokens of the new store must not be told under the old realm.
        let error = store.acquire(&request("a", LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{damage}: {error}");
    }
}

#[tokio::test]
async fn the_remedy_of_a_damaged_store_can_be_run_as_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("it's 100% a?b#c");
    drop(FileStore::open(&odd).unwrap());
    fs::write(odd.join("store"), "damaged").unwrap();
    let told = FileStore::open(&odd).unwrap_err().to_string();
    let (_, rest) = told.split_once("--store '").unwrap();
    let (url, _) = rest.split_once('\'').unwrap();
    Locks::open(&url.replace("mend=N", "mend=300"))
        .await
        .unwrap();
    let mended = FileStore::open(&odd).unwrap();
    assert!(cycle(&mended, "a").await > 300);
}

#[tokio::test]
async fn a_damaged_record_of_a_long_name_is_known_by_what_is_left_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let long = "a/".repeat(200);
    for (from, known) in [(0, true), (8_192, true), (0, false)] {
        let (_, counts_as) = (
            granted(&store, &request(&long, LONG)).await,
            store.break_lock(&name(&long)).await.unwrap(),
        );
        assert!(counts_as.is_some());
        let path = record_path(dir.path(), &long);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xff; 8_192], from).unwrap();
        if !known {
            file.write_all_at(&[0xff; 8_192], 8_192).unwrap();
        }
        let listed = store.list("a/", None, 9).await.unwrap();
        assert_eq!(listed[0].name == name(&long), known, "{listed:?}");
        let told = listed[0].damage.as_deref().unwrap();
        let whole = format!("`fencelock repair '{long}' --min-token N`");
        let part = "`fencelock repair NAME --min-token N`";
        assert!(told.contains(if known { &whole } else { part }), "{told}");
        store
            .raise_floor(&name(&long), token(1), true)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn mending_leaves_a_sound_store_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let grant = granted(&store, &request("a", LONG)).await;
    let again = FileStore::options()
        .mend(token(300))
        .open(dir.path())
        .unwrap();
    assert_eq!(again.profile().realm, store.profile().realm);
    assert_eq!(
        again.raise_floor(&name("a"), token(1), true).await.unwrap(),
        grant.token
    );
    held(&again, &request("a", LONG)).await;
}

#[tokio::test]
async fn a_store_that_was_replaced_has_to_be_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let store = FileStore::open(&path).unwrap();
    cycle(&store, "a").await;
    fs::remove_dir_all(&path).unwrap();
    let other = FileStore::open(&path).unwrap();
    cycle(&other, "a").await;
    let error = store.acquire(&request("a", LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn one_damaged_or_stuck_record_does_not_hide_the_others_from_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let (long, longer) = ("l".repeat(300), "l".repeat(301));
    for text in ["a", "a/b", "b", "c", &long, &longer] {
        granted(&store, &request(text, LONG)).await;
    }
    fs::write(record_path(dir.path(), "a/b"), "").unwrap();
    fs::write(record_path(dir.path(), &long), "").unwrap();
    let stuck = fs::File::open(record_path(dir.path(), "c")).unwrap();
    stuck.lock().unwrap();
    let summary = |states: &[LockState]| -> Vec<(String, bool)> {
        states
            .iter()
            .map(|s| (s.name.as_str().to_owned(), s.damage.is_none()))
            .collect()
    };
    let all = soon(store.list("", None, 100)).await.unwrap();
    let expected = [
        ("a", true),
        ("a/b", false),
        ("b", true),
        ("c", false),
        // Nothing tells this one's name any more.
        (&*name(&long).encoded(), false),
        (&*longer, true),
    ];
    assert_eq!(
        summary(&all),
        expected.map(|(text, sound)| (text.to_owned(), sound))
    );
    assert_eq!(all[0].holders.len(), 1);
    assert_eq!((all[1].last_token, all[1].holders.len()), (None, 0));
    let damage = |n: usize| all[n].damage.as_deref().unwrap();
    assert!(damage(1).contains("locks/a=2fb"), "{}", damage(1));
    assert!(damage(3).contains("lslocks"), "{}", damage(3));

    // A prefix and a limit count it as they count the others.
    let some = store.list("a", Some(&name("a")), 1).await.unwrap();
    assert_eq!(summary(&some), [("a/b".to_owned(), false)]);
    assert_eq!(store.list("ll", None, 9).await.unwrap().len(), 2);
    assert_eq!(store.list(&longer, None, 9).await.unwrap().len(), 2);
    assert!(store.list("lx", None, 9).await.unwrap().is_empty());
    let error = store.inspect(&name("a/b")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");

    // What ails the whole store is an error still.
    fs::remove_file(dir.path().join("store")).unwrap();
    let error = store.list("b", None, 9).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}
