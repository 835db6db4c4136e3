//! What may stand at the path of a database, and what becomes of one whose file is meddled with.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use fencelock::lease::{LeaseStore, Renewal, Severity};
use fencelock::sqlite::{FencedSqlite, SqliteStore};
use fencelock::{ErrorKind, Fence, FencedStore, Locks};

use crate::lab::*;
use crate::processes::Process;

async fn refused(path: impl AsRef<Path>, kind: ErrorKind, said: &str) {
    let error = SqliteStore::open(path.as_ref()).await.unwrap_err();
    assert_eq!(error.kind(), kind, "{}", whole(&error));
    let text = error.to_string();
    assert!(text.contains(said), "{text}");
    assert!(text.contains("path="), "{text}");
}

#[tokio::test]
async fn a_new_database_is_for_its_owner_only_and_its_log_too() {
    let data = Data::new();
    let store = data.store().await;
    cycle(&store, "a").await;
    for ending in ["", "-wal", "-shm"] {
        let path = data.dir().join(format!("app.db{ending}"));
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{ending}");
    }
    // Nothing half made is left beside it.
    assert_eq!(fs::read_dir(data.dir()).unwrap().count(), 3);
}

#[tokio::test]
async fn the_wrong_thing_at_the_path_is_refused_with_what_was_expected() {
    let data = Data::new();
    let dir = data.dir();
    fs::create_dir(dir.join("dir")).unwrap();
    refused(dir.join("dir"), ErrorKind::Invalid, "found a directory").await;
    symlink(dir.join("elsewhere.db"), dir.join("link")).unwrap();
    refused(dir.join("link"), ErrorKind::Invalid, "symbolic link").await;
    assert!(!dir.join("elsewhere.db").exists());
    Command::new("mkfifo")
        .arg(dir.join("fifo"))
        .status()
        .unwrap();
    refused(dir.join("fifo"), ErrorKind::Invalid, "a pipe").await;
    fs::write(dir.join("text"), "x".repeat(5000)).unwrap();
    refused(
        dir.join("text"),
        ErrorKind::Corrupt,
        "not a SQLite database",
    )
    .await;
    fs::write(dir.join("two"), "").unwrap();
    fs::hard_link(dir.join("two"), dir.join("names")).unwrap();
    refused(dir.join("two"), ErrorKind::Invalid, "hard links").await;
    fs::write(dir.join("open"), "").unwrap();
    fs::set_permissions(dir.join("open"), fs::Permissions::from_mode(0o666)).unwrap();
    refused(dir.join("open"), ErrorKind::Invalid, "chmod o-w").await;
    refused(
        dir.join("no/such.db"),
        ErrorKind::Invalid,
        "no such file or directory",
    )
    .await;
    refused(dir.join("text/x.db"), ErrorKind::Invalid, "not a directory").await;
    refused("/", ErrorKind::Invalid, "no file name").await;
}

