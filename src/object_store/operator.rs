//! What operators see and do.

use std::time::Duration;

use ::object_store::ObjectStoreExt as _;
use ::object_store::path::Path;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};

use super::connect::{Found, REQUEST_LIMIT};
use super::grant::{Base, Decision, LIMIT, Start};
use super::lease::{AT_ONCE, Inner};
use super::record::{Record, nonce};
use super::time::{GRAIN, Reading, micros};
use super::{failure, probe, realm};
use crate::clock::unix_micros;
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{Durability, Expiry, Finding, LockState, Pruned, Severity};
use crate::name::{LockName, decode};
use crate::random;
use crate::token::{FencingToken, check_jump};

/// How long a listing may take.
const LIST_LIMIT: Duration = Duration::from_secs(9);

/// Among how many objects those who look at the store's clock spread: a store may take one write
/// a second of each.
const CLOCKS: u8 = 16;

/// How often somebody else may write the same one in between.
const LOOKS_MAX: usize = 6;

/// From when on an operator hears of the difference between the store's clock and the host's.
const SKEW_MAX: Duration = Duration::from_secs(60);

impl Inner {
    /// A fresh reading of the store's clock: two requests.
    pub(super) async fn look(&self) -> Result<Reading> {
        self.time.read(self.note_the_time()).await
    }

    async fn note_the_time(&self) -> Result<u64> {
        for _ in 0..LOOKS_MAX {
            let [digit, ..] = random::id();
            let path = self.link.path(&format!("clock/{:x}", digit % CLOCKS))?;
            let body = Bytes::from(nonce());
            self.overwrite(&path, body.clone()).await?;
            match self.link.read(&path).await? {
                Some(found) if found.body == body => return Ok(found.modified_us),
                // Somebody else was faster: that may be older than our question.
                _ => {}
            }
        }
        Err(Error::unavailable(
            "the object store's time cannot be read: too many look at it",
        ))
    }

    /// Writes an object whatever is there; twice does no harm.
    async fn overwrite(&self, path: &Path, body: Bytes) -> Result<()> {
        let put = self.link.store().put(path, body.into());
        match within(REQUEST_LIMIT, put).await {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(self.link.named(failure::reading(&error))),
            None => Err(self
                .link
                .named(failure::silent(REQUEST_LIMIT).into_kind(ErrorKind::Unavailable))),
        }
    }

