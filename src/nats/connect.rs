//! The one connection of a store, made anew at the next server when it is lost, and every step
//! bounded.
//!
//! The client would connect again by itself, and then send what it had kept meanwhile: a grant that
//! its holder gave up minutes ago. So its connections end for good when they are lost, with whatever
//! they had not sent, and the next request makes a new one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_nats::client::Request;
use async_nats::connection::State;
use async_nats::{
    Auth, AuthError, Client, ConnectOptions, Event, HeaderMap, ServerAddr, ServerError, Subscriber,
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, broadcast};

use super::failure::{ApiError, Effect, Failure};
use super::options::Login;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Tls;

/// How long it may take to connect to a server and log in, where there are three or more to try: one
/// that is dead or paused costs no more before the next. Where there are fewer, they have more time.
const CONNECT_LIMIT: Duration = Duration::from_millis(1_200);

/// How long it may take to try three.
const CONNECT_ALL_LIMIT: Duration = Duration::from_millis(3_600);

/// How long a server may take to answer one request.
const REQUEST_LIMIT: Duration = Duration::from_secs(3);

/// How long an operation may take, with all its requests.
const OPERATION_LIMIT: Duration = Duration::from_millis(8_500);

/// How many refusals are kept for requests that have not looked yet.
const REFUSALS_MAX: usize = 64;

/// Where the data is.
pub(super) enum Target {
    /// Servers, of which one is used at a time.
    Servers(Servers),
    /// A client of the user's.
    Given(Client),
}

/// The servers that a URL names, and how to log in.
pub(super) struct Servers {
    pub(super) hosts: Vec<(String, u16)>,
    pub(super) login: Option<Login>,
    pub(super) tls: Option<Tls>,
}

/// The connection of one store.
pub(super) struct Link {
    target: Target,
    slot: Mutex<Slot>,
    /// How many connections were made.
    connections: AtomicU64,
    /// How often no server could be reached.
    failures: AtomicU64,
    /// The highest sequence that was acknowledged to us.
    acknowledged: AtomicU64,
}

#[derive(Default)]
struct Slot {
    live: Option<Live>,
    /// Why there is none, where none could be made.
    failed: Option<(ErrorKind, String)>,
    /// The server to try next.
    next: usize,
}

/// A connection that was good when it was last looked at.
#[derive(Clone)]
struct Live {
    client: Client,
    /// Which of all connections this is.
    number: u64,
    lost: Arc<AtomicBool>,
    /// What the server says of requests that the user has no permission for; it answers none.
    refusals: broadcast::Sender<String>,
}

/// What is to replace the message of a sequence.
pub(super) struct Publish<'a> {
    /// The one that has to take it.
    pub(super) stream: &'a str,
    pub(super) subject: &'a str,
    /// The sequence; 0 where there is no message.
    pub(super) expected: u64,
    /// The number of the only connection that it may be sent on; elsewhere it counts as `Moved`.
    pub(super) only_on: Option<u64>,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// The answer to a publish that was to replace what was read.
pub(super) enum Swap {
    /// It is stored, with this sequence.
    Stored(u64),
    /// There was something newer, and nothing was stored.
    Moved,
}

#[derive(Deserialize)]
struct Ack {
    error: Option<ApiError>,
    #[serde(default)]
    stream: String,
    #[serde(default)]
    seq: u64,
}

#[derive(Deserialize)]
struct ApiAnswer {
    error: Option<ApiError>,
}

