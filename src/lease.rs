//! What a lock backend implements ([`LeaseStore`]), and the values that pass through it.
//!
//! A backend keeps one record per name: the last token, the capacity, and the holders. Each method
//! is one atomic step at the engine. All comfort (waiting, renewal, retries, cancellation) is
//! written once, above this trait.

use std::any::Any;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::fence::{HolderTag, hex, unhex};
use crate::name::LockName;
use crate::random;
use crate::token::FencingToken;

/// The most permits of one lock.
pub const PERMITS_MAX: u32 = 1_000;

/// The longest label, host or trace id, in bytes.
pub const INFO_TEXT_MAX_BYTES: usize = 256;

/// How long a grant lasts without renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ttl(Option<Duration>);

impl Ttl {
    /// The shortest lease: 100 ms.
    pub const MIN: Duration = Duration::from_millis(100);
    /// The longest lease: a year of 365 days.
    pub const MAX: Duration = Duration::from_secs(365 * 86_400);
    /// 30 s, what a lease lasts where nothing is said.
    pub const DEFAULT: Self = Self(Some(Duration::from_secs(30)));
    /// No expiry: the grant lasts while the holder's process lives. Only for backends that can see
    /// that (the file store).
    pub const NONE: Self = Self(None);

    /// Validates a duration.
    ///
    /// # Errors
    /// `Invalid` below [`Ttl::MIN`] or above [`Ttl::MAX`].
    pub fn new(duration: Duration) -> Result<Self> {
        if duration < Self::MIN || duration > Self::MAX {
            return Err(
                Error::invalid("TTL is out of range; expected 100 ms to 365 days")
                    .with("ttl", format_args!("{duration:?}")),
            );
        }
        Ok(Self(Some(duration)))
    }

    /// The duration; `None` for [`Ttl::NONE`].
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        self.0
    }

    /// The duration in whole milliseconds, rounded up; `None` for [`Ttl::NONE`].
    #[must_use]
    pub fn as_millis(self) -> Option<u64> {
        self.0
            .map(|d| u64::try_from(d.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX))
    }
}

impl Default for Ttl {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// 128 random bits that stand for one acquire.
///
/// Drawn before the first request is sent, and at once the secret that renew and release show and
/// the key by which a retried request finds its own grant (L7). `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HolderId([u8; 16]);

impl HolderId {
    /// A new id.
    #[must_use]
    pub fn random() -> Self {
        Self(random::id())
    }

    /// An id from its bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// The secret as 32 hexadecimal digits: for the store and for whoever renews or releases from
    /// another process, never for a log.
    #[must_use]
    pub fn reveal(&self) -> String {
        hex(&self.0)
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HolderId(…)")
    }
}

impl FromStr for HolderId {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        unhex(s)
            .map(Self)
            .ok_or_else(|| Error::invalid("not a holder id; expected 32 hexadecimal digits"))
    }
}

/// What people see of a holder. It decides nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The holder's host name.
    pub host: String,
    /// The holder's process id, in its own namespace.
    pub pid: u32,
    /// What the holder calls its work.
    pub label: Option<String>,
    /// When the holder asked, by its own wall clock: microseconds since the Unix epoch.
    pub since_unix_us: u64,
    /// The trace that the holder's work belongs to.
    pub trace_id: Option<String>,
}

/// Cuts a text for people to [`INFO_TEXT_MAX_BYTES`], at a character's end.
pub(crate) fn truncate(text: &mut String) {
    let mut end = text.len().min(INFO_TEXT_MAX_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

/// One acquire, as a backend sees it. A retry is the same request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// The lock.
    pub name: LockName,
    /// Who asks; one id for each acquire.
    pub holder: HolderId,
    /// How long the grant lasts.
    pub ttl: Ttl,
    /// The capacity: how many may hold the lock at once, 1 to [`PERMITS_MAX`].
    pub permits: u32,
    /// True where the grant outlives the asking process, until its TTL: a backend that watches
    /// processes must not tie it to this one.
    pub detached: bool,
    /// The new token has to be larger than this one: a watermark that a holder of this name met
    /// (L10).
    pub above: Option<FencingToken>,
    /// For people.
    pub info: LeaseInfo,
}

impl AcquireRequest {
    /// A request for an exclusive lock by a new holder.
    #[must_use]
    pub fn new(name: LockName, ttl: Ttl) -> Self {
        Self {
            name,
            holder: HolderId::random(),
            ttl,
            permits: 1,
            detached: false,
            above: None,
            info: LeaseInfo::default(),
        }
    }

    /// Checks the capacity: what every engine does first.
    ///
    /// # Errors
    /// `Invalid` where it is not 1 to [`PERMITS_MAX`].
    pub fn check_permits(&self) -> Result<()> {
        if (1..=PERMITS_MAX).contains(&self.permits) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "permits are out of range; expected 1 to {PERMITS_MAX}"
        ))
        .with("permits", self.permits))
    }
}

