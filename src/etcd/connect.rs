//! The one connection of a store, made anew at the next member when it is lost, and every step
//! bounded.
//!
//! What matters most here is to know of each failure whether the cluster may have applied the
//! request, and that no connection is made without a look at whose data is behind it: tonic
//! would connect again by itself, so that its connector works once only.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Channel, Client, ConnectOptions, Error as ClientError, LeaseTimeToLiveResponse, ResponseHeader,
    StatusResponse, Txn, TxnResponse,
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tonic::transport::{Endpoint, Uri};

use super::failure::{Effect, Failure, Gone};
use super::keys::Keys;
use super::options::EtcdOptions;
use super::server::Identity;
use crate::error::{Error, ErrorKind, Result};

/// How long it may take to connect to one member, log in and greet it. A member that is dead or
/// paused costs no more before the next one is tried.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_millis(1_200);

/// How long a member may take to answer one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(3);

/// How long an operation may take, with all its requests.
const OPERATION_LIMIT: Duration = Duration::from_millis(8_500);

/// Where the cluster is.
pub(super) enum Target {
    /// Its members, of which one is used at a time.
    Servers(Servers),
    /// A client of the user's.
    Given(Box<Client>),
}

/// The members that a URL names, and how to log in.
pub(super) struct Servers {
    pub(super) members: Vec<Member>,
    pub(super) login: Option<(String, String)>,
}

/// One member.
pub(super) struct Member {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) endpoint: Endpoint,
}

/// The connection of one store.
pub(super) struct Link {
    target: Target,
    pub(super) identity: Identity,
    slot: Mutex<Slot>,
    /// How often no member could be reached.
    failures: AtomicU64,
    /// The highest revision that an answer has named.
    revision: AtomicI64,
}

#[derive(Default)]
struct Slot {
    live: Option<Live>,
    /// Why there is none, where none could be made.
    failed: Option<(ErrorKind, String)>,
    /// The member to try next.
    next: usize,
}

/// A connection that was good when it was last looked at.
#[derive(Clone)]
struct Live {
    client: Client,
    lost: Arc<AtomicBool>,
}

impl Link {
    pub(super) fn new(target: Target, options: &EtcdOptions) -> Self {
        Self {
            target,
            identity: Identity::new(&Keys::new(&options.prefix), options),
            slot: Mutex::default(),
            failures: AtomicU64::new(0),
            revision: AtomicI64::new(0),
        }
    }

    /// How many members there are to try.
    fn members(&self) -> usize {
        match &self.target {
            Target::Servers(servers) => servers.members.len(),
            Target::Given(_) => 1,
        }
    }

    /// The highest revision that the cluster is known to have had.
    pub(super) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Forgets the connection: the next request makes a new one, in the runtime that it runs in.
    pub(super) async fn hang_up(&self) {
        self.slot.lock().await.live = None;
    }

    /// A transaction that changes nothing.
    pub(super) async fn read(&self, txn: Txn) -> Result<TxnResponse, Failure> {
        self.retry(|| {
            let txn = txn.clone();
            async move {
                let ask = |client: Client| async move { client.kv_client().txn(txn).await };
                let answer = self.once(ask).await.map_err(Failure::of_read)?;
                self.saw(answer.header());
                Ok(answer)
            }
        })
        .await
    }

    /// A transaction that may change something. The revision that was known before it was sent is
    /// at most its own, unless the cluster's has gone back.
    pub(super) async fn write(&self, txn: Txn) -> Result<TxnResponse, Failure> {
        self.retry_unsent(|| {
            let txn = txn.clone();
            async move {
                let ask = |client: Client| async move { client.kv_client().txn(txn).await };
                let answer = self.once(ask).await?;
                self.saw(answer.header());
                Ok(answer)
            }
        })
        .await
    }

    /// A new etcd lease: its id, and the TTL in seconds that it really has.
    pub(super) async fn grant(&self, ttl_secs: i64) -> Result<(i64, i64), Failure> {
        // A lease that nothing is attached to does nothing, so that its grant can be repeated.
        self.retry(|| async move {
            let ask =
                |client: Client| async move { client.lease_client().grant(ttl_secs, None).await };
            let answer = self.once(ask).await.map_err(Failure::of_read)?;
            self.saw(answer.header());
            Ok((answer.id(), answer.ttl()))
        })
        .await
    }

    /// Ends an etcd lease, and with it whatever is attached to it.
    pub(super) async fn revoke(&self, lease: i64) -> Result<(), Failure> {
        let ask = |client: Client| async move { client.lease_client().revoke(lease).await };
        self.once(ask).await.map(|answer| self.saw(answer.header()))
    }

    /// Gives a lease its whole TTL again, from now on.
    pub(super) async fn keep_alive(&self, lease: i64) -> Result<(), Failure> {
        // Twice is as good as once.
        self.retry(|| async move {
            let ask = |client: Client| async move { client.lease_client().keep_alive(lease).await };
            self.once(ask).await.map(drop)
        })
        .await
    }

