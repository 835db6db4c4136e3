//! Fenced values: a plain key each, whose watermark lives beside it in the same slot. Check and
//! write are one script (S2).

use std::fmt;
use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use redis::{RedisError, Value};

use super::connect::Link;
use super::options::RedisOptions;
use super::script::{Acknowledge, Acknowledged, Call, Scripted};
use super::server::Server;
use super::url::options as parsed;
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::open::StoreUrl;
use crate::token::{FencingToken, Intent, Watermark, judge};

/// The largest value that a [`FencedRedis`] takes: 64 MiB, what a server can be sent within the
/// time limit of a request.
pub const VALUE_MAX_BYTES: u64 = 64 << 20;

/// What the key of a watermark ends with. No resource may be named so.
const WATERMARK: &str = ":fencelock";

/// The same for a resource that has a hash tag of its own: the two kinds must not meet.
const WATERMARK_TAGGED: &str = ":fencelock:tagged";

/// A fragment of Lua that refuses a stale write before the rest of a script of your own runs, in
/// the same atomic step.
///
/// Put it before your script. `KEYS[1]` is the watermark's key ([`fence_key`]), `ARGV[1]` the fence
/// as text; your own keys and arguments follow from 2 on, and in a cluster all keys share a slot.
/// A refusal is an error reply that [`refusal`] understands; a write that was applied before
/// answers the status `REPEATED`.
///
/// ```no_run
/// use fencelock::redis::client::{Client, Script};
/// use fencelock::redis::{GUARD_LUA, fence_key, refusal};
/// use fencelock::{LockGuard, ResourceName};
///
/// # async fn example(guard: &LockGuard, client: Client) -> Result<(), Box<dyn std::error::Error>> {
/// let script = Script::new(&format!("{GUARD_LUA}\nreturn redis.call('INCRBY', KEYS[2], ARGV[2])"));
/// let resource = ResourceName::new("balance")?;
/// let mut connection = client.get_multiplexed_async_connection().await?;
/// let balance: Result<i64, _> = script
///     .key(fence_key(&resource))
///     .key("balance")
///     .arg(guard.fence().to_string())
///     .arg(5)
///     .invoke_async(&mut connection)
///     .await;
/// if let Err(error) = &balance && let Some(refused) = refusal(error) {
///     println!("somebody newer holds the lock: {refused}");
/// }
/// # Ok(()) }
/// ```
pub const GUARD_LUA: &str = concat!(include_str!("judge.lua"), "\n", include_str!("guard.lua"));

static PUT: LazyLock<Scripted> = LazyLock::new(|| {
    Scripted::new(concat!(
        include_str!("judge.lua"),
        "\n",
        include_str!("put.lua")
    ))
});
static READ: LazyLock<Scripted> = LazyLock::new(|| {
    Scripted::new(concat!(
        include_str!("judge.lua"),
        "\n",
        include_str!("read.lua")
    ))
});

/// Fenced values in Redis or Valkey.
///
/// A resource's name is the key of its value, which anyone may read. Its watermark is a hash beside
/// it ([`fence_key`]) that must not be deleted: a resource without one takes any token. Clones share
/// one connection.
#[derive(Clone)]
pub struct FencedRedis {
    inner: Arc<Inner>,
}

struct Inner {
    link: Link,
    acknowledge: Acknowledge,
    allow_eviction: bool,
}

/// What a script says of a resource.
struct Told {
    verdict: String,
    watermark: Option<Watermark>,
    now_us: u64,
    writer: Option<FencingToken>,
    value: Option<Vec<u8>>,
}

impl FencedRedis {
    /// Opens fenced values by a URL as [`RedisStore::open`](super::RedisStore::open) takes it, with
    /// the options that concern the connection.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong, `Unavailable` where no master can be reached,
    /// `Unsupported` where the server may evict watermarks.
    pub async fn open(url: &str) -> Result<Self> {
        Self::open_url(StoreUrl::parse(url)?).await
    }

    pub(crate) async fn open_url(mut url: StoreUrl) -> Result<Self> {
        for option in ["prefix", "realm", "tokens"] {
            if url.take(option).is_some() {
                return Err(Error::invalid(
                    "the option is for locks; a fenced value has none such",
                )
                .with("option", option));
            }
        }
        let (options, place) = parsed(url)?;
        options.open_fenced_place(place).await
    }