/// The answer to an acquire. Contention is a value, not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The lock is ours.
    Granted(Grant),
    /// Others hold all permits.
    Held(Contention),
}

/// A grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The token, minted in the step that granted the lock (L8).
    pub token: FencingToken,
    /// The TTL that the engine really gave, where it rounds up.
    pub ttl: Ttl,
}

/// Why an acquire was not granted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contention {
    /// When the first permit lapses unless it is renewed; `None` where that cannot be known.
    pub free_in: Option<Duration>,
    /// One of the holders, for messages.
    pub holder: Option<LeaseInfo>,
}

/// A grant, as renew and release name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRef {
    /// The lock.
    pub name: LockName,
    /// The holder's secret.
    pub holder: HolderId,
    /// The token. `None` names whatever grant this holder has, for the clean-up after an acquire
    /// whose answer was lost.
    pub token: Option<FencingToken>,
}

/// The four answers to a renewal.
#[derive(Debug)]
pub enum Renewal {
    /// The lease now lasts a whole TTL from its request on.
    Renewed,
    /// The lease is ours and does not expire, so there was nothing to extend.
    StillHeld,
    /// The lease is not ours any more: lapsed, released, broken or lost with the store's data.
    Lost,
    /// We cannot know; the old expiry stands.
    Unknown(Error),
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Our grant was there, and is gone (or ends with its linger time).
    Released,
    /// There was no such grant: it had lapsed, or was released or broken before.
    NotHeld,
}

/// A lock as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockState {
    /// The lock.
    pub name: LockName,
    /// The capacity of the present or last grants; `None` where none is known.
    pub capacity: Option<u32>,
    /// The last token; `None` where none was minted.
    pub last_token: Option<FencingToken>,
    /// Those whose grants are good now. Never the holder ids.
    pub holders: Vec<HolderState>,
    /// Why the record cannot be read, for people; nothing else is known of the lock then. `None`
    /// where the record is sound. Only a [`list`](LeaseStore::list) answers so.
    pub damage: Option<String>,
}

impl LockState {
    /// For backends: a lock that nobody holds.
    #[must_use]
    pub fn new(name: LockName, last_token: Option<FencingToken>) -> Self {
        Self {
            name,
            capacity: None,
            last_token,
            holders: Vec::new(),
            damage: None,
        }
    }
}

/// One holder as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderState {
    /// Its token.
    pub token: FencingToken,
    /// Its public tag, to compare with a fence.
    pub tag: HolderTag,
    /// How long each renewal lasts.
    pub ttl: Ttl,
    /// When its grant lapses unless it is renewed; `None` for [`Ttl::NONE`].
    pub expires_in: Option<Duration>,
    /// For people.
    pub info: LeaseInfo,
}

/// What a clean-up of idle records did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Records that were removed. Their names' next tokens are still larger than all before.
    pub removed: u64,
    /// Records that were kept: held, or used within the idle time.
    pub kept: u64,
}

/// How bad a [`Finding`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Good,
    /// Works, with a risk that the operator should know.
    Warning,
    /// Promises are broken, or will be.
    Bad,
}

/// One thing that a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at, in a word or two.
    pub subject: &'static str,
    /// What was found, and what to do about it.
    pub detail: String,
}

impl Finding {
    /// A finding.
    #[must_use]
    pub fn new(severity: Severity, subject: &'static str, detail: impl Into<String>) -> Self {
        Self {
            severity,
            subject,
            detail: detail.into(),
        }
    }
}

impl Finding {
    /// What failed, with its causes, as a bad finding.
    #[must_use]
    pub fn bad(subject: &'static str, error: &Error) -> Self {
        use std::fmt::Write as _;
        let mut detail = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            // Writing into a String cannot fail.
            let _ = write!(detail, ": {error}");
            cause = error.source();
        }
        Self::new(Severity::Bad, subject, detail)
    }
}

/// The fault after which a told token is still never told again (L8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// None: the state lives in one process's memory. The next life is another realm.
    D0Memory,
    /// A crash of any process.
    D1ProcessCrash,
    /// Power loss.
    D2PowerLoss,
    /// The loss of a server, with fail-over to another.
    D3Failover,
}

/// Where tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The last token plus one, except after a loss or a skip.
    Counter,
    /// The engine's clock in microseconds, or the last token plus one where that is larger.
    Clock,
    /// A number that the engine counts for all its writes.
    Revision,
}

/// How a lease's end is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// By the engine's clock.
    Engine,
    /// By the host's suspend-aware clock, which all clients share.
    Host,
    /// By each waiter, for which the record has to stay unchanged for a whole TTL.
    Observation,
}