    /// How long a lease has left.
    pub(super) async fn time_to_live(
        &self,
        lease: i64,
    ) -> Result<LeaseTimeToLiveResponse, Failure> {
        self.retry(|| async move {
            let ask = |client: Client| async move {
                client.lease_client().time_to_live(lease, None).await
            };
            self.once(ask).await.map_err(Failure::of_read)
        })
        .await
    }

    /// What the member that we are connected to says of itself.
    pub(super) async fn status(&self) -> Result<StatusResponse, Failure> {
        self.retry(|| async move { self.once(status).await.map_err(Failure::of_read) })
            .await
    }

    /// How many members vote.
    pub(super) async fn voters(&self) -> Result<usize, Failure> {
        let ask = |client: Client| async move { client.cluster_client().member_list().await };
        let answer = self.once(ask).await.map_err(Failure::of_read)?;
        Ok(answer.members().iter().filter(|m| !m.is_learner()).count())
    }

    /// The alarms that the cluster has raised.
    pub(super) async fn alarms(&self) -> Result<usize, Failure> {
        let ask = |client: Client| async move {
            use etcd_client::{AlarmAction, AlarmType};
            client
                .maintenance_client()
                .alarm(AlarmAction::Get, AlarmType::None, None)
                .await
        };
        let answer = self.once(ask).await.map_err(Failure::of_read)?;
        Ok(answer.alarms().len())
    }

    /// The client, for streams; it ends with the connection.
    pub(super) async fn client(&self) -> Result<Client, Failure> {
        Ok(self.live().await?.client)
    }

    /// Asks again, at the next member, what changes nothing.
    async fn retry<T, F>(&self, ask: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        self.tries(ask, |failure| failure.ends_connection).await
    }

    /// Asks again, at the next member, what was certainly not sent.
    async fn retry_unsent<T, F>(&self, ask: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        self.tries(ask, Failure::leads_elsewhere).await
    }

    async fn tries<T, F>(
        &self,
        ask: impl Fn() -> F,
        again: impl Fn(&Failure) -> bool,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let mut left = self.members();
        loop {
            match ask().await {
                Err(failure) if left > 0 && again(&failure) => left -= 1,
                answer => return answer,
            }
        }
    }

    /// One request on the present connection.
    async fn once<T, F>(&self, ask: impl FnOnce(Client) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let live = self.live().await?;
        // Boxed, as all that is large here: the futures of a gRPC client take kilobytes each, and
        // are moved about on the stack otherwise.
        let asked = Box::pin(ask(live.client.clone()));
        let answer = match tokio::time::timeout(REQUEST_LIMIT, asked).await {
            Ok(answer) => answer.map_err(Failure::answering),
            Err(_) => Err(Failure::silent(REQUEST_LIMIT)),
        };
        if let Err(failure) = &answer
            && failure.ends_connection
        {
            live.lost.store(true, Ordering::Release);
        }
        answer
    }

    /// Gives up the connection that whoever asks has found to be broken.
    pub(super) async fn discard(&self) {
        if let Some(live) = &self.slot.lock().await.live {
            live.lost.store(true, Ordering::Release);
        }
    }

    /// The connection, made where there is none. Nothing was sent where this fails.
    async fn live(&self) -> Result<Live, Failure> {
        let servers = match &self.target {
            Target::Servers(servers) => servers,
            Target::Given(client) => {
                return Ok(Live {
                    client: Client::clone(client),
                    lost: Arc::default(),
                });
            }
        };
        let failures = self.failures.load(Ordering::Acquire);
        let mut slot = self.slot.lock().await;
        if let Some(live) = &slot.live
            && !live.lost.load(Ordering::Acquire)
        {
            return Ok(live.clone());
        }
        slot.live = None;
        if self.failures.load(Ordering::Acquire) != failures
            && let Some((kind, message)) = &slot.failed
        {
            // All who waited here for one that could not be made hear of it together, instead of
            // trying one after the other.
            return Err(Failure::not_sent(Error::new(*kind, message)));
        }
        let mut last = None;
        for _ in 0..servers.members.len() {
            let at = slot.next % servers.members.len();
            slot.next = at + 1;
            let Some(member) = servers.members.get(at) else {
                continue;
            };
            let connecting = Box::pin(self.connect(servers, member));
            match tokio::time::timeout(CONNECT_LIMIT, connecting).await {
                Ok(Ok(live)) => {
                    slot.live = Some(live.clone());
                    return Ok(live);
                }
                Ok(Err(failure)) => last = Some(failure),
                Err(_) => {
                    last.get_or_insert_with(|| {
                        Failure::not_sent(
                            Error::unavailable("the etcd server cannot be reached in time")
                                .with("limit", format_args!("{CONNECT_LIMIT:?}"))
                                .with("host", &member.host)
                                .with("port", member.port),
                        )
                    });
                }
            }
        }
        let last =
            last.unwrap_or_else(|| Failure::not_sent(Error::invalid("no etcd server is named")));
        slot.failed = Some(last.described());
        self.failures.fetch_add(1, Ordering::AcqRel);
        Err(last)
    }

