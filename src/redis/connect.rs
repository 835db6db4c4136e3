//! Connections: one for all commands and notifications of a store, made anew when it is lost, and
//! every step bounded.
//!
//! What matters most here is to know of each failure whether the server may have applied the
//! request: before it is sent, certainly not; once it is on its way, nobody knows.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Pipeline, PushInfo,
    PushKind, RedisConnectionInfo, Value,
};
use tokio::sync::Mutex;

use super::answer::{self, Failure};
use super::sentinel::Sentinels;
use super::waiters::Waiters;
use crate::error::{Error, Result};

/// How long it may take to find a server, connect, and greet it.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// How long a server may take to answer. With a connect before and a script sent again in full, an
/// operation ends within 8 s.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(3);

/// How long a server may take to hear from as many replicas as were asked for.
pub(super) const ACKNOWLEDGE_LIMIT: Duration = Duration::from_secs(1);

/// Where the servers are.
pub(super) enum Target {
    /// One server, or whatever stands behind its name.
    Single(Client),
    /// A master that Sentinels know.
    Sentinel(Sentinels),
    /// The masters of a cluster.
    Cluster(ClusterTarget),
    /// A connection of the user's.
    Given(Box<dyn Lent>),
}

/// What makes a client of a host, a port and settings.
pub(super) type Dial =
    Box<dyn Fn(String, u16, &RedisConnectionInfo) -> Result<Client> + Send + Sync>;

/// How to reach a cluster.
pub(super) struct ClusterTarget {
    pub(super) build: Box<dyn Fn(Greeter) -> Result<redis::cluster::ClusterClient> + Send + Sync>,
}

/// What hears of notifications and of lost connections.
pub(super) type Greeter = Arc<dyn Fn(PushInfo) -> Result<(), ()> + Send + Sync>;

/// A connection of the user's that can be used by many at once.
pub(super) trait Lent: Send + Sync {
    fn duplicate(&self) -> Box<dyn ConnectionLike + Send>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Lent for C {
    fn duplicate(&self) -> Box<dyn ConnectionLike + Send> {
        Box::new(self.clone())
    }
}

/// The realm that a store found at its first connection, for the later ones.
pub(super) struct Realm {
    pub(super) key: String,
    pub(super) known: OnceLock<String>,
    /// A store whose tokens are counted ends where its data was lost: its counters began anew.
    pub(super) ends_with_data: bool,
}

/// The connection of one store.
pub(super) struct Link {
    target: Target,
    pub(super) realm: Option<Realm>,
    pub(super) waiters: Arc<Waiters>,
    slot: Mutex<Option<Live>>,
}

/// A connection that was good when it was last looked at.
#[derive(Clone)]
struct Live {
    wire: Wire,
    lost: Arc<AtomicBool>,
}

#[derive(Clone)]
enum Wire {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    pub(super) fn new(target: Target, realm: Option<Realm>) -> Self {
        Self {
            target,
            realm,
            waiters: Arc::default(),
            slot: Mutex::new(None),
        }
    }

    /// True where all keys are on one server, so that a pipeline may name any of them.
    pub(super) fn is_single(&self) -> bool {
        matches!(self.target, Target::Single(_) | Target::Sentinel(_))
    }

    /// True where the engine's notifications reach this store.
    pub(super) fn hears(&self) -> bool {
        !matches!(self.target, Target::Given(_))
    }

    /// Forgets the connection: the next request makes a new one, in the runtime that it runs in.
    pub(super) async fn hang_up(&self) {
        *self.slot.lock().await = None;
    }

    /// One command and its answer.
    pub(super) async fn command(&self, command: &Cmd) -> Result<Value, Failure> {
        if let Target::Given(lent) = &self.target {
            let mut connection = lent.duplicate();
            return answered(connection.req_packed_command(command)).await;
        }
        let live = self.live().await?;
        let answer = match live.wire.clone() {
            Wire::Single(mut connection) => answered(connection.req_packed_command(command)).await,
            Wire::Cluster(mut connection) => answered(connection.req_packed_command(command)).await,
        };
        self.judge(&live, answer)
    }

    /// Several commands in one round trip, and each one's answer. Only where
    /// [`is_single`](Self::is_single).
    pub(super) async fn pipeline(&self, pipeline: &Pipeline) -> Result<Vec<Value>, Failure> {
        let count = pipeline.len();
        let live = self.live().await?;
        let answer = match live.wire.clone() {
            Wire::Single(mut connection) => {
                within(connection.req_packed_commands(pipeline, 0, count)).await
            }
            Wire::Cluster(mut connection) => {
                within(connection.req_packed_commands(pipeline, 0, count)).await
            }
        };
        let values = self.judge(&live, answer)?;
        for value in &values {
            if let Value::ServerError(error) = value
                && answer::leads_elsewhere(error)
            {
                self.discard(&live);
            }
        }
        Ok(values)
    }