    pub(super) async fn start(options: &RedisOptions, link: Link) -> Result<Self> {
        if options.acknowledge.is_needed() && !link.is_single() {
            return Err(Error::unsupported(
                "wait_replicas and wait_aof need a connection of the storage's own to one server",
            ));
        }
        Server::ask(&link).await?.check(options)?;
        // As with locks: the next connection is made in the runtime that uses it.
        link.hang_up().await;
        Ok(Self {
            inner: Arc::new(Inner {
                link,
                acknowledge: options.acknowledge,
                allow_eviction: options.allow_eviction,
            }),
        })
    }

    fn call(&self, script: &'static Scripted, resource: &ResourceName) -> Result<Call<'static>> {
        let name = resource.as_str();
        if name.ends_with(WATERMARK) || name.ends_with(WATERMARK_TAGGED) {
            return Err(
                Error::invalid("resource name is reserved for watermarks; choose another")
                    .with("resource", resource),
            );
        }
        if !self.inner.link.is_single() && !shares_slot(name) {
            return Err(Error::unsupported(
                "resource name has braces that are no hash tag, so its watermark may be in another slot of a cluster; choose another",
            )
            .with("resource", resource));
        }
        Ok(script.call(fence_key(resource)).key(name))
    }

    async fn run(&self, call: &Call<'_>, resource: &ResourceName) -> Result<(Told, Option<Error>)> {
        let link = &self.inner.link;
        let Acknowledged { words, missing } =
            call.run_acknowledged(link, self.inner.acknowledge).await?;
        let told = Told::read(words.into_values()).map_err(|what| damaged(&what, resource))?;
        Ok((told, missing))
    }

    async fn write(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        action: &str,
        bytes: &[u8],
    ) -> Result<Written> {
        let call = self
            .call(&PUT, resource)?
            .arg(fence.to_string())
            .arg(action)
            .arg(bytes);
        let (told, missing) = self.run(&call, resource).await?;
        let repeated = told.verdict == "repeated";
        let watermark = told.admitted(fence, Intent::Write, missing)?;
        Ok(if repeated {
            Written::repeated(watermark)
        } else {
            Written::applied(watermark)
        })
    }

    async fn read(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        action: &str,
    ) -> Result<(Told, Option<Error>)> {
        let call = self
            .call(&READ, resource)?
            .arg(fence.to_string())
            .arg(action);
        self.run(&call, resource).await
    }
}

#[async_trait]
impl FencedStore for FencedRedis {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before the section: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            blocking::unblock(move || body.into_bytes(VALUE_MAX_BYTES)).await?
        };
        self.write(resource, fence, "put", &bytes).await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let call = self.call(&READ, resource)?.arg("").arg("get");
        let link = &self.inner.link;
        let words = call.run(link).await?;
        let told = Told::read(words.into_values()).map_err(|what| damaged(&what, resource))?;
        Ok(told.snapshot())
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let (told, missing) = self.read(resource, fence, "raise").await?;
        told.check(fence, Intent::Raise, missing)?;
        Ok(told.snapshot())
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.write(resource, fence, "delete", &[]).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let (told, missing) = self.read(resource, fence, "rebind").await?;
        told.admitted(fence, Intent::Rebind, missing)
            .map(Written::applied)
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let server = Server::ask(&self.inner.link).await?;
        let mut findings = server.findings();
        if self.inner.allow_eviction {
            findings.push(Finding::new(
                crate::lease::Severity::Bad,
                "watermarks",
                "eviction was allowed: a resource whose watermark is evicted takes any token",
            ));
        }
        Ok(findings)
    }
}

impl Told {
    /// The words of a script's answer, or what is damaged.
    fn read(values: Vec<Value>) -> std::result::Result<Self, String> {
        let mut words = values.into_iter().map(|value| match value {
            Value::BulkString(bytes) => Some(bytes),
            Value::SimpleString(text) => Some(text.into_bytes()),
            _ => None,
        });
        let mut text = || {
            let bytes = words.next().flatten().unwrap_or_default();
            String::from_utf8(bytes).unwrap_or_default()
        };
        let verdict = text();
        if !matches!(verdict.as_str(), "applied" | "repeated" | "refused") {
            return Err(text());
        }
        let (token, holder, seq, domain) = (text(), text(), text(), text());
        let (now_us, writer) = (text(), text());
        let known = |part: &str| !part.is_empty();
        let bad = |what: &str| format!("its {what} is illegible");
        let watermark = match known(&token) {
            false => None,
            true => Some(Watermark {
                token: token.parse().map_err(|_| bad("token"))?,
                holder: known(&holder)
                    .then(|| holder.parse())
                    .transpose()
                    .map_err(|_| bad("holder"))?,
                seq: seq.parse().map_err(|_| bad("sequence"))?,
                domain: known(&domain)
                    .then(|| domain.parse())
                    .transpose()
                    .map_err(|_| bad("domain"))?,
            }),
        };
        Ok(Self {
            verdict,
            watermark,
            now_us: now_us.parse().map_err(|_| bad("time"))?,
            writer: writer.parse().ok(),
            value: words.next().flatten(),
        })
    }