/// What a backend is and promises.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreProfile {
    /// The engine: one lowercase word.
    pub kind: &'static str,
    /// The identity of the store's data: lowercase letters, digits, `-`, `_`, `=`.
    pub realm: String,
    /// What a told token survives.
    pub durability: Durability,
    /// Where tokens come from.
    pub tokens: TokenSource,
    /// How a lease's end is decided.
    pub expiry: Expiry,
    /// True where [`LeaseStore::watch`] is told of changes by the engine.
    pub wakes_waiters: bool,
    /// True where a dead holder's process is noticed before its TTL, and [`Ttl::NONE`] is taken.
    pub sees_dead_holders: bool,
    /// The shortest TTL that is really given; a shorter one is rounded up to it.
    pub ttl_min: Duration,
    /// The ceiling of tokens (L9).
    pub token_max: FencingToken,
}

impl StoreProfile {
    /// A profile with the common values: a counter, no notifications, any TTL, tokens to
    /// `i64::MAX`.
    #[must_use]
    pub fn new(
        kind: &'static str,
        realm: impl Into<String>,
        durability: Durability,
        expiry: Expiry,
    ) -> Self {
        Self {
            kind,
            realm: realm.into(),
            durability,
            tokens: TokenSource::Counter,
            expiry,
            wakes_waiters: false,
            sees_dead_holders: false,
            ttl_min: Ttl::MIN,
            token_max: FencingToken::MAX,
        }
    }
}

/// Hints that a lock may have become free. Only an acquire grants.
#[async_trait]
pub trait Watch: Send {
    /// Resolves when something about the lock may have changed since the last call, or since the
    /// watch was made; never resolves where the engine has no notifications. Early and spurious
    /// answers are fine.
    ///
    /// Cancel safe: a change that comes while no call waits is reported to the next call.
    async fn changed(&mut self);
}

/// A [`Watch`] that never hears of anything: waiting falls back to polling.
#[derive(Debug)]
pub struct NoWatch;

#[async_trait]
impl Watch for NoWatch {
    async fn changed(&mut self) {
        std::future::pending::<()>().await;
    }
}

/// What a lock backend implements. Users hold it as [`Locks`](crate::Locks).
///
/// Rules for all methods, which the conformance cases check:
/// - A grant, a renewal and a release are each one atomic step at the engine; the token is minted
///   in the step that grants (L8).
/// - An engine that cannot be asked is `Unavailable` where nothing was applied, `Indeterminate`
///   where something may have been; every method ends within the backend's own time limit.
/// - Futures may be polled on any thread, inside the context of fencelock's own tokio runtime.
/// - Contention is a value. A lapsed grant is never revived (L5).
///
/// A `dyn LeaseStore` can be taken for the store that it is, through [`Any`].
#[async_trait]
pub trait LeaseStore: Any + Send + Sync + fmt::Debug {
    /// What this backend is and promises.
    fn profile(&self) -> &StoreProfile;

    /// Grants a permit with a new, larger token, or says who holds it. The same holder id, shown
    /// again while its grant is good, gets the same grant with the same token and a whole TTL (L7).
    /// Another capacity than the record's is `Invalid` while somebody holds the lock.
    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt>;

    /// Extends each lease by `ttl` from now, where it is still good and still its holder's. One
    /// answer for each lease, in order.
    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal>;

    /// Gives a grant up. Where `linger` is not zero, the grant stays for that long, no longer tied
    /// to its process, and then lapses.
    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release>;

    /// A source of hints for waiters on `name`. Made before the attempt that it backs up.
    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>>;

    /// The present state; `None` where the name has no record.
    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>>;

    /// The states of at most `limit` names that begin with `prefix` (of the raw name) and follow
    /// `after`, ordered by name. Where records can be damaged or stuck one by one, such a record is
    /// answered with its [`damage`](LockState::damage), and hides no other.
    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>>;

    /// Takes the lock from whoever holds it, and returns the state before. The next token is larger
    /// than theirs.
    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>>;

    /// Makes the next token of `name` larger than `floor`, and returns what the last token now
    /// counts as. Grants stay as they are, but for `mend`: a record that is damaged is then written
    /// anew with no holder, instead of being refused as `Corrupt`. Bounded as
    /// [`check_jump`](crate::token::check_jump) says.
    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken>;

    /// Removes records that nobody has held for `idle`, where the engine can do so without ever
    /// telling a token again (L10).
    async fn prune(&self, idle: Duration) -> Result<Pruned>;

    /// What an operator should know, for `fencelock doctor`. Asks the engine.
    async fn probe(&self) -> Result<Vec<Finding>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttl_is_bounded() {
        for bad in [Duration::ZERO, Duration::from_millis(99), Duration::MAX] {
            assert!(Ttl::new(bad).is_err());
        }
        assert!(Ttl::new(Ttl::MIN).is_ok());
        assert!(Ttl::new(Ttl::MAX).is_ok());
        assert!(Ttl::new(Ttl::MAX + Duration::from_nanos(1)).is_err());
    }

    #[test]
    fn a_holder_id_hides_itself() {
        let id = HolderId::random();
        assert!(!format!("{id:?}").contains(&id.reveal()));
        assert_eq!(id.reveal().parse::<HolderId>().unwrap(), id);
    }
}