    /// Hears of what is published on a channel from now on, on the one connection.
    pub(super) async fn subscribe(&self, channel: &str) -> Result<(), Failure> {
        let live = self.live().await?;
        let left = self.waiters.take_left();
        let answer = within(async {
            match live.wire.clone() {
                Wire::Single(mut connection) => {
                    if !left.is_empty() {
                        connection.unsubscribe(&left).await?;
                    }
                    connection.subscribe(channel).await
                }
                Wire::Cluster(mut connection) => {
                    if !left.is_empty() {
                        connection.unsubscribe(&left).await?;
                    }
                    connection.subscribe(channel).await
                }
            }
        })
        .await;
        self.judge(&live, answer)
    }

    /// The masters of a cluster, for what is asked of each; elsewhere one `None`, which stands for
    /// the only server.
    pub(super) async fn masters(&self) -> Result<Vec<Option<(String, u16)>>, Failure> {
        if !matches!(self.target, Target::Cluster(_)) {
            return Ok(vec![None]);
        }
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let slots: Vec<Vec<Value>> = answer::parse(self.command(&command).await?)?;
        let mut masters = Vec::new();
        for range in slots {
            // First slot, last slot, the master, its replicas.
            let Some(master) = range.into_iter().nth(2) else {
                continue;
            };
            let node: Vec<Value> = answer::parse(master)?;
            let mut parts = node.into_iter();
            if let (Some(host), Some(port)) = (parts.next(), parts.next()) {
                let address = Some((answer::parse(host)?, answer::parse(port)?));
                if !masters.contains(&address) {
                    masters.push(address);
                }
            }
        }
        Ok(masters)
    }

    /// One command to one of the [`masters`](Self::masters).
    pub(super) async fn command_at(
        &self,
        master: Option<&(String, u16)>,
        command: &Cmd,
    ) -> Result<Value, Failure> {
        use redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
        let Some((host, port)) = master else {
            return self.command(command).await;
        };
        let live = self.live().await?;
        let Wire::Cluster(mut connection) = live.wire.clone() else {
            return self.command(command).await;
        };
        let route = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress {
            host: host.clone(),
            port: *port,
        });
        let answer = answered(connection.route_command(command.clone(), route)).await;
        self.judge(&live, answer)
    }

    /// The connection, made where there is none. Nothing was sent where this fails.
    async fn live(&self) -> Result<Live, Failure> {
        let connected = async {
            let mut slot = self.slot.lock().await;
            if let Some(live) = &*slot
                && !live.lost.load(Ordering::Acquire)
            {
                return Ok(live.clone());
            }
            *slot = None;
            let live = self.connect().await?;
            *slot = Some(live.clone());
            Ok(live)
        };
        match tokio::time::timeout(CONNECT_LIMIT, connected).await {
            Ok(live) => live,
            Err(_) => Err(Failure::NotSent(
                Error::unavailable("the redis server cannot be reached in time")
                    .with("limit", format_args!("{CONNECT_LIMIT:?}")),
            )),
        }
    }

    async fn connect(&self) -> Result<Live, Failure> {
        let lost = Arc::new(AtomicBool::new(false));
        let greeter = self.greeter(&lost);
        let wire = match &self.target {
            Target::Single(client) => Wire::Single(dial(client, Some(greeter)).await?),
            Target::Sentinel(sentinels) => {
                let client = sentinels.find().await.map_err(Failure::NotSent)?;
                Wire::Single(dial(&client, Some(greeter)).await?)
            }
            Target::Cluster(cluster) => {
                let client = (cluster.build)(greeter).map_err(Failure::NotSent)?;
                let connection = client.get_async_connection().await;
                Wire::Cluster(connection.map_err(Failure::connecting)?)
            }
            Target::Given(_) => {
                return Err(Failure::NotSent(Error::unsupported(
                    "a connection that was lent is not made anew",
                )));
            }
        };
        let live = Live { wire, lost };
        self.greet(&live).await?;
        self.resubscribe(&live).await?;
        Ok(live)
    }

    /// Hears the engine's pushes: of changes, and of the end of the connection, after which nobody
    /// may rely on hearing of changes.
    fn greeter(&self, lost: &Arc<AtomicBool>) -> Greeter {
        let (waiters, lost) = (Arc::clone(&self.waiters), Arc::clone(lost));
        Arc::new(move |push: PushInfo| {
            match push.kind {
                PushKind::Message | PushKind::SMessage => {
                    if let Some(Value::BulkString(channel)) = push.data.first() {
                        waiters.wake(channel);
                    }
                }
                PushKind::Disconnection => {
                    lost.store(true, Ordering::Release);
                    waiters.wake_all();
                }
                _ => {}
            }
            Ok(())
        })
    }

