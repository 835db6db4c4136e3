//! A lock backend of one's own: all locks in one JSON file, under a kernel lock.
//!
//! As small as it can be and still keep the promises; the page `fencelock::docs::writing_a_backend`
//! builds it step by step. Its tests are the conformance cases:
//!
//! ```text
//! cargo run --example own_backend --features conformance
//! cargo test --test own_backend --features conformance
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use fencelock::clock::{Clock, Tick, unix_micros};
use fencelock::fence::HolderTag;
use fencelock::lease::{
    AcquireRequest, Attempt, Contention, Durability, Expiry, Finding, Grant, HolderId, HolderState,
    LeaseInfo, LeaseRef, LeaseStore, LockState, NoWatch, Pruned, Release, Renewal, Severity,
    StoreProfile, Ttl, Watch,
};
use fencelock::token::check_jump;
use fencelock::{Error, FencingToken, LockName, Locks, Result};
use serde::{Deserialize, Serialize};

/// How long a step may wait for the kernel lock. A paused process may hold it.
const STEP_MAX: Duration = Duration::from_secs(10);

/// Locks of one host in `locks.json`. Its times are of one boot: keep it where a reboot empties the
/// directory, as in `/run`.
#[derive(Debug)]
struct JsonStore {
    dir: PathBuf,
    clock: Clock,
    profile: StoreProfile,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Data {
    realm: String,
    locks: BTreeMap<String, Record>,
}

#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
struct Record {
    last_token: u64,
    capacity: Option<u32>,
    holders: Vec<Holder>,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Holder {
    id: String,
    token: u64,
    ttl_ns: u64,
    expires_ns: u64,
    /// Given up with a linger time: still in the way, and nobody's.
    released: bool,
    host: String,
    pid: u32,
    label: Option<String>,
    since_unix_us: u64,
    trace_id: Option<String>,
}

impl JsonStore {
    fn open(dir: &Path, clock: Clock) -> Result<Self> {
        let data = step(dir, &clock, |data, _| Ok(data.clone()))?;
        let profile =
            StoreProfile::new("json", data.realm, Durability::D1ProcessCrash, Expiry::Host);
        let dir = dir.to_owned();
        Ok(Self {
            dir,
            clock,
            profile,
        })
    }

    /// Runs one atomic step on a thread that may block.
    async fn step<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Data, Tick) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (dir, clock) = (self.dir.clone(), self.clock.clone());
        let task = tokio::task::spawn_blocking(move || step(&dir, &clock, work));
        // It goes on when nobody waits any more, so what we do not hear of may have happened.
        let unknown = || Error::indeterminate("the step did not end in time").with("limit_s", 10);
        match tokio::time::timeout(STEP_MAX, task).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(unknown()),
        }
    }
}

