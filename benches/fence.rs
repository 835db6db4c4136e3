//! What a fenced write costs beside the same write without a fence, on each engine:
//! `cargo bench --bench fence --all-features`.
//!
//! One value of 1 KiB, one writer, nobody else, servers on loopback, every write durable where the server
//! can be told so by its settings (not NATS and SeaweedFS here). Absolute
//! figures are this machine's; compare the rows of one engine within one run.

#![expect(
    clippy::expect_used,
    reason = "a benchmark that cannot go on has to stop"
)]

use std::sync::atomic::{AtomicU64, Ordering};

use fencelock::fence::{Fence, HolderTag};
use fencelock::{Fenced, FencingToken};

fn main() {
    divan::main();
}

/// A value that differs from the last: where nothing differs, some engines write nothing.
fn value() -> Vec<u8> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{count:01024}").into_bytes()
}

/// A new write of the one holder.
fn fence() -> Fence {
    static SEQ: AtomicU64 = AtomicU64::new(0);
    let domain = "memory/bench/a".parse().expect("a domain");
    let holder = HolderTag::from_bytes([1; 16]);
    let seq = SEQ.fetch_add(1, Ordering::Relaxed) + 1;
    Fence::new(FencingToken::MIN, holder, domain).with_seq(seq)
}

#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "etcd",
    feature = "nats",
    feature = "object_store",
    feature = "sqlite"
))]
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

#[cfg(any(
    feature = "redis",
    feature = "postgres",
    feature = "mysql",
    feature = "etcd",
    feature = "nats",
    feature = "object_store",
    feature = "sqlite"
))]
fn puts(bencher: divan::Bencher<'_, '_>, runtime: &tokio::runtime::Runtime, values: &Fenced) {
    bencher.bench_local(|| {
        let put = values.put("value", value(), fence());
        runtime.block_on(put).expect("it is admitted");
    });
}

#[cfg(feature = "file")]
mod file {
    use std::fs::{File, rename};
    use std::io::Write as _;

    use fencelock::file::FencedFiles;

    use super::*;

