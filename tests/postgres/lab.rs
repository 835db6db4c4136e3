//! What is this server's own in the tests of the SQL servers.

use std::net::SocketAddr;

use fencelock::postgres::tokio_postgres::{self, Client, NoTls};
use fencelock::postgres::{FencedPostgres, PostgresOptions, PostgresStore, admit_in};
use fencelock::{Fenced, FencingToken};
use fencelock_testbed::postgres::Postgres;

pub(crate) use crate::common::*;
pub(crate) use fencelock::postgres::schema_sql;

pub(crate) type Server = Postgres;
pub(crate) type Store = PostgresStore;

/// The name in `FENCELOCK_TEST_SKIP` and in domains.
pub(crate) const SERVER: &str = "postgres";

/// The option that names the schema of the tables.
pub(crate) const NAMESPACE: &str = "schema";

pub(crate) const LOCKS: &str = "fencelock.locks";
pub(crate) const META: &str = "fencelock.meta";

/// How many connections fencelock has.
pub(crate) const CONNECTIONS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencelock'";

/// Removes the tables.
pub(crate) const FORGET: &str = "DROP SCHEMA fencelock CASCADE";

/// In every request that writes a value.
pub(crate) const WRITE: &[u8] = b".put(";

/// The settings under which a killed server must not tell a token twice.
pub(crate) const KILLED: [&[&str]; 2] = [&[], &["synchronous_commit=off", "wal_writer_delay=10s"]];

/// What is in a request that calls one of fencelock's functions.
pub(crate) fn called(function: &str) -> Vec<u8> {
    format!(".{function}(").into_bytes()
}

/// The URL of a private server behind a proxy.
pub(crate) fn url_at(address: SocketAddr) -> String {
    format!("postgres://postgres@{address}/postgres")
}

pub(crate) fn sql(server: &Server, sql: &str) -> String {
    server.psql(sql)
}

pub(crate) async fn try_store(url: &str) -> fencelock::Result<PostgresStore> {
    PostgresStore::connect(PostgresOptions::parse(url)?).await
}

pub(crate) async fn values(url: &str) -> Fenced {
    Fenced::new(FencedPostgres::open(url).await.unwrap())
}

/// A plain connection of the test's own.
pub(crate) async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Admits in a transaction of its own.
pub(crate) async fn admit_once(url: &str, schema: &str, resource: &str, token: FencingToken) {
    let mut client = client(url).await;
    let transaction = client.transaction().await.unwrap();
    admit_in(&transaction, schema, resource, token)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
}

/// The row of a lock, in a transaction of somebody else.
pub(crate) struct Kept(Client);

impl Kept {
    pub(crate) async fn row(url: &str, name: &str) -> Self {
        let client = client(url).await;
        let lock = format!("BEGIN; SELECT FROM {LOCKS} WHERE name = '{name}' FOR UPDATE");
        client.batch_execute(&lock).await.unwrap();
        Self(client)
    }

    pub(crate) async fn give_back(self) {
        self.0.batch_execute("ROLLBACK").await.unwrap();
    }
}
