//! What is this server's own in the tests of the SQL servers.

use std::net::SocketAddr;
use std::time::Duration;

use fencelock::mysql::mysql_async::prelude::Queryable as _;
use fencelock::mysql::mysql_async::{Conn, Opts, TxOpts};
use fencelock::mysql::{FencedMysql, MysqlOptions, MysqlStore, admit_in};
use fencelock::{Fenced, FencingToken};
use fencelock_testbed::mysql::{DURABLE, Mysql};

pub(crate) use crate::common::*;
pub(crate) use fencelock::mysql::schema_sql;

pub(crate) type Server = Mysql;
pub(crate) type Store = MysqlStore;

/// The name in `FENCELOCK_TEST_SKIP` and in domains.
pub(crate) const SERVER: &str = "mysql";

/// The option that names the tables.
pub(crate) const NAMESPACE: &str = "prefix";

pub(crate) const LOCKS: &str = "fencelock_locks";
pub(crate) const META: &str = "fencelock_meta";

/// How many connections fencelock has.
pub(crate) const CONNECTIONS: &str = "SELECT COUNT(*) FROM information_schema.PROCESSLIST
    WHERE DB = 'test' AND ID <> CONNECTION_ID()";

/// Removes the tables.
pub(crate) const FORGET: &str = "DROP DATABASE test; CREATE DATABASE test";

/// In every request that writes the value `the value`.
pub(crate) const WRITE: &[u8] = b"the value";

/// The settings under which a killed server must not tell a token twice.
pub(crate) const KILLED: [&[&str]; 3] = [
    &DURABLE,
    &[DURABLE[0], DURABLE[1], "log-bin=log"],
    &[
        "innodb-flush-log-at-trx-commit=2",
        "log-bin=log",
        "sync-binlog=0",
    ],
];

/// What is in a request that calls one of fencelock's procedures.
pub(crate) fn called(procedure: &str) -> Vec<u8> {
    format!("_{procedure}`(").into_bytes()
}

/// The URL of a private server behind a proxy.
pub(crate) fn url_at(address: SocketAddr) -> String {
    format!("mysql://root@{address}/test")
}

pub(crate) fn sql(server: &Server, sql: &str) -> String {
    server.sql(sql)
}

pub(crate) async fn try_store(url: &str) -> fencelock::Result<MysqlStore> {
    MysqlStore::connect(MysqlOptions::parse(url)?).await
}

pub(crate) async fn values(url: &str) -> Fenced {
    Fenced::new(FencedMysql::open(url).await.unwrap())
}

/// A plain connection of the test's own.
pub(crate) async fn client(url: &str) -> Conn {
    Conn::new(Opts::from_url(url).unwrap()).await.unwrap()
}

/// Admits in a transaction of its own.
pub(crate) async fn admit_once(url: &str, prefix: &str, resource: &str, token: FencingToken) {
    let mut client = client(url).await;
    let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
    admit_in(&mut transaction, prefix, resource, token)
        .await
        .unwrap();
    transaction.commit().await.unwrap();
}

/// The row of a lock, in a transaction of somebody else.
pub(crate) struct Kept(Conn);

impl Kept {
    pub(crate) async fn row(url: &str, name: &str) -> Self {
        let mut client = client(url).await;
        client.query_drop("START TRANSACTION").await.unwrap();
        let lock = format!("SELECT * FROM {LOCKS} WHERE name = '{name}' FOR UPDATE");
        client.query_drop(lock).await.unwrap();
        Self(client)
    }

    pub(crate) async fn give_back(mut self) {
        self.0.query_drop("ROLLBACK").await.unwrap();
    }
}

/// The connections whose statement has been waiting for a row. By the list of processes: that of
/// transactions shows an old state to whoever looks again within 0.1 s.
pub(crate) fn waiting(server: &Mysql) -> Vec<String> {
    let ids = server.sql(
        "SELECT ID FROM information_schema.PROCESSLIST
         WHERE COMMAND = 'Query' AND ID <> CONNECTION_ID() AND TIME_MS > 100",
    );
    ids.lines().map(str::to_owned).collect()
}

pub(crate) async fn await_waiting(server: &Mysql) {
    in_time(async {
        while waiting(server).is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}