    /// A new file, synced, in the place of the old one, and its directory synced.
    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (temp, path) = (dir.path().join("temp"), dir.path().join("value"));
        bencher.bench_local(|| {
            let mut file = File::create(&temp)?;
            file.write_all(&value())?;
            file.sync_all()?;
            rename(&temp, &path)?;
            File::open(dir.path())?.sync_all()
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let values = Fenced::new(FencedFiles::open(dir.path()).expect("a storage"));
        bencher.bench_local(|| {
            pollster::block_on(values.put("value", value(), fence())).expect("admitted");
        });
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use fencelock::sqlite::rusqlite::{Connection, TransactionBehavior};
    use fencelock::sqlite::{FencedSqlite, admit, schema_sql};

    use super::*;

    const UPSERT: &str =
        "INSERT INTO own VALUES (1, ?1) ON CONFLICT (id) DO UPDATE SET value = excluded.value";

    fn own(dir: &tempfile::TempDir) -> Connection {
        let connection = Connection::open(dir.path().join("app.db")).expect("a database");
        let sql = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
            CREATE TABLE own (id INTEGER PRIMARY KEY, value BLOB)";
        connection.execute_batch(sql).expect("a table");
        connection.execute_batch(&schema_sql()).expect("our tables");
        connection
    }

    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut own = own(&dir);
        bencher.bench_local(|| {
            let transaction = own.transaction_with_behavior(TransactionBehavior::Immediate)?;
            transaction.prepare_cached(UPSERT)?.execute([value()])?;
            transaction.commit()
        });
    }

    /// In the user's own transaction.
    #[divan::bench]
    fn admitted(bencher: divan::Bencher<'_, '_>) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut own = own(&dir);
        bencher.bench_local(|| {
            let transaction = own.transaction_with_behavior(TransactionBehavior::Immediate)?;
            admit(&transaction, "own", fence()).expect("admitted");
            transaction.prepare_cached(UPSERT)?.execute([value()])?;
            transaction.commit()
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let runtime = runtime();
        let opening = FencedSqlite::open(dir.path().join("app.db"));
        let values = Fenced::new(runtime.block_on(opening).expect("a storage"));
        puts(bencher, &runtime, &values);
    }
}

#[cfg(feature = "redis")]
mod redis {
    use fencelock::redis::FencedRedis;
    use fencelock::redis::client::{AsyncCommands as _, Client};
    use fencelock_testbed::redis::Redis;

    use super::*;

    fn server() -> Redis {
        Redis::with(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (server(), runtime());
        let client = Client::open(server.url()).expect("a client");
        let mut connection = runtime
            .block_on(client.get_multiplexed_async_connection())
            .expect("a connection");
        bencher.bench_local(|| {
            let set = connection.set::<_, _, ()>("own", value());
            runtime.block_on(set).expect("it is set");
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (server(), runtime());
        let url = server.url();
        let values = Fenced::new(
            runtime
                .block_on(FencedRedis::open(&url))
                .expect("a storage"),
        );
        puts(bencher, &runtime, &values);
    }
}

#[cfg(feature = "postgres")]
mod postgres {
    use fencelock::postgres::tokio_postgres::{Client, NoTls, Statement, connect};
    use fencelock::postgres::{FencedPostgres, admit};
    use fencelock_testbed::postgres::Postgres;
    use tokio::runtime::Runtime;

    use super::*;

    async fn own(server: &Postgres) -> (Client, Statement) {
        FencedPostgres::open(&server.url())
            .await
            .expect("a storage");
        let (client, connection) = connect(&server.url(), NoTls).await.expect("a connection");
        tokio::spawn(connection);
        let table = "CREATE TABLE own (id int PRIMARY KEY, value bytea)";
        client.batch_execute(table).await.expect("a table");
        let upsert =
            "INSERT INTO own VALUES (1, $1) ON CONFLICT (id) DO UPDATE SET value = excluded.value";
        let upsert = client.prepare(upsert).await.expect("a statement");
        (client, upsert)
    }

    fn writes(bencher: divan::Bencher<'_, '_>, runtime: &Runtime, server: &Postgres, admits: bool) {
        let (mut client, upsert) = runtime.block_on(own(server));
        bencher.bench_local(|| {
            runtime.block_on(async {
                let transaction = client.transaction().await.expect("a transaction");
                if admits {
                    admit(&transaction, "own", fence()).await.expect("admitted");
                }
                let written = transaction.execute(&upsert, &[&value()]).await;
                written.expect("it is written");
                transaction.commit().await.expect("it is committed");
            });
        });
    }

    /// In a transaction, as `admit` needs it.
    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        writes(bencher, &runtime(), &Postgres::start(), false);
    }

    #[divan::bench]
    fn admitted(bencher: divan::Bencher<'_, '_>) {
        writes(bencher, &runtime(), &Postgres::start(), true);
    }

    /// One statement without a transaction around it.
    #[divan::bench]
    fn bare_statement(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Postgres::start(), runtime());
        let (client, upsert) = runtime.block_on(own(&server));
        bencher.bench_local(|| {
            let written = runtime.block_on(client.execute(&upsert, &[&value()]));
            written.expect("it is written");
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Postgres::start(), runtime());
        let url = server.url();
        let values = Fenced::new(
            runtime
                .block_on(FencedPostgres::open(&url))
                .expect("a storage"),
        );
        puts(bencher, &runtime, &values);
    }
}

#[cfg(feature = "mysql")]
mod mysql {
    use fencelock::mysql::FencedMysql;
    use fencelock::mysql::mysql_async::Conn;
    use fencelock::mysql::mysql_async::prelude::Queryable as _;
    use fencelock_testbed::mysql::Mysql;

    use super::*;

    /// One statement, prepared.
    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Mysql::start(), runtime());
        let mut own = runtime.block_on(async {
            let url = server.url();
            FencedMysql::open(&url).await.expect("a storage");
            let mut own = Conn::from_url(url).await.expect("a connection");
            let table = "CREATE TABLE own (id INT PRIMARY KEY, value BLOB) ENGINE=InnoDB";
            own.query_drop(table).await.expect("a table");
            own
        });
        let upsert = "INSERT INTO own VALUES (1, ?) ON DUPLICATE KEY UPDATE value = VALUES(value)";
        bencher.bench_local(|| {
            let written = own.exec_drop(upsert, (value(),));
            runtime.block_on(written).expect("it is written");
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Mysql::start(), runtime());
        let url = server.url();
        let opening = runtime.block_on(FencedMysql::open(&url));
        let values = Fenced::new(opening.expect("a storage"));
        puts(bencher, &runtime, &values);
    }
}

/// A server that syncs as it comes: every two minutes, and after the acknowledgement.
#[cfg(feature = "nats")]
mod nats {
    use fencelock::nats::FencedNats;
    use fencelock::nats::client::{connect, jetstream};
    use fencelock_testbed::nats::Nats;

    use super::*;

    /// A message that replaces the one before it, as a key-value bucket has them.
    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Nats::start(), runtime());
        let stream = runtime.block_on(async {
            let client = connect(server.address().to_string()).await;
            let stream = jetstream::new(client.expect("a client"));
            let config = jetstream::stream::Config {
                name: "own".to_owned(),
                subjects: vec!["own.*".to_owned()],
                max_messages_per_subject: 1,
                ..Default::default()
            };
            stream.create_stream(config).await.expect("a stream");
            stream
        });
        bencher.bench_local(|| {
            runtime.block_on(async {
                let sent = stream.publish("own.value", value().into()).await;
                sent.expect("it is sent").await.expect("it is stored");
            });
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Nats::start(), runtime());
        let url = server.url();
        let values = Fenced::new(runtime.block_on(FencedNats::open(&url)).expect("a storage"));
        puts(bencher, &runtime, &values);
    }
}

/// On SeaweedFS, which checks its conditions.
#[cfg(feature = "object_store")]
mod object_store {
    use fencelock::object_store::ObjectOptions;
    use fencelock::object_store::client::aws::AmazonS3Builder;
    use fencelock::object_store::client::{ObjectStoreExt as _, path::Path};
    use fencelock_testbed::s3::{KEY, S3, SECRET};

    use super::*;

    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (S3::seaweed(), runtime());
        let store = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_endpoint(format!("http://{}", server.address()))
            .with_allow_http(true)
            .with_access_key_id(KEY)
            .with_secret_access_key(SECRET)
            .build()
            .expect("a client");
        let path = Path::from("own");
        bencher.bench_local(|| {
            let put = store.put(&path, value().into());
            runtime.block_on(put).expect("it is written");
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (S3::seaweed(), runtime());
        let options = ObjectOptions::default().credentials(KEY, SECRET, None);
        let opening = runtime.block_on(options.open_fenced(&server.url("values")));
        let values = Fenced::new(opening.expect("a storage"));
        puts(bencher, &runtime, &values);
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use fencelock::etcd::FencedEtcd;
    use fencelock::etcd::client::Client;
    use fencelock_testbed::etcd::Etcd;

    use super::*;

    #[divan::bench]
    fn bare(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Etcd::start(), runtime());
        let address = [server.address().to_string()];
        let connecting = Client::connect(address, None);
        let mut client = runtime.block_on(connecting).expect("a client");
        bencher.bench_local(|| {
            let put = client.put("own", value(), None);
            runtime.block_on(put).expect("it is written");
        });
    }

    #[divan::bench]
    fn fenced(bencher: divan::Bencher<'_, '_>) {
        let (server, runtime) = (Etcd::start(), runtime());
        let url = server.url();
        let values = Fenced::new(runtime.block_on(FencedEtcd::open(&url)).expect("a storage"));
        puts(bencher, &runtime, &values);
    }
}