impl Link {
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            slot: Mutex::default(),
            connections: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
        }
    }

    /// The highest sequence that the bucket is known to have had.
    pub(super) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Acquire)
    }

    /// Forgets the connection: the next request makes a new one, in the runtime that it runs in.
    pub(super) async fn hang_up(&self) {
        self.slot.lock().await.live = None;
    }

    /// Asks the JetStream API what changes nothing.
    pub(super) async fn api<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Bytes,
    ) -> Result<T, Failure> {
        let mut left = self.servers();
        loop {
            let answer = self.api_once(subject, body).await.map_err(Failure::of_read);
            match answer {
                // A read may be repeated, however its connection ended.
                Err(failure) if left > 0 && failure.ends_connection => left -= 1,
                answer => return answer,
            }
        }
    }

    /// Asks the JetStream API, once.
    pub(super) async fn api_once<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: &Bytes,
    ) -> Result<T, Failure> {
        let answer = self.ask(subject, None, body.clone()).await?;
        let error = parsed::<ApiAnswer>(&answer)?.error;
        match error {
            Some(error) => Err(Failure::of_api(&error)),
            None => parsed(&answer),
        }
    }

    /// Publishes what is to replace the message of this sequence at the subject, 0 for none: the one
    /// step that changes anything. `stream` is the one that has to take it.
    pub(super) async fn swap(
        &self,
        stream: &str,
        subject: &str,
        expected: u64,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Swap, Failure> {
        let publish = Publish {
            stream,
            subject,
            expected,
            only_on: None,
            headers,
            body,
        };
        self.swap_on(publish).await.map(|(swap, _)| swap)
    }

    /// The same, and the number of the connection that it was done on.
    pub(super) async fn swap_on(&self, publish: Publish<'_>) -> Result<(Swap, u64), Failure> {
        let Publish {
            stream,
            subject,
            expected,
            only_on,
            mut headers,
            body,
        } = publish;
        headers.insert("Nats-Expected-Stream", stream);
        headers.insert(
            "Nats-Expected-Last-Subject-Sequence",
            expected.to_string().as_str(),
        );
        let mut left = self.servers();
        let (answer, on) = loop {
            let live = self.live().await?;
            if only_on.is_some_and(|number| number != live.number) {
                return Ok((Swap::Moved, live.number));
            }
            let asked = ask(&live, subject, Some(headers.clone()), body.clone());
            match asked.await {
                Err(failure) if left > 0 && failure.effect == Effect::NotSent => left -= 1,
                answer => break (answer?, live.number),
            }
        };
        let ack: Ack = parsed(&answer)?;
        if let Some(error) = &ack.error {
            let failure = Failure::of_api(error);
            return if failure.is_moved() {
                Ok((Swap::Moved, on))
            } else {
                Err(failure)
            };
        }
        if ack.stream != stream || ack.seq <= expected {
            return Err(unexpected());
        }
        self.acknowledged.fetch_max(ack.seq, Ordering::AcqRel);
        Ok((Swap::Stored(ack.seq), on))
    }

    /// Tells whoever listens. A hint: nothing says whether it arrives.
    pub(super) async fn tell(&self, subject: String) {
        if let Ok(live) = self.live().await {
            // The client's queue is full only where the connection is stuck.
            let told = live.client.publish(subject, Bytes::new());
            let _ = tokio::time::timeout(CONNECT_LIMIT, told).await;
        }
    }

    /// What is published at a subject from now on; it ends with the connection.
    pub(super) async fn listen(&self, subject: &str) -> Result<Subscriber, Failure> {
        let live = self.live().await?;
        let subscribed = live.client.subscribe(subject.to_owned()).await;
        let subscribed = subscribed.map_err(|_| Failure::broken())?;
        // A server confirms no subscription, but works off what it is sent in order: once it has
        // said that nobody listens here, somebody listens there.
        match self
            .ask(&format!("{subject}.nobody"), None, Bytes::new())
            .await
        {
            Err(failure) if failure.effect != Effect::Refused => Err(failure),
            _ => Ok(subscribed),
        }
    }

    /// The server that we are connected to, and the largest message that it takes, in bytes.
    pub(super) async fn greeting(&self) -> Result<(async_nats::ServerInfo, usize), Failure> {
        let live = self.live().await?;
        Ok((live.client.server_info(), live.client.max_payload()))
    }

    /// How many servers there are to try.
    fn servers(&self) -> usize {
        match &self.target {
            Target::Servers(servers) => servers.hosts.len(),
            Target::Given(_) => 1,
        }
    }

    /// One request on the present connection.
    async fn ask(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
    ) -> Result<Bytes, Failure> {
        ask(&self.live().await?, subject, headers, body).await
    }

    /// The connection, made where there is none. Nothing was sent where this fails.
    async fn live(&self) -> Result<Live, Failure> {
        let servers = match &self.target {
            Target::Servers(servers) => servers,
            Target::Given(client) => return given(client),
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
        for _ in 0..servers.hosts.len() {
            let at = slot.next % servers.hosts.len();
            slot.next = at + 1;
            let Some((host, port)) = servers.hosts.get(at) else {
                continue;
            };
            let limit = servers.connect_limit();
            let number = self.connections.fetch_add(1, Ordering::AcqRel);
            let connecting = Box::pin(servers.connect(host, *port, limit, number));
            match tokio::time::timeout(limit, connecting).await {
                Ok(Ok(live)) => {
                    slot.live = Some(live.clone());
                    return Ok(live);
                }
                Ok(Err(failure)) => last = Some(failure),
                Err(_) => {
                    last.get_or_insert_with(|| {
                        Failure::not_sent(
                            Error::unavailable("the NATS server cannot be reached in time")
                                .with("limit", format_args!("{limit:?}"))
                                .with("host", host)
                                .with("port", port),
                        )
                    });
                }
            }
        }
        let last =
            last.unwrap_or_else(|| Failure::not_sent(Error::invalid("no NATS server is named")));
        slot.failed = Some(last.described());
        self.failures.fetch_add(1, Ordering::AcqRel);
        Err(last)
    }
}

/// One request on a connection.
async fn ask(
    live: &Live,
    subject: &str,
    headers: Option<HeaderMap>,
    body: Bytes,
) -> Result<Bytes, Failure> {
    let mut refusals = live.refusals.subscribe();
    let mut request = Request::new().payload(body).timeout(None);
    if let Some(headers) = headers {
        request = request.headers(headers);
    }
    let asked = Box::pin(live.client.send_request(subject.to_owned(), request));
    let answer = tokio::select! {
        answer = tokio::time::timeout(REQUEST_LIMIT, asked) => match answer {
            Ok(Ok(message)) => Ok(message.payload),
            Ok(Err(error)) => Err(Failure::asking(error)),
            Err(_) => Err(Failure::silent(REQUEST_LIMIT)),
        },
        text = refusal(&mut refusals, subject) => Err(Failure::forbidden(&text)),
    };
    if let Err(failure) = &answer
        && failure.ends_connection
    {
        live.lost.store(true, Ordering::Release);
    }
    answer
}

/// A client of the user's, where it is connected: it would keep what is sent until it is.
fn given(client: &Client) -> Result<Live, Failure> {
    if client.connection_state() != State::Connected {
        return Err(Failure::not_sent(Error::unavailable(
            "the NATS client is not connected now",
        )));
    }
    let (refusals, _) = broadcast::channel(1);
    Ok(Live {
        client: client.clone(),
        // It connects again by itself, and counts.
        number: client.statistics().connects.load(Ordering::Acquire),
        lost: Arc::default(),
        refusals,
    })
}

impl Servers {
    fn connect_limit(&self) -> Duration {
        let hosts = u32::try_from(self.hosts.len()).unwrap_or(u32::MAX).max(1);
        (CONNECT_ALL_LIMIT / hosts).max(CONNECT_LIMIT)
    }

    async fn connect(
        &self,
        host: &str,
        port: u16,
        limit: Duration,
        number: u64,
    ) -> Result<Live, Failure> {
        // A server may ask for TLS that we did not. Without a choice of the program's own, rustls
        // panics where two providers are built in.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let lost = Arc::new(AtomicBool::new(false));
        let (refusals, _) = broadcast::channel(REFUSALS_MAX);
        let auth = self.auth();
        let used = AtomicBool::new(false);
        // Asked once for each connection: with no answer to the second, and no third, the client
        // ends.
        let options = ConnectOptions::with_auth_callback(move |_| {
            let again = used.swap(true, Ordering::AcqRel);
            let auth = auth.clone();
            async move {
                if again {
                    return Err(AuthError::new(
                        "a lost connection is not made again, but replaced by a new one",
                    ));
                }
                Ok(auth)
            }
        });
        let (heard_lost, heard) = (Arc::clone(&lost), refusals.clone());
        let mut options = options
            .name("fencelock")
            .max_reconnects(1)
            .ignore_discovered_servers()
            .connection_timeout(limit)
            .ping_interval(Duration::from_secs(10))
            .event_callback(move |event| {
                match event {
                    Event::Disconnected | Event::Closed => {
                        heard_lost.store(true, Ordering::Release);
                    }
                    Event::ServerError(ServerError::Other(text)) => {
                        // Nobody waits for it where nothing is asked.
                        let _ = heard.send(text);
                    }
                    _ => {}
                }
                std::future::ready(())
            });
        if let Some(tls) = &self.tls {
            options = options.require_tls(true);
            if let Some(authority) = &tls.authority {
                options = options.add_root_certificates(authority.clone());
            }
            if let Some((certificate, key)) = &tls.client {
                options = options.add_client_certificate(certificate.clone(), key.clone());
            }
        }
        let shown = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let address: ServerAddr = format!("nats://{shown}:{port}").parse().map_err(|e| {
            Failure::not_sent(
                Error::invalid("not a host; expected host or host:port")
                    .with("host", format_args!("{host:?}"))
                    .with_source(e),
            )
        })?;
        let client = options.connect(address).await;
        let client = client.map_err(|error| Failure::connecting(error, host, port))?;
        Ok(Live {
            client,
            number,
            lost,
            refusals,
        })
    }

    fn auth(&self) -> Auth {
        let mut auth = Auth::new();
        match &self.login {
            None => {}
            Some(Login::User(user, password)) => {
                auth.username = Some(user.clone());
                auth.password = Some(password.clone());
            }
            Some(Login::Token(token)) => auth.token = Some(token.clone()),
        }
        auth
    }
}

/// What the server says of a request that it does not answer for want of a permission.
async fn refusal(refusals: &mut broadcast::Receiver<String>, subject: &str) -> String {
    let quoted = format!("\"{subject}\"");
    loop {
        match refusals.recv().await {
            Ok(text) if text.contains(&quoted) || text.contains("Subscription to \"_INBOX.") => {
                return text;
            }
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

fn parsed<T: DeserializeOwned>(answer: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(answer).map_err(|_| unexpected())
}

fn unexpected() -> Failure {
    Failure::broken()
}

/// Answers in order, as many as there are within an operation's limit.
pub(super) async fn collect_within<T>(answers: impl Stream<Item = T>) -> Vec<T> {
    let mut answers = std::pin::pin!(answers);
    let mut limit = std::pin::pin!(tokio::time::sleep(OPERATION_LIMIT));
    let mut all = Vec::new();
    loop {
        tokio::select! {
            biased;
            answer = answers.next() => match answer {
                Some(answer) => all.push(answer),
                None => return all,
            },
            () = &mut limit => return all,
        }
    }
}

/// The error of an operation that did not end in time, and may have changed something.
pub(super) fn overdue() -> Error {
    Error::indeterminate("the NATS servers did not answer in time")
        .with("limit", format_args!("{OPERATION_LIMIT:?}"))
}

/// An operation that changes nothing, within its limit.
pub(super) async fn read_within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(OPERATION_LIMIT, Box::pin(work)).await {
        Ok(answer) => answer,
        Err(_) => Err(
            Error::unavailable("the NATS servers did not answer in time")
                .with("limit", format_args!("{OPERATION_LIMIT:?}")),
        ),
    }
}

/// An operation that may change something, within its limit.
pub(super) async fn write_within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(OPERATION_LIMIT, Box::pin(work)).await {
        Ok(answer) => answer,
        Err(_) => Err(overdue()),
    }
}
