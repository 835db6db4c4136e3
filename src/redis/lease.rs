//! The lock engine: one script and one round trip for each operation.

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::ConnectionLike;
use redis::{Client, Value};

use super::answer::{self, Failure};
use super::connect::Link;
use super::options::{RedisOptions, check_stored_realm, new_realm, token_max};
use super::record::{Info, far, state, token, trouble};
use super::scan::{BATCH, SCAN_LIMIT};
use super::script::{Acknowledged, Call, Scripted, run_all};
use super::server::{Policy, Server};
use super::url::options as parsed;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{
    AcquireRequest, Attempt, Contention, Expiry, Finding, Grant, LeaseRef, LeaseStore, LockState,
    NoWatch, Pruned, Release, Renewal, Severity, StoreProfile, TokenSource, Ttl, Watch,
};
use crate::name::LockName;
use crate::open::StoreUrl;
use crate::token::FencingToken;

/// How long an idle record stays after its last grant ended, where tokens follow the clock: far
/// longer than any clock is set back by, for after that the clock alone is the floor of tokens.
const RETAIN: Duration = Duration::from_secs(30 * 86_400);

/// How far a clock may be set back after a clean-up without a token being told twice.
const CLOCK_MARGIN: Duration = Duration::from_secs(86_400);

/// How long a waiter waits for its subscription before it goes on without: the next connection
/// subscribes it.
const SUBSCRIBE_LIMIT: Duration = Duration::from_secs(1);

macro_rules! script {
    ($file:literal) => {
        Scripted::new(concat!(
            include_str!("record.lua"),
            "\n",
            include_str!($file)
        ))
    };
}

static ACQUIRE: LazyLock<Scripted> = LazyLock::new(|| script!("acquire.lua"));
static RENEW: LazyLock<Scripted> = LazyLock::new(|| script!("renew.lua"));
static RELEASE: LazyLock<Scripted> = LazyLock::new(|| script!("release.lua"));
static INSPECT: LazyLock<Scripted> = LazyLock::new(|| script!("inspect.lua"));
static RAISE: LazyLock<Scripted> = LazyLock::new(|| script!("raise.lua"));
static PRUNE: LazyLock<Scripted> = LazyLock::new(|| script!("prune.lua"));

/// Locks in Redis or Valkey.
///
/// Clones share one connection, which is made when it is first needed, in the runtime where it is:
/// under [`Locks`](crate::Locks) that is fencelock's own.
#[derive(Clone)]
pub struct RedisStore {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) link: Link,
    pub(super) options: RedisOptions,
    profile: StoreProfile,
    /// How long an idle record stays, in milliseconds; 0 is for ever.
    retain_ms: u64,
}