/// Read, change, write: all under the kernel lock, and the file is replaced whole or not at all.
fn step<T>(
    dir: &Path,
    clock: &Clock,
    work: impl FnOnce(&mut Data, Tick) -> Result<T>,
) -> Result<T> {
    let io_error = |e| Error::unavailable("the locks cannot be read or written").with_source(e);
    let lock = File::create(dir.join("lock")).map_err(io_error)?;
    lock.lock().map_err(io_error)?;
    let path = dir.join("locks.json");
    let before = match fs::read(&path) {
        Ok(bytes) => Some(serde_json::from_slice::<Data>(&bytes).map_err(|e| {
            // Never a restart at token 1.
            Error::corrupt("locks.json is damaged").with_source(e)
        })?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(io_error(e)),
    };
    let mut data = before.clone().unwrap_or_else(|| Data {
        // 128 random bits: the identity of this data.
        realm: HolderId::random().reveal(),
        locks: BTreeMap::new(),
    });
    // The time is read under the lock: waiting for it may have taken long.
    let answer = work(&mut data, clock.now())?;
    if before.as_ref() != Some(&data) {
        let new = dir.join("locks.json.new");
        let bytes = serde_json::to_vec(&data)
            .map_err(|e| Error::invalid("the record cannot be written as JSON").with_source(e))?;
        fs::write(&new, bytes).map_err(io_error)?;
        fs::rename(&new, &path).map_err(io_error)?;
    }
    Ok(answer)
}

impl Record {
    fn last(&self) -> Option<FencingToken> {
        FencingToken::new(self.last_token).ok()
    }

    fn drop_lapsed(&mut self, now: Tick) {
        self.holders
            .retain(|holder| holder.expires_ns > now.as_nanos());
    }

    fn good(&mut self, holder: &HolderId, token: Option<FencingToken>) -> Option<&mut Holder> {
        let id = holder.reveal();
        self.holders.iter_mut().find(|holder| {
            holder.id == id && !holder.released && token.is_none_or(|t| t.get() == holder.token)
        })
    }

    fn acquire(&mut self, request: &AcquireRequest, ttl: Duration, now: Tick) -> Result<Attempt> {
        self.drop_lapsed(now);
        if let (Some(capacity), false) = (self.capacity, self.holders.is_empty())
            && capacity != request.permits
        {
            return Err(Error::invalid("the lock is held with another capacity")
                .with("permits", request.permits)
                .with("capacity", capacity));
        }
        if let Some(own) = self.good(&request.holder, None) {
            own.extend(ttl, now);
            return granted(own.token, request.ttl);
        }
        if self.holders.len() >= usize::try_from(request.permits).unwrap_or(usize::MAX) {
            let first = self.holders.iter().map(|holder| holder.expires_ns).min();
            return Ok(Attempt::Held(Contention {
                free_in: first.map(|expires| Tick::from_nanos(expires).since(now)),
                holder: self.holders.first().map(Holder::info),
            }));
        }
        if let Some(above) = request.above {
            check_jump(self.last(), above, unix_micros())?;
        }
        let token = FencingToken::after(self.last().max(request.above))?;
        self.last_token = token.get();
        self.capacity = Some(request.permits);
        let mut holder = Holder {
            id: request.holder.reveal(),
            token: token.get(),
            ttl_ns: 0,
            expires_ns: 0,
            released: false,
            host: request.info.host.clone(),
            pid: request.info.pid,
            label: request.info.label.clone(),
            since_unix_us: request.info.since_unix_us,
            trace_id: request.info.trace_id.clone(),
        };
        holder.extend(ttl, now);
        self.holders.push(holder);
        granted(token.get(), request.ttl)
    }

    fn state(&self, name: &LockName, now: Tick) -> Result<LockState> {
        let mut state = LockState::new(name.clone(), self.last());
        state.capacity = self.capacity;
        for holder in &self.holders {
            if holder.expires_ns > now.as_nanos() {
                state.holders.push(HolderState {
                    token: FencingToken::new(holder.token)?,
                    tag: HolderTag::of(&holder.id.parse()?),
                    ttl: Ttl::new(Duration::from_nanos(holder.ttl_ns))?,
                    expires_in: Some(Tick::from_nanos(holder.expires_ns).since(now)),
                    info: holder.info(),
                });
            }
        }
        Ok(state)
    }
}

impl Holder {
    fn extend(&mut self, ttl: Duration, now: Tick) {
        self.ttl_ns = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        self.expires_ns = now.after(ttl).as_nanos();
    }

    fn info(&self) -> LeaseInfo {
        let mut info = LeaseInfo::default();
        info.host.clone_from(&self.host);
        info.pid = self.pid;
        info.label.clone_from(&self.label);
        info.since_unix_us = self.since_unix_us;
        info.trace_id.clone_from(&self.trace_id);
        info
    }
}

fn granted(token: u64, ttl: Ttl) -> Result<Attempt> {
    let token = FencingToken::new(token)?;
    Ok(Attempt::Granted(Grant { token, ttl }))
}

fn finite(ttl: Ttl) -> Result<Duration> {
    ttl.duration()
        .ok_or_else(|| Error::unsupported("this store cannot see dead holders; give a TTL"))
}

#[async_trait]
impl LeaseStore for JsonStore {
    fn profile(&self) -> &StoreProfile {
        &self.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let (request, ttl) = (request.clone(), finite(request.ttl)?);
        self.step(move |data, now| {
            let record = data.locks.entry(request.name.to_string()).or_default();
            record.acquire(&request, ttl, now)
        })
        .await
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        let batch = leases.to_vec();
        let renewed = self.step(move |data, now| {
            let renew_one = |(lease, ttl): &(LeaseRef, Ttl)| {
                let ttl = finite(*ttl)?;
                let Some(record) = data.locks.get_mut(lease.name.as_str()) else {
                    return Ok(false);
                };
                record.drop_lapsed(now);
                let own = record.good(&lease.holder, lease.token);
                Ok(own.map(|own| own.extend(ttl, now)).is_some())
            };
            Ok(batch.iter().map(renew_one).collect::<Vec<Result<bool>>>())
        });
        match renewed.await {
            Ok(answers) => answers
                .into_iter()
                .map(|answer| match answer {
                    Ok(true) => Renewal::Renewed,
                    Ok(false) => Renewal::Lost,
                    Err(error) => Renewal::Unknown(error),
                })
                .collect(),
            Err(error) => leases
                .iter()
                .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
                .collect(),
        }
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let lease = lease.clone();
        self.step(move |data, now| {
            let Some(record) = data.locks.get_mut(lease.name.as_str()) else {
                return Ok(Release::NotHeld);
            };
            record.drop_lapsed(now);
            let Some(own) = record.good(&lease.holder, lease.token) else {
                return Ok(Release::NotHeld);
            };
            own.released = true;
            own.expires_ns = now.after(linger).as_nanos();
            record.drop_lapsed(now);
            Ok(Release::Released)
        })
        .await
    }

    async fn watch(&self, _: &LockName) -> Result<Box<dyn Watch>> {
        Ok(Box::new(NoWatch))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.step(move |data, now| {
            let record = data.locks.get(name.as_str());
            record.map(|record| record.state(&name, now)).transpose()
        })
        .await
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.step(move |data, now| {
            let follows = |name: &str| after.as_ref().is_none_or(|after| name > after.as_str());
            data.locks
                .iter()
                .filter(|(name, _)| name.starts_with(&prefix) && follows(name))
                .take(limit)
                .map(|(name, record)| record.state(&LockName::new(name)?, now))
                .collect()
        })
        .await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.step(move |data, now| {
            let Some(record) = data.locks.get_mut(name.as_str()) else {
                return Ok(None);
            };
            let before = record.state(&name, now)?;
            record.holders.clear();
            Ok(Some(before))
        })
        .await
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        _mend: bool,
    ) -> Result<FencingToken> {
        let name = name.clone();
        self.step(move |data, _| {
            let record = data.locks.entry(name.to_string()).or_default();
            check_jump(record.last(), floor, unix_micros())?;
            record.last_token = record.last_token.max(floor.get());
            FencingToken::new(record.last_token)
        })
        .await
    }

    /// Keeps every record: each is where a name's last token is.
    async fn prune(&self, _idle: Duration) -> Result<Pruned> {
        self.step(|data, _| {
            let kept = u64::try_from(data.locks.len()).unwrap_or(u64::MAX);
            Ok(Pruned { removed: 0, kept })
        })
        .await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let names = self.step(|data, _| Ok(data.locks.len())).await?;
        let detail = format!("{names} names are known");
        Ok(vec![Finding::new(Severity::Good, "records", detail)])
    }
}

#[expect(clippy::print_stdout, reason = "an example shows what it does")]
fn main() -> Result<()> {
    let dir = std::env::temp_dir().join("fencelock-own-backend");
    fs::create_dir_all(&dir)
        .map_err(|e| Error::unavailable("no directory for the locks").with_source(e))?;
    let locks = Locks::new(JsonStore::open(&dir, Clock::system())?);
    pollster::block_on(async {
        let guard = locks.acquire("payment-export").await?;
        println!("holding payment-export with token {}", guard.token());
        println!("storage would be shown {}", guard.fence());
        guard.release().await
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fencelock::conformance::LeaseHarness;
    use tempfile::TempDir;

    use super::*;

    struct Harness {
        dir: TempDir,
        clock: Clock,
    }

    impl Harness {
        fn new() -> Self {
            let (dir, clock) = (tempfile::tempdir().unwrap(), Clock::adjustable());
            Self { dir, clock }
        }

        fn open(&self) -> Arc<dyn LeaseStore> {
            Arc::new(JsonStore::open(self.dir.path(), self.clock.clone()).unwrap())
        }
    }

    #[async_trait]
    impl LeaseHarness for Harness {
        fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
            [self.open(), self.open()]
        }

        async fn expire(&self, _: &LockName, ttl: Duration) {
            self.clock.advance(ttl);
        }

        async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
            Some(self.clients())
        }

        async fn with_last_token(
            &self,
            name: &LockName,
            token: FencingToken,
        ) -> Option<Arc<dyn LeaseStore>> {
            let name = name.to_string();
            step(self.dir.path(), &self.clock, |data, _| {
                data.locks.entry(name).or_default().last_token = token.get();
                Ok(())
            })
            .unwrap();
            Some(self.open())
        }
    }

    fencelock::lease_conformance!(Harness::new());
}