#[tokio::test]
async fn a_database_that_must_not_be_made_is_not_made() {
    let data = Data::new();
    let sparing = || SqliteStore::options().create(false);
    let error = sparing().open(data.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(!data.path().exists());
    // Nor are its tables.
    data.connect()
        .execute_batch("CREATE TABLE mine (x)")
        .unwrap();
    let error = sparing().open(data.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(
        error.to_string().contains("fencelock schema sqlite"),
        "{error}"
    );
    data.connect()
        .execute_batch(&fencelock::sqlite::schema_sql())
        .unwrap();
    cycle(&sparing().open(data.path()).await.unwrap(), "a").await;
}

#[tokio::test]
async fn twenty_that_open_at_once_make_one_database() {
    let data = Data::new();
    let opening: Vec<_> = (0..20)
        .map(|_| tokio::spawn(SqliteStore::open(data.path())))
        .collect();
    let mut realms = std::collections::HashSet::new();
    for opening in opening {
        realms.insert(opening.await.unwrap().unwrap().profile().realm.clone());
    }
    assert_eq!(realms.len(), 1);
}

#[tokio::test]
async fn a_database_of_ones_own_is_put_in_wal_mode_and_keeps_its_tables() {
    let data = Data::new();
    let own = data.connect();
    own.execute_batch("CREATE TABLE mine (x); INSERT INTO mine VALUES (7)")
        .unwrap();
    cycle(&data.store().await, "a").await;
    let kept: i64 = own
        .query_row("SELECT x FROM mine", [], |r| r.get(0))
        .unwrap();
    assert_eq!(kept, 7);
    let mode: String = own
        .query_row("PRAGMA journal_mode", [], |r| r.get(0))
        .unwrap();
    assert_eq!(mode, "wal");
}

#[tokio::test]
async fn what_cannot_be_kept_to_is_unsupported() {
    let data = Data::new();
    data.connect()
        .execute_batch("PRAGMA encoding = 'UTF-16'; CREATE TABLE mine (x)")
        .unwrap();
    refused(data.path(), ErrorKind::Unsupported, "UTF-8").await;
    let data = Data::new();
    data.store().await;
    data.connect()
        .execute_batch("UPDATE fencelock_meta SET version = 2")
        .unwrap();
    refused(data.path(), ErrorKind::Unsupported, "another version").await;
}

#[tokio::test]
async fn a_removed_database_is_noticed_and_never_begun_anew_in_silence() {
    let data = Data::new();
    let store = data.store().await;
    let request = long("a");
    let grant = granted(&store, &request).await;
    fs::remove_file(data.path()).unwrap();
    for _ in 0..2 {
        let error = store.acquire(&long("b")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("removed"), "{error}");
        let error = store.inspect(&name("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    assert!(matches!(
        renewal(&store, &lease(&request, &grant)).await,
        Renewal::Unknown(_)
    ));
    assert!(!data.path().exists());
}

#[tokio::test]
async fn a_replaced_database_is_noticed_and_the_new_one_keeps_its_data() {
    let data = Data::new();
    let (store, values) = (data.store().await, data.values().await);
    cycle(&store, "a").await;
    let other = Data::new();
    let elsewhere = SqliteStore::open(other.path()).await.unwrap();
    cycle(&elsewhere, "a").await;
    cycle(&elsewhere, "a").await;
    other
        .connect()
        .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
        .unwrap();
    fs::rename(other.path(), data.path()).unwrap();
    for _ in 0..2 {
        let error = store.acquire(&long("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("taken the place"), "{error}");
    }
    let (resource, fence) = ("v".parse().unwrap(), Fence::from(token(1)));
    let put = values.put(&resource, vec![1].into(), &fence).await;
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Corrupt);
    // The manual: end all who have the old one open, and remove its log, which SQLite would take
    // for the new one's.
    drop((store, values, elsewhere));
    for ending in ["-wal", "-shm"] {
        fs::remove_file(data.dir().join(format!("app.db{ending}"))).unwrap();
    }
    assert_eq!(cycle(&data.store().await, "a").await, 3);
}

/// Into the same file, which no look at the file can tell.
#[tokio::test]
async fn a_backup_that_is_copied_back_is_noticed_by_whoever_has_it_open() {
    fencelock_testbed::skip!("sqlite3");
    let data = Data::new();
    let store = data.store().await;
    cycle(&store, "a").await;
    let backup = data.dir().join("backup");
    let own = data.connect();
    own.execute("VACUUM INTO ?1", [backup.to_str().unwrap()])
        .unwrap();
    let told = cycle(&store, "a").await;
    shell(&data.path(), &format!(".restore '{}'", backup.display()));
    for _ in 0..2 {
        let error = store.acquire(&long("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("older state"), "{error}");
    }
    drop(store);
    // Nobody can know it who was not there: the token is told again, as the manual says.
    let opened = data.store().await;
    assert_eq!(cycle(&opened, "a").await, told);
    // What the manual says to do about it: another realm, whose tokens storage refuses until it is
    // bound to it, or floors above all tokens that were used.
    let former = opened.profile().realm.clone();
    own.execute_batch("UPDATE fencelock_meta SET realm = lower(hex(randomblob(16)))")
        .unwrap();
    let error = opened.acquire(&long("a")).await.unwrap_err();
    assert!(error.to_string().contains("was replaced"), "{error}");
    let opened = data.store().await;
    assert_ne!(opened.profile().realm, former);
    opened
        .raise_floor(&name("a"), token(1_000), false)
        .await
        .unwrap();
    assert_eq!(cycle(&opened, "a").await, 1_001);
}

#[tokio::test]
async fn a_damaged_database_is_corrupt_and_no_token_begins_again() {
    let data = Data::new();
    let store = data.store().await;
    for n in 0..300 {
        cycle(&store, &format!("name-{n}")).await;
    }
    drop(store);
    let pages = fs::metadata(data.path()).unwrap().len() / 4096;
    assert!(pages > 8, "{pages}");
    let file = fs::OpenOptions::new()
        .write(true)
        .open(data.path())
        .unwrap();
    for page in 1..pages {
        file.write_all_at(&[0xa5; 4096], page * 4096).unwrap();
    }
    drop(file);
    let error = match SqliteStore::open(data.path()).await {
        Ok(store) => store.acquire(&long("name-7")).await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", whole(&error));
    // Cut short.
    let file = fs::OpenOptions::new()
        .write(true)
        .open(data.path())
        .unwrap();
    file.set_len(1_000).unwrap();
    let error = SqliteStore::open(data.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", whole(&error));
}

#[tokio::test]
async fn missing_tables_are_corrupt_to_whoever_has_the_database_open() {
    let data = Data::new();
    let store = data.store().await;
    cycle(&store, "a").await;
    data.connect()
        .execute_batch("DROP TABLE fencelock_holders")
        .unwrap();
    let error = store.acquire(&long("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", whole(&error));
    assert!(
        error
            .to_string()
            .contains("tables of fencelock are missing"),
        "{error}"
    );
}

#[tokio::test]
async fn a_record_with_a_damaged_row_is_shown_hides_no_other_and_can_be_mended() {
    let data = Data::new();
    let store = data.store().await;
    granted(&store, &long("a")).await;
    granted(&store, &long("b")).await;
    data.connect()
        .execute_batch(
            "PRAGMA ignore_check_constraints = 1;
             UPDATE fencelock_holders SET ttl_ns = -1 WHERE name = CAST('a' AS BLOB)",
        )
        .unwrap();
    let error = store.acquire(&long("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    let states = store.list("", None, 10).await.unwrap();
    assert!(
        states[0].damage.as_ref().unwrap().contains("TTL"),
        "{states:?}"
    );
    assert_eq!(states[1].holders.len(), 1);
    let error = store
        .raise_floor(&name("a"), token(9), false)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    store.raise_floor(&name("a"), token(9), true).await.unwrap();
    assert_eq!(granted(&store, &long("a")).await.token.get(), 10);
}

#[tokio::test]
async fn nothing_lowers_a_token_or_forgets_it_by_oversight() {
    let data = Data::new();
    let store = data.store().await;
    cycle(&store, "a").await;
    cycle(&store, "a").await;
    let own = data.connect();
    own.execute(
        "INSERT INTO fencelock_admit (resource, token) VALUES ('r', 5)",
        [],
    )
    .unwrap();
    for sql in [
        "UPDATE fencelock_locks SET last_token = 1",
        "UPDATE fencelock_locks SET last_token = NULL",
        "DELETE FROM fencelock_locks",
        "UPDATE fencelock_meta SET floor = -1",
        "UPDATE fencelock_fences SET token = 4",
        "DELETE FROM fencelock_fences",
        "DELETE FROM fencelock_meta",
        "REPLACE INTO fencelock_locks SELECT name, 1, capacity, used_unix_us FROM fencelock_locks",
        "REPLACE INTO fencelock_locks SELECT name, NULL, capacity, used_unix_us FROM fencelock_locks",
        "REPLACE INTO fencelock_fences SELECT resource, 4, holder, seq, domain FROM fencelock_fences",
        "REPLACE INTO fencelock_meta SELECT one, version, realm, 0, grants FROM fencelock_meta",
    ] {
        let refused = own.execute(sql, []).unwrap_err().to_string();
        assert!(
            refused.contains("fencelock") || refused.contains("CHECK"),
            "{sql}: {refused}"
        );
    }
    assert_eq!(cycle(&store, "a").await, 3);
}

#[tokio::test]
async fn a_database_that_may_only_be_read_is_unavailable_or_invalid() {
    // Root may write to everything, so this needs a file system that is read-only.
    if rustix::process::geteuid().is_root() {
        return;
    }
    let data = Data::new();
    drop(data.store().await);
    fs::set_permissions(data.path(), fs::Permissions::from_mode(0o400)).unwrap();
    refused(data.path(), ErrorKind::Unavailable, "cannot be").await;
}

/// Needs a disk of its own: a mount namespace, made by whoever may.
#[test]
fn on_a_full_and_on_a_read_only_disk_everything_says_so_and_goes_on_after() {
    fencelock_testbed::skip!("full-disk");
    let can = |flags: &str| {
        let script = "mount -t tmpfs tmpfs /tmp";
        let done = Command::new("unshare")
            .args([flags, "sh", "-c", script])
            .output();
        done.is_ok_and(|done| done.status.success())
    };
    let flags = ["-m", "-rm"].into_iter().find(|flags| can(flags)).expect(
        "a file system for the full-disk test cannot be mounted: run it where unshare -m or unshare -rm may mount, or set FENCELOCK_TEST_SKIP=full-disk",
    );
    let data = Data::new();
    fs::create_dir(data.dir().join("disk")).unwrap();
    let mount = "mount -t tmpfs -o size=4m,mode=0700 tmpfs \"$FENCELOCK_TEST_DIR/disk\" && exec \"$0\" \"$@\"";
    let mut child = Process::start_under(
        &["unshare", flags, "sh", "-c", mount],
        data.dir(),
        "full disk",
    );
    assert_eq!(child.hear(), "done");
    // It lay on a file system of its own.
    assert_eq!(fs::read_dir(data.dir().join("disk")).unwrap().count(), 0);
}

pub(crate) async fn on_a_full_disk(dir: &Path) {
    let path = dir.join("app.db");
    let store = SqliteStore::open(&path).await.unwrap();
    let values = FencedSqlite::open(&path).await.unwrap();
    let resource = "v".parse().unwrap();
    let (old, new) = (vec![1; 100_000], vec![2; 100_000]);
    let last = cycle(&store, "a").await;
    values
        .put(&resource, old.clone().into(), &Fence::from(token(1)))
        .await
        .unwrap();

    let filler = fs::File::create(dir.join("filler")).unwrap();
    let mut at = 0;
    while filler.write_all_at(&[1; 4_096], at).is_ok() {
        at += 4_096;
    }
    let mut unavailable = 0;
    for round in 0..2_000 {
        // The log has some room of its own at first.
        match store.acquire(&long(&format!("n{round}"))).await {
            Ok(_) => continue,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", whole(&error));
                assert!(error.to_string().contains("disk"), "{error}");
                unavailable += 1;
            }
        }
        if unavailable == 3 {
            break;
        }
    }
    assert_eq!(unavailable, 3, "the disk was never full");
    let put = values
        .put(&resource, new.clone().into(), &Fence::from(token(2)))
        .await;
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Unavailable);
    let seen = values.get(&resource).await.unwrap();
    assert_eq!(seen.watermark.unwrap().token.get(), 1);
    assert_eq!(seen.value.unwrap().into_bytes(u64::MAX).unwrap(), old);

    drop(filler);
    fs::remove_file(dir.join("filler")).unwrap();
    assert_eq!(cycle(&store, "a").await, last + 1);
    values
        .put(&resource, new.into(), &Fence::from(token(2)))
        .await
        .unwrap();

    let remount = |how: &str| {
        let done = Command::new("mount").args(["-o", how]).arg(dir).status();
        assert!(done.unwrap().success(), "{how}");
    };
    // New ones cannot open it, and say why.
    drop((store, values));
    remount("remount,ro");
    let error = SqliteStore::open(&path).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", whole(&error));
    assert!(error.to_string().contains("cannot be"), "{error}");
    let error = SqliteStore::open(dir.join("new.db")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{}", whole(&error));
    assert!(error.to_string().contains("read-only"), "{error}");
    remount("remount,rw");
    assert_eq!(
        cycle(&SqliteStore::open(&path).await.unwrap(), "a").await,
        last + 2
    );
}

#[tokio::test]
async fn a_doctor_sees_what_endangers_the_promises() {
    let data = Data::new();
    let store = data.store().await;
    let worst = |findings: &[fencelock::lease::Finding], subject: &str| {
        findings
            .iter()
            .find(|f| f.subject == subject)
            .unwrap()
            .clone()
    };
    let findings = store.probe().await.unwrap();
    assert_eq!(worst(&findings, "durability").severity, Severity::Good);
    assert_eq!(worst(&findings, "permissions").severity, Severity::Good);
    assert_eq!(worst(&findings, "integrity").severity, Severity::Good);
    assert_eq!(
        worst(&findings, "library").severity,
        Severity::Good,
        "{findings:?}"
    );
    fs::set_permissions(data.path(), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(
        worst(&store.probe().await.unwrap(), "permissions").severity,
        Severity::Warning
    );
    fs::set_permissions(data.dir(), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(
        worst(&store.probe().await.unwrap(), "permissions").severity,
        Severity::Bad
    );
}

#[tokio::test]
async fn a_url_opens_locks_and_a_wrong_one_says_what_is_wrong() {
    let data = Data::new();
    let url = format!("sqlite://{}", data.path().display());
    let locks = Locks::open(&format!("{url}?ttl=1m&busy_timeout=500ms&create=true"))
        .await
        .unwrap();
    let guard = locks.acquire("a").await.unwrap();
    assert_eq!(guard.token().get(), 1);
    guard.release().await.unwrap();
    for (url, said) in [
        (format!("{url}?colour=red"), "sqlite: knows ttl, create"),
        (format!("{url}?busy_timeout=9s"), "at most 8 s"),
        (format!("{url}?busy_timeout=soon"), "busy_timeout=\"soon\""),
        (format!("{url}?create=maybe"), "create=\"maybe\""),
        (format!("{url}2?create=false"), "no such database"),
        (format!("{url}#x"), "sqlite URL has a fragment"),
        ("sqlite://host/x.db".to_owned(), "write sqlite:///host/x.db"),
        ("sqlite:".to_owned(), "sqlite URL has no path"),
        (":memory:".to_owned(), "not a store URL"),
    ] {
        let error = Locks::open(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
        assert!(error.to_string().contains(said), "{url}: {error}");
    }
    let (values, key) = fencelock::open::destination(&format!("{url}?key=today"))
        .await
        .unwrap();
    values.put(key.as_str(), "x", token(1)).await.unwrap();
    let error = fencelock::open::destination(&url).await.unwrap_err();
    assert!(error.to_string().contains("?key=NAME"), "{error}");
}

#[tokio::test]
async fn no_secret_is_in_what_people_see() {
    let data = Data::new();
    let store = data.store().await;
    let request = long("a");
    granted(&store, &request).await;
    let shown = format!("{store:?} {:?}", store.inspect(&name("a")).await);
    assert!(!shown.contains(&request.holder.reveal()), "{shown}");
    let raw = format!("{:?}", request.holder.as_bytes());
    assert!(!shown.contains(&raw), "{shown}");
}