    /// The refusal of a fence that was refused, in the words of the one rule.
    fn check(&self, fence: &Fence, intent: Intent, missing: Option<Error>) -> Result<()> {
        if self.verdict == "refused" {
            let said = judge(self.watermark.as_ref(), fence, intent, self.now_us);
            return Err(said.err().unwrap_or_else(|| {
                Error::corrupt("the script refused what the rule admits; is the server's script this version's?")
            }));
        }
        match missing {
            None => Ok(()),
            // It was applied, and may be lost with this server.
            Some(error) => Err(error.into_kind(ErrorKind::Indeterminate)),
        }
    }

    fn admitted(self, fence: &Fence, intent: Intent, missing: Option<Error>) -> Result<Watermark> {
        self.check(fence, intent, missing)?;
        self.watermark
            .ok_or_else(|| Error::corrupt("the script admitted a fence and kept no watermark"))
    }

    fn snapshot(self) -> Snapshot {
        let writer = self.value.as_ref().and(self.writer);
        Snapshot::new(self.value.map(Body::from), self.watermark, writer)
    }
}

impl fmt::Debug for FencedRedis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedRedis")
            .field("link", &self.inner.link)
            .finish_non_exhaustive()
    }
}

fn damaged(what: &str, resource: &ResourceName) -> Error {
    Error::corrupt(format!(
        "the resource on the redis server is damaged: {what}; mend it by hand, with a watermark that no token is above"
    ))
    .with("resource", resource)
}

/// The key of a resource's watermark: in the slot of its value, whatever braces the name has.
///
/// `{balance}:fencelock` for `balance`; a name with a hash tag of its own keeps it.
#[must_use]
pub fn fence_key(resource: &ResourceName) -> String {
    let name = resource.as_str();
    match tag(name) {
        Some(_) => format!("{name}{WATERMARK_TAGGED}"),
        None => format!("{{{name}}}{WATERMARK}"),
    }
}

/// What an error reply of a script that begins with [`GUARD_LUA`] means; `None` where it is not one
/// of its refusals.
#[must_use]
pub fn refusal(error: &RedisError) -> Option<Error> {
    let detail = error.detail().unwrap_or_default();
    let number = |key: &str| {
        let (_, rest) = detail.split_once(key)?;
        let digits = rest.split_whitespace().next()?;
        digits.parse::<FencingToken>().ok()
    };
    let (token, watermark) = (number("token="), number("watermark="));
    let message = "the fence was refused by the guarded script";
    match (error.code()?, token, watermark) {
        ("FENCED", Some(token), Some(watermark)) => Some(
            Error::fenced(token, watermark, message)
                .with("token", token)
                .with("watermark", watermark),
        ),
        ("DOMAINMISMATCH", ..) => Some(Error::new(
            ErrorKind::DomainMismatch,
            "the resource is bound to another lock; use that lock, or rebind the resource",
        )),
        ("INVALID", ..) => Some(Error::invalid(message).with("detail", detail)),
        ("CORRUPT", ..) => Some(Error::corrupt("the resource's watermark is damaged")),
        _ => None,
    }
}

/// What a cluster hashes of a key that has braces: what stands between the first `{` and the next
/// `}`, where that is not nothing.
fn tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// True where the watermark of this name is in its value's slot.
fn shares_slot(name: &str) -> bool {
    tag(name).is_some() || !name.contains('}')
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> String {
        fence_key(&name.parse().unwrap())
    }

    #[test]
    fn a_watermark_is_in_its_values_slot() {
        for name in ["a", "a:b", "{user}:1", "x{y}z{w}", "{", "a{b", "{{a}"] {
            let hashed = tag(name).unwrap_or(name);
            assert!(shares_slot(name), "{name}");
            assert_eq!(tag(&key(name)), Some(hashed), "{name}");
        }
        for name in ["}", "a}b", "{}a"] {
            assert!(!shares_slot(name), "{name}");
        }
    }

    #[test]
    fn no_two_resources_share_a_watermark() {
        let names = ["a", "{a}", "{a}:fencelock:x", "{{a}}", "a}", "{a", "{}a"];
        let mut keys: Vec<String> = names.map(key).into();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), names.len());
    }
}