    async fn connect(&self, servers: &Servers, member: &Member) -> Result<Live, Failure> {
        let used = AtomicBool::new(false);
        let (host, port) = (member.host.clone(), member.port);
        let connector = tower::service_fn(move |_: Uri| {
            let again = used.swap(true, Ordering::AcqRel);
            let host = host.clone();
            async move {
                if again {
                    return Err(io::Error::other(Gone));
                }
                let stream = TcpStream::connect((host.as_str(), port)).await?;
                stream.set_nodelay(true)?;
                Ok(TokioIo::new(stream))
            }
        });
        let unreachable = |error: tonic::transport::Error| {
            let message = if is_certificate(&error) {
                "the etcd server's certificate is not accepted; name its authority as ca=/path/to/ca.pem"
            } else {
                "the etcd server cannot be reached"
            };
            Failure::not_sent(
                Error::unavailable(message)
                    .with("host", &member.host)
                    .with("port", member.port)
                    .with_source(error),
            )
        };
        let channel = member.endpoint.connect_with_connector(connector).await;
        let channel = Channel::Tonic(channel.map_err(unreachable)?);
        let mut options = ConnectOptions::new()
            // A member without a leader refuses, instead of keeping requests until it has one.
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some((user, password)) = &servers.login {
            options = options.with_user(user, password);
        }
        let client = Client::from_channel(channel, Some(options)).await;
        let client = client.map_err(Failure::connecting)?;
        let live = Live {
            client,
            lost: Arc::default(),
        };
        self.greet(&live).await?;
        Ok(live)
    }

    /// Sees to it that this is the data that the store was opened on, and that it has not gone
    /// back in time.
    async fn greet(&self, live: &Live) -> Result<(), Failure> {
        if !self.identity.is_known() {
            // Only whether it is etcd that answers, and takes our login.
            let status = status(live.client.clone()).await;
            return status.map(drop).map_err(Failure::connecting);
        }
        let read = self.identity.read();
        let (status, stored) = tokio::join!(status(live.client.clone()), async {
            live.client.kv_client().txn(read).await
        });
        let status = status.map_err(Failure::connecting)?;
        let stored = stored.map_err(Failure::connecting)?;
        self.identity
            .recognise(&status, &stored)
            .map_err(Failure::not_sent)?;
        self.check_revision(stored.header())
            .map_err(Failure::not_sent)?;
        self.saw(stored.header());
        Ok(())
    }

    fn saw(&self, header: Option<&ResponseHeader>) {
        if let Some(header) = header {
            self.revision.fetch_max(header.revision(), Ordering::AcqRel);
        }
    }

    fn check_revision(&self, header: Option<&ResponseHeader>) -> Result<()> {
        check_revision(self.revision(), header)
    }
}

fn is_certificate(error: &tonic::transport::Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if error.to_string().contains("invalid peer certificate") {
            return true;
        }
        cause = error.source();
    }
    false
}

async fn status(client: Client) -> Result<StatusResponse, ClientError> {
    client.maintenance_client().status().await
}

/// Refuses an answer whose revision is below one that was known before its request was sent.
pub(super) fn check_revision(known: i64, header: Option<&ResponseHeader>) -> Result<()> {
    match header {
        Some(header) if header.revision() < known => Err(went_back()
            .with("revision", header.revision())
            .with("known", known)),
        _ => Ok(()),
    }
}

/// The error of a cluster whose revision has gone back.
pub(super) fn went_back() -> Error {
    Error::corrupt(
        "the etcd cluster was restored from a snapshot, so that tokens would be told again; restore it with --bump-revision, or raise the floors of the names, and then open it once with restored=accept",
    )
}

/// An operation that changes nothing, within its limit.
pub(super) async fn read_within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(OPERATION_LIMIT, Box::pin(work)).await {
        Ok(answer) => answer,
        Err(_) => Err(
            Error::unavailable("the etcd cluster did not answer in time")
                .with("limit", format_args!("{OPERATION_LIMIT:?}")),
        ),
    }
}

/// An operation that may change something, within its limit.
pub(super) async fn write_within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(OPERATION_LIMIT, Box::pin(work)).await {
        Ok(answer) => answer,
        Err(_) => Err(
            Error::indeterminate("the etcd cluster did not answer in time")
                .with("limit", format_args!("{OPERATION_LIMIT:?}")),
        ),
    }
}

/// True where a failure says that the lease that was used has lapsed.
pub(super) fn lease_is_gone(failure: &Failure) -> bool {
    failure.effect == Effect::LeaseGone
}