    /// Sees to it that this is the data that the store was opened on. The realm of a server that
    /// lost its data is planted again where its tokens go on upwards by its clock.
    async fn greet(&self, live: &Live) -> Result<(), Failure> {
        let Some(realm) = &self.realm else {
            return Ok(());
        };
        let Some(known) = realm.known.get() else {
            return Ok(());
        };
        let (Wire::Single(mut connection), true) = (live.wire.clone(), self.is_single()) else {
            return Ok(());
        };
        let mut read = redis::cmd("GET");
        read.arg(&realm.key);
        let answer = connection.req_packed_command(&read).await;
        let answer = answer.map_err(Failure::connecting)?;
        let mut found: Option<String> = answer::parse_unsent(answer)?;
        if found.is_none() && !realm.ends_with_data {
            let mut plant = redis::cmd("SET");
            plant.arg(&realm.key).arg(known).arg("NX");
            // Another may be first, which the next connection sees; and a server that is full, or
            // a replica, refuses, which it says again to whatever comes next.
            let answer = connection.req_packed_command(&plant).await;
            answer.map_err(Failure::connecting)?;
            found = Some(known.clone());
        }
        if found.as_ref() == Some(known) {
            return Ok(());
        }
        if realm.ends_with_data {
            return Err(Failure::NotSent(
                Error::corrupt(
                    "the server has other data than when this store was opened, and its counters began anew; open the store again",
                )
                .with("realm", known)
                .with("found", found.as_deref().unwrap_or("none")),
            ));
        }
        tracing::warn!(realm = %known, found = ?found, "the server lost its data, and another client gave it another realm; resources refuse this client's fences until it is opened again");
        Ok(())
    }

    async fn resubscribe(&self, live: &Live) -> Result<(), Failure> {
        let channels = self.waiters.channels();
        if channels.is_empty() {
            return Ok(());
        }
        let answer = match live.wire.clone() {
            Wire::Single(mut connection) => connection.subscribe(&channels).await,
            Wire::Cluster(mut connection) => connection.subscribe(&channels).await,
        };
        match answer {
            // The user has no right to these channels: waiters go on by polling.
            Err(error) if error.code().is_some() => {
                tracing::warn!(%error, "no notifications: the server refused to send them");
                Ok(())
            }
            answer => answer.map_err(Failure::connecting),
        }
    }

    /// Gives a connection up that failed: what was sent over it is lost, or its server does not
    /// write.
    fn judge<T>(&self, live: &Live, answer: Result<T, Failure>) -> Result<T, Failure> {
        if let Err(failure) = &answer
            && failure.ends_connection()
        {
            self.discard(live);
        }
        answer
    }

    fn discard(&self, live: &Live) {
        // A cluster's connection mends itself.
        if matches!(live.wire, Wire::Single(_)) && !live.lost.swap(true, Ordering::AcqRel) {
            self.waiters.wake_all();
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Hosts only: settings hold passwords.
        let at = match &self.target {
            Target::Single(client) => client.get_connection_info().addr().to_string(),
            Target::Sentinel(sentinels) => format!("sentinel:{}", sentinels.master),
            Target::Cluster(_) => "cluster".to_owned(),
            Target::Given(_) => "lent".to_owned(),
        };
        f.debug_struct("Link")
            .field("at", &at)
            .finish_non_exhaustive()
    }
}

pub(super) async fn dial(
    client: &Client,
    greeter: Option<Greeter>,
) -> Result<MultiplexedConnection, Failure> {
    // The limits are around the whole, elsewhere: the client's own would make two of each.
    let mut config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_LIMIT))
        .set_response_timeout(None);
    if let Some(greeter) = greeter {
        config = config.set_push_sender(move |push| greeter(push));
    }
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .map_err(Failure::connecting)
}

/// The answer, or the failure of a server that was silent for too long.
async fn within<T>(request: impl Future<Output = redis::RedisResult<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(REQUEST_LIMIT, request).await {
        Ok(answer) => answer.map_err(Failure::answering),
        Err(_) => Err(Failure::Silent(REQUEST_LIMIT)),
    }
}

/// The same for one command, whose answer may itself be an error.
pub(super) async fn answered(
    request: impl Future<Output = redis::RedisResult<Value>>,
) -> Result<Value, Failure> {
    within(request)
        .await?
        .extract_error()
        .map_err(Failure::answering)
}

/// A client whose connections hear pushes.
pub(super) fn client(address: ConnectionAddr, settings: RedisConnectionInfo) -> Result<Client> {
    use redis::IntoConnectionInfo as _;
    let info = address
        .into_connection_info()
        .map_err(|e| Error::invalid("not an address of a redis server").with_source(e))?;
    hearing(info.set_redis_settings(settings))
}

/// The same, from settings of the user's.
pub(super) fn hearing(info: ConnectionInfo) -> Result<Client> {
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(redis::ProtocolVersion::RESP3);
    Client::open(info.set_redis_settings(settings))
        .map_err(|e| Error::invalid("not the settings of a redis client").with_source(e))
}
