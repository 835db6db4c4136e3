//! What the tests of this engine share.

use std::error::Error as _;
use std::future::Future;
use std::time::{Duration, Instant};

use fencelock::lease::{AcquireRequest, Attempt, Grant, LeaseRef, LeaseStore, Ttl};
use fencelock::mysql::mysql_async::{Conn, Opts};
use fencelock::mysql::{MysqlOptions, MysqlStore};
use fencelock::{Error, Locks};
use fencelock_testbed::mysql::Mysql;

/// Everything has to end within this time, whatever the server does.
pub(crate) const END: Duration = Duration::from_secs(10);

/// What must not be seen anywhere.
pub(crate) const CANARY: &str = "canary-Xq7";

pub(crate) async fn store(url: &str) -> MysqlStore {
    try_store(url).await.unwrap()
}

pub(crate) async fn try_store(url: &str) -> fencelock::Result<MysqlStore> {
    MysqlStore::connect(MysqlOptions::parse(url)?).await
}

pub(crate) async fn locks(url: &str) -> Locks {
    Locks::open(url).await.unwrap()
}

pub(crate) fn request(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name.parse().unwrap(), Ttl::new(ttl).unwrap())
}

pub(crate) fn long(name: &str) -> AcquireRequest {
    request(name, Duration::from_secs(600))
}

pub(crate) async fn granted(store: &MysqlStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

pub(crate) fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

/// How many hold the lock.
pub(crate) async fn holders(store: &MysqlStore, name: &str) -> usize {
    let state = store.inspect(&name.parse().unwrap()).await.unwrap();
    state.map_or(0, |state| state.holders.len())
}

/// A plain connection of the test's own.
pub(crate) async fn client(url: &str) -> Conn {
    Conn::new(Opts::from_url(url).unwrap()).await.unwrap()
}

/// What `work` yields, and how long it took; fails where it does not end in time.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> (T, Duration) {
    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    let started = Instant::now();
    let done = tokio::time::timeout(END, work).await;
    (done.expect("it ends within 10 s"), started.elapsed())
}

/// An error in all its forms, with its causes.
pub(crate) fn whole(error: &Error) -> String {
    let mut text = format!("{error} / {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(" / {error} / {error:?}");
        cause = error.source();
    }
    text
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