impl RedisStore {
    /// Opens the locks of a server, a master behind Sentinels, or a cluster, by its URL; the
    /// options are those of [`Locks::open`](crate::Locks::open), but for `ttl`.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong; `Unavailable` where no master can be reached,
    /// or it refuses the user; `Unsupported` where it is older than 6.0, evicts any key, or cannot
    /// do what an option asks.
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_place(place).await
    }

    /// Opens locks with settings and connections of your own: see [`RedisOptions`].
    #[must_use]
    pub fn options() -> RedisOptions {
        RedisOptions::default()
    }

    /// Opens the locks of the server that a client of your own names.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_client(client: Client) -> Result<Self> {
        RedisOptions::default().open_client(client).await
    }

    /// Opens locks over a connection of your own: see [`RedisOptions::open_connection`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_connection<C>(connection: C) -> Result<Self>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        RedisOptions::default().open_connection(connection).await
    }

    pub(super) async fn start(options: RedisOptions, link: Link) -> Result<Self> {
        if options.acknowledge.is_needed() && !link.is_single() {
            return Err(Error::unsupported(
                "wait_replicas and wait_aof need a connection of the store's own to one server",
            ));
        }
        let server = Server::ask(&link).await?;
        server.check(&options)?;
        let realm = find_realm(&options, &link).await?;
        let mut profile =
            StoreProfile::new("redis", realm, server.durability(&options), Expiry::Engine);
        profile.tokens = if options.counter {
            TokenSource::Counter
        } else {
            TokenSource::Clock
        };
        profile.wakes_waiters = link.hears();
        profile.token_max = token_max();
        // A server that evicts takes keys with an expiry first, so there a record has none.
        let expires = !options.counter && server.policy == Policy::Keep;
        let retain_ms = if expires { millis(RETAIN) } else { 0 };
        // The next connection is made where the first lock is asked for: a store that was opened in
        // the user's runtime must not have its renewals wait for that.
        link.hang_up().await;
        Ok(Self {
            inner: Arc::new(Inner {
                link,
                options,
                profile,
                retain_ms,
            }),
        })
    }

    pub(super) fn key(&self, name: &LockName) -> String {
        self.inner.options.record_key(&name.encoded())
    }

    fn acquire_call(&self, request: &AcquireRequest, ttl_ms: u64) -> Call<'static> {
        let above = request.above.map(|t| t.to_string()).unwrap_or_default();
        let tokens = if self.inner.options.counter {
            "counter"
        } else {
            "clock"
        };
        ACQUIRE
            .call(self.key(&request.name))
            .arg(request.holder.reveal())
            .arg(request.name.as_str())
            .number(u64::from(request.permits))
            .number(ttl_ms)
            .arg(above)
            .arg(tokens)
            .number(self.inner.profile.token_max.get())
            .number(self.inner.retain_ms)
            .arg(Info::of(&request.info).encode())
    }

    /// A grant that too few servers confirmed does not count: it is given back.
    async fn unconfirmed(&self, request: &AcquireRequest, missing: Error) -> Error {
        let lease = LeaseRef {
            name: request.name.clone(),
            holder: request.holder,
            token: None,
        };
        match self.release(&lease, Duration::ZERO).await {
            Ok(_) => missing,
            Err(error) => missing
                .into_kind(ErrorKind::Indeterminate)
                .with_source(error),
        }
    }

    fn release_call(&self, lease: &LeaseRef, linger: Duration) -> Call<'static> {
        let linger_us = u64::try_from(linger.as_micros()).unwrap_or(u64::MAX);
        RELEASE
            .call(self.key(&lease.name))
            .arg(lease.holder.reveal())
            .arg(shown(lease.token))
            // A year at most, as a TTL.
            .number(linger_us.min(micros(Ttl::MAX)))
            .number(self.inner.retain_ms)
    }

    pub(super) fn inspect_call(&self, name: &LockName, action: &str) -> Call<'static> {
        INSPECT
            .call(self.key(name))
            .arg(action)
            .number(self.inner.retain_ms)
    }
}

