//! Opening, connections, messages, waiting, and what a pooler changes.

use std::collections::HashSet;
use std::time::Duration;

use fencelock::lease::{Attempt, Durability, LeaseStore, Severity};
use fencelock::postgres::{PostgresOptions, PostgresStore, deadpool_postgres, tokio_postgres};
use fencelock::{ErrorKind, Locks};
use fencelock_testbed::pgbouncer::PgBouncer;
use fencelock_testbed::port::Port;
use fencelock_testbed::postgres::Postgres;
use fencelock_testbed::proxy::Proxy;

use crate::lab::*;
use crate::sql_operation::fifty_tokens_of_ten_clients;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_failure_to_open_has_its_own_message_and_shows_no_password() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let at = server.address();
    server.add_user("alice", CANARY);
    server.add_user("bob", CANARY);
    let _ = server.psql(
        "CREATE ROLE carol LOGIN CONNECTION LIMIT 0;
         ALTER ROLE bob SET default_transaction_read_only = on; GRANT CREATE ON DATABASE postgres TO bob",
    );
    let closed = Port::free();
    let silent = Proxy::start(at);
    silent.black_hole();
    let cases = [
        (
            format!("postgres://alice:wrong{CANARY}@{at}/postgres"),
            ErrorKind::Invalid,
            "refused the user or the password",
        ),
        (
            format!("postgres://alice@{at}/postgres"),
            ErrorKind::Invalid,
            "can be made with these settings",
        ),
        (
            format!("postgres://alice:{CANARY}@{at}/nowhere"),
            ErrorKind::Invalid,
            "no such database",
        ),
        (
            format!("postgres://alice:{CANARY}@{at}/postgres"),
            ErrorKind::Invalid,
            "GRANT CREATE ON DATABASE",
        ),
        (
            format!("postgres://alice:{CANARY}@{at}/postgres?create=false"),
            ErrorKind::Invalid,
            "create=false",
        ),
        (
            format!("postgres://bob:{CANARY}@{at}/postgres"),
            ErrorKind::Unavailable,
            "takes no writes",
        ),
        (
            format!("postgres://carol:{CANARY}@{at}/postgres"),
            ErrorKind::Unavailable,
            "no connection free",
        ),
        (
            format!(
                "postgres://alice:{CANARY}@127.0.0.1:{}/postgres",
                closed.number()
            ),
            ErrorKind::Unavailable,
            "cannot be reached",
        ),
        (
            format!("postgres://alice:{CANARY}@{}/postgres", silent.address()),
            ErrorKind::Unavailable,
            "in time",
        ),
        (
            format!("postgres://alice:{CANARY}@no-such-host.invalid/postgres?insecure=true"),
            ErrorKind::Unavailable,
            "cannot be reached",
        ),
    ];
    let mut messages = HashSet::new();
    for (url, kind, said) in cases {
        messages.insert(refused(&url, kind, said).await);
    }
    assert_eq!(messages.len(), 10);
    let log = server.log();
    assert!(!log.contains("panic"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lacks_a_privilege_is_told_the_grant() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    store(&server.url()).await;
    server.add_user("alice", CANARY);
    let url = format!("postgres://alice:{CANARY}@{}/postgres", server.address());
    let refused = try_store(&url).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{}", whole(&refused));
    assert!(
        refused
            .to_string()
            .contains("GRANT USAGE ON SCHEMA fencelock"),
        "{refused}"
    );
    assert!(!whole(&refused).contains(CANARY));
    // An operator may look, and is told that looking is all.
    let _ = server.psql(
        "GRANT USAGE ON SCHEMA fencelock TO alice;
         GRANT SELECT ON ALL TABLES IN SCHEMA fencelock TO alice",
    );
    let may_not = async || {
        let findings = store(&url).await.probe().await.unwrap();
        findings.into_iter().find(|f| f.subject == "privileges")
    };
    let told = may_not().await.unwrap();
    assert_eq!(told.severity, Severity::Bad);
    assert!(told.detail.contains("GRANT SELECT, INSERT"), "{told:?}");
    let _ = server
        .psql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO alice");
    assert!(may_not().await.is_none());
    let store = store(&url).await;
    granted(&store, &long("allowed")).await;
    assert!(!format!("{store:?}").contains(CANARY));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_refused_until_it_is_promoted() {
    fencelock_testbed::skip!("postgres");
    let mut primary = Postgres::fast();
    let first = store(&primary.url()).await;
    let before = granted(&first, &long("moved")).await;
    let standby = Postgres::standby_of(&primary, &["fsync=off"]);
    let opened = try_store(&standby.url()).await.unwrap_err();
    assert_eq!(opened.kind(), ErrorKind::Unavailable);
    assert!(opened.to_string().contains("takes no writes"), "{opened}");
    // Without notifications there is nothing to write at the opening: an operator can look.
    let second = store(&format!("{}?listen=false", standby.url())).await;
    assert_eq!(second.profile().realm, first.profile().realm);
    let (answer, _) = in_time(second.acquire(&long("moved"))).await;
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("takes no writes"), "{error}");
    let findings = second.probe().await.unwrap();
    assert!(
        findings
            .iter()
            .any(|f| f.severity == Severity::Bad && f.subject == "writes")
    );

    primary.server().kill();
    standby.promote();
    in_time(async {
        while second.break_lock(&"moved".parse().unwrap()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert!(granted(&second, &long("moved")).await.token > before.token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_says_so_and_is_used_once_it_does() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    store(&server.url()).await;
    let _ = server.psql("ALTER DATABASE postgres SET default_transaction_read_only = on");
    let store = store(&server.url()).await;
    let error = store.acquire(&long("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("takes no writes"), "{error}");
    let _ = server.psql(
        "BEGIN READ WRITE; ALTER DATABASE postgres RESET default_transaction_read_only; COMMIT",
    );
    // Sessions keep what they began with.
    let _ = server.psql(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
         WHERE application_name = 'fencelock'",
    );
    let (answer, _) = in_time(async {
        loop {
            if let Ok(answer) = store.acquire(&long("a")).await {
                break answer;
            }
        }
    })
    .await;
    assert!(matches!(answer, Attempt::Granted(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_is_woken_by_the_release_also_after_its_connection_was_lost() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let (ours, theirs) = (locks(&server.url()).await, locks(&server.url()).await);
    assert!(ours.profile().wakes_waiters);
    for round in 0..2 {
        let held = theirs.acquire("woken").await.unwrap();
        let mut watch = ours.watch("woken").await.unwrap();
        let waiting = tokio::spawn({
            let ours = ours.clone();
            async move { ours.acquire("woken").await }
        });
        if round == 1 {
            let _ = server.psql(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                 WHERE application_name = 'fencelock'",
            );
            // It tells its waiters that it came back, for they may have missed something.
            in_time(watch.changed()).await;
        }
        held.release().await.unwrap();
        let (guard, took) = in_time(waiting).await;
        guard.unwrap().unwrap().release().await.unwrap();
        assert!(took < Duration::from_secs(4), "round={round} took={took:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_in_transaction_mode_is_noticed_and_waiters_poll() {
    fencelock_testbed::skip!("postgres");
    fencelock_testbed::skip!("pgbouncer");
    let server = Postgres::fast();
    let transaction = PgBouncer::start(&server, "transaction", 2);
    let session = PgBouncer::start(&server, "session", 20);
    assert!(locks(&session.url()).await.profile().wakes_waiters);
    let refused = try_store(&format!("{}?listen=true", transaction.url())).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
    for url in [
        transaction.url(),
        format!("{}?listen=false", transaction.url()),
    ] {
        let locks = locks(&url).await;
        assert!(!locks.profile().wakes_waiters);
        let held = locks.acquire("pooled").await.unwrap();
        let waiting = tokio::spawn({
            let locks = locks.clone();
            async move { locks.acquire("pooled").await }
        });
        held.release().await.unwrap();
        let (guard, _) = in_time(waiting).await;
        guard.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_grants_by_ten_clients_of_a_small_pool_are_all_given_back() {
    fencelock_testbed::skip!("postgres");
    fencelock_testbed::skip!("pgbouncer");
    let server = Postgres::fast();
    let pooler = PgBouncer::start(&server, "transaction", 2);
    let told = fifty_tokens_of_ten_clients(&pooler.url()).await;
    assert_eq!(told, (1..=50).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_isolation_level_is_corrected_or_refused() {
    fencelock_testbed::skip!("postgres");
    fencelock_testbed::skip!("pgbouncer");
    let server = Postgres::with(&["fsync=off", "default_transaction_isolation=repeatable read"]);
    granted(&store(&server.url()).await, &long("corrected")).await;
    // A pooler takes no such settings.
    let pooler = PgBouncer::start(&server, "transaction", 2);
    let pooled = store(&pooler.url()).await;
    let error = pooled.acquire(&long("refused")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("repeatable read"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_of_another_encoding_keeps_names_and_labels_exactly() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::with(&["fsync=off", "standard_conforming_strings=off"]);
    let _ = server.psql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0");
    let url = server.url().trim_end_matches("/postgres").to_owned() + "/latin";
    let store = store(&url).await;
    let mut request = long("🔒 é\0");
    request.info.label = Some("🔒 \0 \u{202e}".to_owned());
    granted(&store, &request).await;
    let state = store.inspect(&request.name).await.unwrap().unwrap();
    assert_eq!(state.name, request.name);
    assert_eq!(state.holders[0].info, request.info);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_users_own_pool_is_enough() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let manager =
        deadpool_postgres::Manager::new(server.url().parse().unwrap(), tokio_postgres::NoTls);
    let pool = deadpool_postgres::Pool::builder(manager)
        .max_size(2)
        .build()
        .unwrap();
    let store = PostgresStore::from_pool(pool.clone(), PostgresOptions::for_pool())
        .await
        .unwrap();
    assert!(!store.profile().wakes_waiters);
    let locks = Locks::new(store);
    let guards: Vec<_> = {
        let mut guards = Vec::new();
        for i in 0..10 {
            let name = format!("pooled-{i}");
            guards.push(
                locks
                    .acquire(name)
                    .ttl(Duration::from_millis(600))
                    .await
                    .unwrap(),
            );
        }
        guards
    };
    // The holders use the same pool meanwhile, all of it.
    for _ in 0..20 {
        let client = pool.get().await.unwrap();
        client.batch_execute("SELECT pg_sleep(0.05)").await.unwrap();
    }
    for guard in guards {
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
    assert!(pool.status().size <= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_promises_is_what_the_profile_says() {
    fencelock_testbed::skip!("postgres");
    let cases = [
        (&["fsync=off"][..], Durability::D1ProcessCrash),
        (&[], Durability::D2PowerLoss),
        (&["synchronous_commit=off"], Durability::D2PowerLoss),
    ];
    for (settings, expected) in cases {
        let server = Postgres::with(settings);
        let store = store(&server.url()).await;
        assert_eq!(store.profile().durability, expected);
        let warned = store
            .probe()
            .await
            .unwrap()
            .iter()
            .any(|f| f.severity == Severity::Warning);
        assert_eq!(warned, !settings.is_empty());
        let answer = store.acquire(&long("a")).await.unwrap();
        assert!(matches!(answer, Attempt::Granted(_)));
    }
}

#[cfg(feature = "postgres-tls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_verifies_the_authority_and_the_name() {
    fencelock_testbed::skip!("postgres");
    let (server, tls) = Postgres::with_tls(&["listen_addresses=127.0.0.1,127.0.0.2"]);
    let url = |host: &str, roots: &std::path::Path| {
        let (port, roots) = (server.port(), roots.display());
        format!(
            "postgres://postgres@{host}:{port}/postgres?sslmode=verify-full&sslrootcert={roots}"
        )
    };
    let store = store(&url("localhost", &tls.authority())).await;
    granted(&store, &long("tls")).await;
    let encrypted = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                     WHERE application_name = 'fencelock'";
    assert_eq!(server.psql(encrypted), "t");

    let stranger = fencelock_testbed::redis::Certificates::make();
    let plain = Postgres::fast();
    let to_plain = url("localhost", &tls.authority())
        .replace(&server.port().to_string(), &plain.port().to_string());
    for (url, said) in [
        (url("localhost", &stranger.authority()), "not trusted"),
        // Another name of the same host.
        (url("127.0.0.2", &tls.authority()), "not for this name"),
        (to_plain, "can be made with these settings"),
    ] {
        refused(&url, ErrorKind::Invalid, said).await;
    }
    let missing = try_store(&url("localhost", std::path::Path::new("/nowhere"))).await;
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::Invalid);
}
