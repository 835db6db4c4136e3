//! Finding a master through the Sentinels that watch it.

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::aio::ConnectionLike as _;
use redis::{Client, Cmd, RedisConnectionInfo, Value};

use super::answer;
use super::connect::{Dial, answered, dial};
use crate::error::{Error, ErrorKind, Result};

/// How to find a master through Sentinels.
pub(super) struct Sentinels {
    pub(super) sentinels: Vec<Client>,
    /// The name that the Sentinels know the master by.
    pub(super) master: String,
    /// What a connection to the master is like, but for its address.
    pub(super) settings: RedisConnectionInfo,
    /// Makes a client of the master at an address.
    pub(super) dial: Dial,
}

impl Sentinels {
    /// A client of the present master: that of the first Sentinel whose master says so too.
    ///
    /// Each is asked and checked beside the others: one that has not heard of a failover names a host
    /// that may answer nobody.
    pub(super) async fn find(&self) -> Result<Client> {
        let asked = self.sentinels.iter().map(|sentinel| async move {
            let (host, port) = ask(sentinel, &self.master).await?;
            self.check(host, port).await
        });
        let mut asked: FuturesUnordered<_> = asked.collect();
        let mut last = Error::unavailable("no Sentinel is known");
        while let Some(found) = asked.next().await {
            match found {
                Ok(client) => return Ok(client),
                Err(error) => last = error,
            }
        }
        Err(last.with("master", format_args!("{:?}", self.master)))
    }

    /// A demoted master goes on as one until it hears of it, but a replica says that it is one.
    async fn check(&self, host: String, port: u16) -> Result<Client> {
        let client = (self.dial)(host, port, &self.settings)?;
        let role: Vec<Value> = simple(&client, redis::cmd("ROLE")).await?;
        match role.first() {
            Some(Value::BulkString(role)) if role == b"master" => Ok(client),
            _ => Err(
                Error::unavailable("the server that the Sentinels name is not a master yet")
                    .with("at", client.get_connection_info().addr()),
            ),
        }
    }
}

async fn ask(sentinel: &Client, master: &str) -> Result<(String, u16)> {
    let mut question = redis::cmd("SENTINEL");
    question.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
    let told: Option<(String, u16)> = simple(sentinel, question).await?;
    told.ok_or_else(|| {
        Error::unavailable("a Sentinel does not know the master; check its name")
            .with("sentinel", sentinel.get_connection_info().addr())
    })
}

/// One command over a connection of its own.
async fn simple<T: redis::FromRedisValue>(client: &Client, command: Cmd) -> Result<T> {
    let mut connection = dial(client, None).await.map_err(Error::from)?;
    let answer = answered(connection.req_packed_command(&command)).await;
    answer
        .and_then(answer::parse)
        .map_err(|failure| Error::from(failure).into_kind(ErrorKind::Unavailable))
}