#[async_trait]
impl LeaseStore for RedisStore {
    fn profile(&self) -> &StoreProfile {
        &self.inner.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        let ttl_ms = request.ttl.as_millis().ok_or_else(endless)?;
        let needed = self.inner.options.acknowledge;
        let call = self.acquire_call(request, ttl_ms);
        let Acknowledged { mut words, missing } =
            call.run_acknowledged(&self.inner.link, needed).await?;
        match words.text().as_str() {
            "granted" => {
                let token = token(&mut words)?;
                if let Some(missing) = missing {
                    return Err(self.unconfirmed(request, missing).await);
                }
                let ttl = Ttl::new(Duration::from_millis(ttl_ms))?;
                Ok(Attempt::Granted(Grant { token, ttl }))
            }
            "held" => Ok(Attempt::Held(Contention {
                free_in: Some(Duration::from_micros(words.number()?)),
                holder: Some(Info::decode(&words.text())),
            })),
            "capacity" => Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", request.permits)
            .with("capacity", words.text())),
            "far" => Err(far(&mut words, request.above)),
            other => Err(trouble(other, &mut words, &request.name)),
        }
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        let mut endless_ones = Vec::new();
        let mut calls = Vec::with_capacity(leases.len());
        for (lease, ttl) in leases {
            let ttl_ms = ttl.as_millis();
            endless_ones.push(ttl_ms.is_none());
            calls.extend(ttl_ms.map(|ttl_ms| {
                RENEW
                    .call(self.key(&lease.name))
                    .arg(lease.holder.reveal())
                    .arg(shown(lease.token))
                    .number(ttl_ms)
                    .number(self.inner.retain_ms)
            }));
        }
        let needed = self.inner.options.acknowledge;
        let answers = match calls.len() {
            0 => Vec::new(),
            _ => run_all(&self.inner.link, &calls, needed).await,
        };
        let mut answers = answers.into_iter();
        let silent = || Err(Failure::NotSent(Error::unavailable("renewal not sent")));
        leases
            .iter()
            .zip(endless_ones)
            .map(|((lease, _), is_endless)| {
                if is_endless {
                    return Renewal::Unknown(endless());
                }
                renewal(answers.next().unwrap_or_else(silent), &lease.name)
            })
            .collect()
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let call = self.release_call(lease, linger);
        let mut words = call.run(&self.inner.link).await?;
        match words.text().as_str() {
            "released" => Ok(Release::Released),
            "not_held" => Ok(Release::NotHeld),
            other => Err(trouble(other, &mut words, &lease.name)),
        }
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        let link = &self.inner.link;
        if !link.hears() {
            return Ok(Box::new(NoWatch));
        }
        let key = self.key(name);
        // Joined first: a connection that is made from now on subscribes it.
        let waiter = link.waiters.join(&key);
        match tokio::time::timeout(SUBSCRIBE_LIMIT, link.subscribe(&key)).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => {
                let error = Error::from(failure);
                tracing::debug!(%name, %error, "not subscribed yet; waiting by polling");
            }
            Err(_) => tracing::debug!(%name, "not subscribed in time; waiting by polling"),
        }
        Ok(Box::new(waiter))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let call = self.inspect_call(name, "");
        state(name, call.run(&self.inner.link).await?)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        let found = tokio::time::timeout(SCAN_LIMIT, self.find(prefix, after, limit)).await;
        found.unwrap_or_else(|_| {
            Err(Error::unavailable(
                "the server has too many keys to find the locks among them in time; give the locks a database of their own",
            )
            .with("limit", format_args!("{SCAN_LIMIT:?}")))
        })
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let call = self.inspect_call(name, "break");
        state(name, call.run(&self.inner.link).await?)
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let call = RAISE
            .call(self.key(name))
            .number(floor.get())
            .arg(name.as_str())
            .arg(if mend { "mend" } else { "" })
            .number(self.inner.profile.token_max.get())
            .number(self.inner.retain_ms);
        let needed = self.inner.options.acknowledge;
        let Acknowledged { mut words, missing } =
            call.run_acknowledged(&self.inner.link, needed).await?;
        match words.text().as_str() {
            "raised" => match missing {
                None => token(&mut words),
                Some(missing) => Err(missing.into_kind(ErrorKind::Indeterminate)),
            },
            "far" => Err(far(&mut words, Some(floor))),
            other => Err(trouble(other, &mut words, name)),
        }
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        let names = self.named(self.scan().await?).await?;
        let mut pruned = Pruned::default();
        if self.inner.options.counter {
            // Without its record a counter would begin anew.
            pruned.kept = u64::try_from(names.len()).unwrap_or(u64::MAX);
            return Ok(pruned);
        }
        for batch in names.chunks(BATCH) {
            let call = |name: &LockName| {
                PRUNE
                    .call(self.key(name))
                    .number(micros(idle))
                    .number(micros(CLOCK_MARGIN))
            };
            let calls: Vec<_> = batch.iter().map(call).collect();
            for answer in run_all(&self.inner.link, &calls, <_>::default()).await {
                match answer?.words.text().as_str() {
                    "removed" => pruned.removed += 1,
                    "none" => {}
                    // A damaged record too: an operator has to see it.
                    _ => pruned.kept += 1,
                }
            }
        }
        Ok(pruned)
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let server = Server::ask(&self.inner.link).await?;
        let mut findings = server.findings();
        findings.push(self.clock().await?);
        let tokens = if self.inner.options.counter {
            Finding::new(
                Severity::Warning,
                "tokens",
                "counted: a failover or a flush that loses the counter repeats numbers; only the binding of resources to holders keeps data safe then",
            )
        } else {
            Finding::new(
                Severity::Good,
                "tokens",
                "they follow the server's clock: a failover or a flush that loses the last one does not repeat it",
            )
        };
        findings.push(tokens);
        if server.durability(&self.inner.options) < self.inner.profile.durability {
            findings.push(Finding::new(
                Severity::Bad,
                "settings",
                "the server keeps less than when this store was opened",
            ));
        }
        Ok(findings)
    }
}