    pub(super) async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let shown = async {
            let base = self.find(name, false).await?;
            if base.version.is_none() {
                return Ok(None);
            }
            self.show(name, base).await.map(Some)
        };
        in_time(shown).await
    }

    async fn show(&self, name: &LockName, base: Base) -> Result<LockState> {
        let mut record = base.record;
        let noted_us = base.noted_us.unwrap_or_default();
        let left = self.drop_lapsed(name, &mut record, noted_us).await?;
        record.show(name, &left)
    }

    pub(super) async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let listed = async {
            let wanted = |name: &LockName| {
                name.as_str().starts_with(prefix) && after.is_none_or(|after| name > after)
            };
            let mut names: Vec<LockName> = self.names().await?.into_iter().filter(wanted).collect();
            names.sort_unstable();
            let states = names.iter().map(|name| async move {
                let base = match self.find(name, false).await {
                    Ok(base) => base,
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        let mut state = LockState::new(name.clone(), None);
                        state.damage = Some(error.to_string());
                        return Ok(Some(state));
                    }
                    Err(error) => return Err(error),
                };
                if base.version.is_none() {
                    return Ok(None);
                }
                self.show(name, base).await.map(Some)
            });
            let states: Vec<_> = states.collect();
            let mut states = stream::iter(states).buffered(AT_ONCE.min(limit.max(1)));
            let mut found = Vec::new();
            while found.len() < limit {
                match states.next().await {
                    // Gone since it was listed.
                    Some(Ok(None)) => {}
                    Some(state) => found.extend(state?),
                    None => break,
                }
            }
            drop(states);
            Ok(found)
        };
        within(LIST_LIMIT, listed).await.unwrap_or_else(|| {
            Err(Error::unavailable(
                "the object store has too many locks to list in time; ask for a prefix or a smaller page",
            )
            .with("limit", format_args!("{LIST_LIMIT:?}")))
        })
    }

    /// The names that have records. A long one is in its record only.
    async fn names(&self) -> Result<Vec<LockName>> {
        let keys = self.link.list(&self.link.path("lock")?).await?;
        let names = keys.into_iter().map(|listed| async move {
            let key = listed.path.filename().unwrap_or_default().to_owned();
            if let Some(name) = decode(&key) {
                return Ok(LockName::new(&name).ok());
            }
            let Some(Found { body, .. }) = self.link.read(&listed.path).await? else {
                return Ok(None);
            };
            let name = Record::name_in(&body).filter(|name| name.encoded() == key);
            if name.is_none() {
                tracing::warn!(key, "an object among the locks is none, or is damaged");
            }
            Ok(name)
        });
        let names: Vec<_> = names.collect();
        let names: Vec<Result<Option<LockName>>> = stream::iter(names)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        names.into_iter().filter_map(Result::transpose).collect()
    }

    pub(super) async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let mut first = None;
        self.change(name, Start::default(), |draft| {
            if !draft.exists() {
                return Ok(Decision::Leave(None));
            }
            // Where the answer was lost, the holders are those that were there at first.
            let before = match &first {
                Some(before) if draft.in_doubt => LockState::clone(before),
                _ => draft.record.show(name, &draft.left)?,
            };
            if draft.record.holders.is_empty() {
                return Ok(Decision::Leave(Some(before)));
            }
            first = Some(before.clone());
            draft.record.holders.clear();
            Ok(Decision::Write(Some(before)))
        })
        .await
    }

    pub(super) async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let start = Start {
            mend,
            ..Start::default()
        };
        self.change(name, start, |draft| {
            let last = draft.record.last();
            check_jump(last, floor, unix_micros())?;
            let last = last.map_or(floor, |last| last.max(floor));
            draft.record.set_last(last);
            Ok(Decision::Write(last))
        })
        .await
    }

    /// Removes nothing: without a conditional delete, a record that is idle when it is read could be
    /// a held one when it is removed.
    pub(super) async fn prune(&self) -> Result<Pruned> {
        let kept = in_time(async {
            let listed = self.link.list(&self.link.path("lock")?).await?;
            Ok(u64::try_from(listed.len()).unwrap_or(u64::MAX))
        });
        Ok(Pruned {
            removed: 0,
            kept: kept.await?,
        })
    }

    pub(super) async fn findings(&self) -> Vec<Finding> {
        let (conditions, clock, realm) = tokio::join!(
            in_time(probe::conditions(&self.link)),
            in_time(self.clock_finding()),
            in_time(self.realm_finding()),
        );
        let conditions = match conditions {
            Ok(()) => Finding::new(
                Severity::Good,
                "conditional writes",
                "the store honours If-None-Match and If-Match",
            ),
            Err(error) => Finding::bad("conditional writes", &error),
        };
        let mut findings = vec![
            conditions,
            clock.unwrap_or_else(|error| Finding::bad("clock", &error)),
            realm.unwrap_or_else(|error| Finding::bad("realm", &error)),
        ];
        findings.push(Finding::new(
            Severity::Good,
            "durability",
            format!(
                "{} is declared; the store does not tell what it keeps",
                match self.profile.durability {
                    Durability::D0Memory => "D0 (memory)",
                    Durability::D1ProcessCrash =>
                        "D1 (a crash of the server); say durability=d2 or d3 where it keeps more:",
                    Durability::D2PowerLoss => "D2 (power loss)",
                    Durability::D3Failover => "D3 (fail-over)",
                }
            ),
        ));
        findings.push(Finding::new(
            Severity::Warning,
            "bucket rules",
            "cannot be seen from here: no lifecycle rule may remove objects below this prefix, and old versions of them must not be brought back",
        ));
        findings
    }

    async fn clock_finding(&self) -> Result<Finding> {
        let reading = self.look().await?;
        let host_us = unix_micros();
        let off = reading
            .likely_us(self.clock.now())
            .abs_diff(host_us)
            .saturating_sub(micros(GRAIN));
        let off = Duration::from_micros(off);
        let (severity, judged) = match self.profile.expiry {
            Expiry::Observation => (Severity::Good, "leases are judged by observation".to_owned()),
            _ if !self.time.is_trusted() => (
                Severity::Warning,
                "it was seen to jump, or its servers to differ, so leases are judged by observation; set expiry=observation or a larger clock_margin for all clients".to_owned(),
            ),
            _ => (
                Severity::Good,
                format!(
                    "leases are judged by it, with a margin of {:?} for the differences between the store's servers",
                    self.margin
                ),
            ),
        };
        let severity = if off > SKEW_MAX {
            severity.max(Severity::Warning)
        } else {
            severity
        };
        Ok(Finding::new(
            severity,
            "clock",
            format!("the store's clock is {off:?} off this host's, to the second; {judged}"),
        ))
    }

    async fn realm_finding(&self) -> Result<Finding> {
        let kept = realm::read(&self.link).await?;
        Ok(match kept {
            Some(kept) if kept == self.profile.realm => Finding::new(
                Severity::Good,
                "realm",
                "it is the one that the bucket keeps",
            ),
            None if self.realm_is_given => {
                Finding::new(Severity::Good, "realm", "it is given by its name")
            }
            _ => Finding::new(
                Severity::Bad,
                "realm",
                "the bucket keeps another one, or none, since this store was opened: its data was removed or replaced; open it again, and rebind what is fenced",
            ),
        })
    }
}

/// What `work` yields within the time of one operation that changes nothing.
async fn in_time<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    within(LIMIT, work).await.unwrap_or_else(|| {
        let silent = failure::silent(LIMIT);
        Err(silent.into_kind(ErrorKind::Unavailable))
    })
}
