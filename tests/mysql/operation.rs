//! Opening, connections, messages, and what the settings of a server change.

use std::collections::HashSet;
use std::time::Duration;

use fencelock::lease::{Attempt, Durability, LeaseStore, Severity};
use fencelock::mysql::mysql_async::prelude::Queryable as _;
use fencelock::mysql::mysql_async::{Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use fencelock::mysql::{FencedMysql, MysqlOptions, MysqlStore, schema_sql};
use fencelock::{ErrorKind, Fenced, FencingToken, Locks};
use fencelock_testbed::mysql::{DURABLE, Mysql};
use fencelock_testbed::port::Port;
use fencelock_testbed::proxy::Proxy;

use crate::lab::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_failure_to_open_has_its_own_message_and_shows_no_password() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let at = server.address();
    for user in ["alice", "bob", "carol", "dave"] {
        server.add_user(user, CANARY);
    }
    let _ = server.sql(
        "CREATE DATABASE other; GRANT SELECT ON test.* TO alice; GRANT ALL ON test.* TO bob;
         GRANT ALL ON test.* TO carol; ALTER USER carol WITH MAX_USER_CONNECTIONS 1",
    );
    let _busy = client(&format!("mysql://carol:{CANARY}@{at}/test")).await;
    let closed = Port::free();
    let silent = Proxy::start(at);
    silent.black_hole();
    let cases = [
        (
            format!("mysql://alice:wrong{CANARY}@{at}/test"),
            ErrorKind::Invalid,
            "refused the user or the password",
        ),
        (
            format!("mysql://dave:{CANARY}@{at}/other"),
            ErrorKind::Invalid,
            "may not use the database",
        ),
        (
            format!("mysql://root@{at}/nowhere{CANARY}").replace(CANARY, ""),
            ErrorKind::Invalid,
            "no such database",
        ),
        (
            format!("mysql://alice:{CANARY}@{at}/test"),
            ErrorKind::Invalid,
            "GRANT CREATE, CREATE ROUTINE",
        ),
        (
            format!("mysql://bob:{CANARY}@{at}/test?create=false"),
            ErrorKind::Invalid,
            "create=false",
        ),
        (
            format!("mysql://carol:{CANARY}@{at}/test"),
            ErrorKind::Unavailable,
            "no connection free",
        ),
        (
            format!("mysql://alice:{CANARY}@127.0.0.1:{}/test", closed.number()),
            ErrorKind::Unavailable,
            "cannot be reached",
        ),
        (
            format!("mysql://alice:{CANARY}@{}/test", silent.address()),
            ErrorKind::Unavailable,
            "in time",
        ),
        (
            format!("mysql://alice:{CANARY}@no-such-host.invalid/test?insecure=true"),
            ErrorKind::Unavailable,
            "cannot be reached",
        ),
        (
            "mysql://alice@localhost/test?socket=/nowhere/socket".to_owned(),
            ErrorKind::Unavailable,
            "server=/nowhere/socket",
        ),
    ];
    let mut messages = HashSet::new();
    for (url, kind, said) in cases {
        messages.insert(refused(&url, kind, said).await);
    }
    assert_eq!(messages.len(), 10);
    let by_socket = format!(
        "mysql://root@localhost/test?socket={}",
        server.socket().display()
    );
    granted(&store(&by_socket).await, &long("socket")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lacks_a_privilege_is_told_the_grant() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    store(&server.url()).await;
    server.add_user("alice", CANARY);
    let _ = server.sql("GRANT SELECT ON test.* TO alice");
    let url = format!("mysql://alice:{CANARY}@{}/test", server.address());
    let poor = store(&url).await;
    let refused = poor.acquire(&long("a")).await.unwrap_err();
    assert_eq!(
        refused.kind(),
        ErrorKind::Unsupported,
        "{}",
        whole(&refused)
    );
    let grant = "GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE";
    assert!(refused.to_string().contains(grant), "{refused}");
    assert!(!whole(&refused).contains(CANARY));
    for may in ["SELECT", "INSERT, UPDATE, DELETE"] {
        let _ = server.sql(&format!("GRANT {may} ON test.* TO alice"));
        let findings = poor.probe().await.unwrap();
        let told = findings.iter().find(|f| f.subject == "privileges");
        assert!(told.is_some_and(|f| f.detail.contains(grant)), "{may}");
    }
    let _ = server.sql(&format!("{grant} ON test.* TO alice"));
    let store = store(&format!("{url}?create=false")).await;
    granted(&store, &long("allowed")).await;
    assert!(!format!("{store:?}").contains(CANARY));
    let findings = store.probe().await.unwrap();
    assert!(
        findings.iter().all(|f| f.severity != Severity::Bad),
        "{findings:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_says_so_and_is_used_once_it_does() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let before = granted(&store(&server.url()).await, &long("a")).await;
    server.add_user("alice", CANARY);
    let _ = server.sql("GRANT ALL ON test.* TO alice; SET GLOBAL read_only = 1");
    let url = format!("mysql://alice:{CANARY}@{}/test", server.address());
    // An operator can look.
    let store = store(&url).await;
    assert_eq!(holders(&store, "a").await, 1);
    let findings = store.probe().await.unwrap();
    assert!(
        findings
            .iter()
            .any(|f| f.severity == Severity::Bad && f.subject == "writes"),
        "{findings:?}"
    );
    let error = store.acquire(&long("b")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", whole(&error));
    assert!(error.to_string().contains("takes no writes"), "{error}");
    let other = try_store(&format!("{url}?prefix=other")).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Unavailable, "{}", whole(&other));
    let _ = server.sql("SET GLOBAL read_only = 0");
    store.break_lock(&"a".parse().unwrap()).await.unwrap();
    assert!(granted(&store, &long("a")).await.token > before.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_polls_and_is_granted_after_the_release() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let (ours, theirs) = (locks(&server.url()).await, locks(&server.url()).await);
    assert!(!ours.profile().wakes_waiters);
    let held = theirs.acquire("polled").await.unwrap();
    let waiting = tokio::spawn({
        let ours = ours.clone();
        async move { ours.acquire("polled").await }
    });
    held.release().await.unwrap();
    let (guard, _) = in_time(waiting).await;
    guard.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_printed_schema_leaves_tables_of_another_version_alone() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let sql = schema_sql("by_hand").unwrap();
    let _ = server.sql(&sql);
    let _ = server.sql("UPDATE by_hand_meta SET version = 99");
    let newer = server.try_sql(&sql, &[]).unwrap_err();
    assert!(newer.contains("found=99 expected=1"), "{newer}");
}

/// Running the schema again while locks are in use: MariaDB replaces each procedure in one step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_schema_is_replaced_under_load_without_a_failure() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let store = store(&server.url()).await;
    let sql = schema_sql("fencelock").unwrap();
    let using = tokio::spawn(async move {
        for _ in 0..200 {
            let request = long("used");
            let held = lease(&request, &granted(&store, &request).await);
            store.release(&held, Duration::ZERO).await.unwrap();
        }
    });
    let mut replaced = 0;
    while !using.is_finished() {
        let _ = tokio::task::block_in_place(|| server.sql(&sql));
        replaced += 1;
    }
    using.await.unwrap();
    assert!(replaced > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_of_another_character_set_keeps_names_and_labels_exactly() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::with(&["character-set-server=latin1", "lower-case-table-names=1"]);
    let _ = server.sql("CREATE DATABASE latin CHARACTER SET latin1");
    let url = server.url().trim_end_matches("/test").to_owned() + "/latin";
    let store = store(&url).await;
    let mut request = long("🔒 é\0'\\");
    request.info.label = Some("🔒 \0 \u{202e}".to_owned());
    granted(&store, &request).await;
    let state = store.inspect(&request.name).await.unwrap().unwrap();
    assert_eq!(state.name, request.name);
    assert_eq!(state.holders[0].info, request.info);
    // All of them are equal in the default collation.
    for name in ["r", "R", "r ", "é", "e\u{301}", "É", "e"] {
        assert_eq!(
            granted(&store, &long(name)).await.token.get(),
            1,
            "{name:?}"
        );
    }
    // A resource is the same whatever the character set of the connection that names it.
    let values = Fenced::new(FencedMysql::open(&url).await.unwrap());
    values
        .raise("é", FencingToken::new(34).unwrap())
        .await
        .unwrap();
    for (charset, literal) in [("latin1", "X'E9'"), ("utf8mb4", "X'C3A9'")] {
        let call = format!(
            "START TRANSACTION; CALL fencelock_admit(CONVERT({literal} USING {charset}), 33)"
        );
        let refused = server.try_sql(&call, &["--database=latin"]).unwrap_err();
        assert!(refused.contains("token=33 watermark=34"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_users_own_pool_is_enough() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let pool = pool_of(&server, 2, &[]);
    let store = MysqlStore::from_pool(pool.clone(), MysqlOptions::for_pool())
        .await
        .unwrap();
    let locks = Locks::new(store);
    let mut guards = Vec::new();
    for i in 0..10 {
        let name = format!("pooled-{i}");
        let ttl = Duration::from_millis(600);
        guards.push(locks.acquire(name).ttl(ttl).await.unwrap());
    }
    // The holders use the same pool meanwhile, all of it.
    for _ in 0..20 {
        let mut conn = pool.get_conn().await.unwrap();
        conn.query_drop("DO SLEEP(0.05)").await.unwrap();
    }
    for guard in guards {
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
    let zone: Option<String> = pool
        .get_conn()
        .await
        .unwrap()
        .query_first("SELECT @@SESSION.time_zone")
        .await
        .unwrap();
    assert_eq!(zone.as_deref(), Some("SYSTEM"), "it is as the user left it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_without_autocommit_is_enough_too() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let pool = pool_of(&server, 1, &["SET SESSION autocommit = 0"]);
    let store = MysqlStore::from_pool(pool, MysqlOptions::for_pool())
        .await
        .unwrap();
    let request = long("a");
    let held = lease(&request, &granted(&store, &request).await);
    assert_eq!(holders(&store, "a").await, 1);
    assert_eq!(server.sql("SELECT COUNT(*) FROM fencelock_holders"), "1");
    store.release(&held, Duration::ZERO).await.unwrap();
    assert_eq!(server.sql("SELECT COUNT(*) FROM fencelock_holders"), "0");
}

fn pool_of(server: &Mysql, connections: usize, setup: &[&str]) -> Pool {
    let constraints = PoolConstraints::new(0, connections).unwrap();
    let opts = OptsBuilder::from_opts(Opts::from_url(&server.url()).unwrap())
        .pool_opts(PoolOpts::default().with_constraints(constraints))
        .setup(setup.to_vec());
    Pool::new(opts)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_promises_is_what_the_profile_says() {
    fencelock_testbed::skip!("mysql");
    let cases = [
        (&DURABLE[..], Durability::D2PowerLoss, None),
        (
            &["log-bin=log", "sync-binlog=1"],
            Durability::D2PowerLoss,
            None,
        ),
        (
            &["log-bin=log", "sync-binlog=0"],
            Durability::D1ProcessCrash,
            Some(Severity::Warning),
        ),
        (
            &["innodb-flush-log-at-trx-commit=2"],
            Durability::D1ProcessCrash,
            Some(Severity::Warning),
        ),
        (
            &["innodb-flush-log-at-trx-commit=0"],
            Durability::D0Memory,
            Some(Severity::Bad),
        ),
    ];
    for (settings, expected, worst) in cases {
        let server = Mysql::with(settings);
        let store = store(&server.url()).await;
        assert_eq!(store.profile().durability, expected, "{settings:?}");
        let findings = store.probe().await.unwrap();
        let found = findings.iter().map(|f| f.severity).max().unwrap();
        assert_eq!(
            found,
            worst.unwrap_or(Severity::Good),
            "{settings:?} {findings:?}"
        );
        let answer = store.acquire(&long("a")).await.unwrap();
        assert!(matches!(answer, Attempt::Granted(_)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_breaks_locks_is_a_bad_finding() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::with(&["log-bin=log", "sync-binlog=1"]);
    let store = store(&server.url()).await;
    let bad = async || -> Vec<&'static str> {
        let findings = store.probe().await.unwrap();
        let bad = findings.iter().filter(|f| f.severity == Severity::Bad);
        bad.map(|f| f.subject).collect()
    };
    assert_eq!(bad().await, Vec::<&str>::new());
    let _ = server.sql("ALTER TABLE fencelock_locks ENGINE = Aria");
    assert_eq!(bad().await, ["tables"]);
    let _ = server.sql("ALTER TABLE fencelock_locks ENGINE = InnoDB");
    let _ = server.sql("SET GLOBAL binlog_format = 'STATEMENT'");
    assert_eq!(bad().await, ["binlog_format"]);
    // A connection takes the setting when it begins.
    let error = try_store(&server.url())
        .await
        .unwrap()
        .acquire(&long("a"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", whole(&error));
    assert!(error.to_string().contains("binlog_format"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_shares_its_writes_with_others_is_refused_unless_that_is_accepted() {
    fencelock_testbed::skip!("mysql");
    // A node of Galera as far as its settings say; alone, it needs no provider.
    let server = Mysql::with(&["wsrep-on=ON", "binlog-format=ROW"]);
    if server.sql("SELECT @@GLOBAL.wsrep_on") != "1" {
        panic!("the server does not say that it is in a cluster");
    }
    let refused = try_store(&server.url()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert!(refused.to_string().contains("Galera"), "{refused}");
    let accepted = format!("{}?allow_galera=true", server.url());
    let store = store(&accepted).await;
    let findings = store.probe().await.unwrap();
    assert!(
        findings
            .iter()
            .any(|f| f.severity == Severity::Bad && f.subject == "several primaries")
    );
}

#[cfg(feature = "mysql-tls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_verifies_the_authority_and_the_name() {
    fencelock_testbed::skip!("mysql");
    let (server, tls) = Mysql::with_tls(&["bind-address=127.0.0.1,127.0.0.2"]);
    let url = |host: &str, roots: &std::path::Path| {
        let (port, roots) = (server.port(), roots.display());
        format!("mysql://root@{host}:{port}/test?ssl-mode=verify_identity&ssl-ca={roots}")
    };
    let by_tls = store(&url("127.0.0.1", &tls.authority())).await;
    granted(&by_tls, &long("tls")).await;
    server.add_user("alice", CANARY);
    let _ = server.sql("GRANT ALL ON test.* TO alice; ALTER USER alice REQUIRE SSL");
    let as_alice = |url: String| url.replace("root@", &format!("alice:{CANARY}@"));
    store(&as_alice(url("localhost", &tls.authority()))).await;

    let stranger = fencelock_testbed::redis::Certificates::make();
    let plain = Mysql::with(&["innodb-flush-log-at-trx-commit=2", "skip-ssl"]);
    let to_plain = url("127.0.0.1", &tls.authority())
        .replace(&server.port().to_string(), &plain.port().to_string());
    for (url, said) in [
        (url("127.0.0.1", &stranger.authority()), "not trusted"),
        // Another name of the same host.
        (url("127.0.0.2", &tls.authority()), "not for this name"),
        (to_plain, "has no TLS"),
        (as_alice(server.url()), "refused the user or the password"),
    ] {
        refused(&url, ErrorKind::Invalid, said).await;
    }
    let missing = try_store(&url("localhost", std::path::Path::new("/nowhere"))).await;
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::Invalid);
}

/// Two processes with one name: the other one is the command line client, which holds the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_sees_the_grant_and_not_the_holders_secret() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let store = store(&server.url()).await;
    let request = long("seen");
    let grant = granted(&store, &request).await;
    let seen = server.sql("CALL fencelock_inspect('seen')");
    assert!(
        seen.starts_with(&format!("seen\t1\t{}\t", grant.token)),
        "{seen}"
    );
    let secret = request.holder.reveal();
    let shown = server.sql("SELECT HEX(id) FROM fencelock_holders");
    assert_eq!(shown.to_lowercase(), secret, "it is in the table");
    assert!(!seen.contains(&secret));
    let bytes = format!("{:?}", request.holder.as_bytes());
    assert!(!seen.contains(&bytes));
}