impl RedisStore {
    /// Leases and tokens follow the server's wall clock.
    async fn clock(&self) -> Result<Finding> {
        let answer = self.inner.link.command(&redis::cmd("TIME")).await?;
        let (seconds, micros): (u64, u64) = answer::parse(answer)?;
        let server_us = seconds.saturating_mul(1_000_000).saturating_add(micros);
        let off = Duration::from_micros(server_us.abs_diff(crate::clock::unix_micros()));
        let severity = if off > Duration::from_secs(60) {
            Severity::Warning
        } else {
            Severity::Good
        };
        Ok(Finding::new(
            severity,
            "clock",
            format!("the server's clock is {off:?} off this host's"),
        ))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("link", &self.inner.link)
            .field("realm", &self.inner.profile.realm)
            .field("prefix", &self.inner.options.prefix)
            .finish_non_exhaustive()
    }
}

/// The realm that the server holds, or a new one that it holds from now on.
async fn find_realm(options: &RedisOptions, link: &Link) -> Result<String> {
    if let Some(realm) = &options.realm {
        return Ok(realm.clone());
    }
    let Some(stored) = &link.realm else {
        return Ok(new_realm());
    };
    let mut plant = redis::cmd("SET");
    plant.arg(&stored.key).arg(new_realm()).arg("NX");
    // Whoever was first has it; the answer is in what is read.
    let _: Value = link.command(&plant).await?;
    let mut read = redis::cmd("GET");
    read.arg(&stored.key);
    let realm: Option<String> = answer::parse(link.command(&read).await?)?;
    let realm = realm.unwrap_or_default();
    check_stored_realm(&realm)?;
    let _ = stored.known.set(realm.clone());
    Ok(realm)
}

fn renewal(answer: Result<Acknowledged, Failure>, name: &LockName) -> Renewal {
    let Acknowledged { mut words, missing } = match answer {
        Ok(answer) => answer,
        Err(failure) => return Renewal::Unknown(failure.into()),
    };
    match words.text().as_str() {
        "renewed" => match missing {
            None => Renewal::Renewed,
            Some(missing) => Renewal::Unknown(missing.into_kind(ErrorKind::Indeterminate)),
        },
        "lost" => Renewal::Lost,
        other => Renewal::Unknown(trouble(other, &mut words, name)),
    }
}

fn endless() -> Error {
    Error::unsupported("redis cannot see dead processes, so a lock needs an expiry; give it a TTL")
}

fn shown(token: Option<FencingToken>) -> String {
    token.map(|token| token.to_string()).unwrap_or_default()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// In microseconds, at most 100 years: what a double adds to the present time exactly.
fn micros(duration: Duration) -> u64 {
    let max = 100 * 365 * 86_400 * 1_000_000;
    u64::try_from(duration.as_micros()).map_or(max, |us| us.min(max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_stay_where_doubles_are_exact() {
        assert!(micros(Duration::MAX) < 1 << 52);
        assert_eq!(micros(Duration::from_micros(5)), 5);
    }
}
