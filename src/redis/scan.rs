//! Finding the locks of a server among all its keys.

use std::collections::BTreeMap;
use std::time::Duration;

use super::answer::{self, Failure};
use super::lease::RedisStore;
use super::record::state;
use super::script::run_all;
use crate::error::{ErrorKind, Result};
use crate::lease::LockState;
use crate::name::{LockName, decode};

/// How long it may take to find all keys of locks.
pub(super) const SCAN_LIMIT: Duration = Duration::from_secs(7);

/// How many keys the server looks at for one answer, so that no step of a scan holds others up.
pub(super) const SCAN_COUNT: u32 = 1_000;

/// How many records are asked for in one round trip.
pub(super) const BATCH: usize = 100;

impl RedisStore {
    /// All keys of records, with the names that they stand for where those can be told.
    pub(super) async fn scan(&self) -> Result<BTreeMap<String, Option<LockName>>> {
        let link = &self.inner.link;
        let pattern = self.inner.options.record_key("*");
        let mut found = BTreeMap::new();
        for master in link.masters().await? {
            let mut cursor = "0".to_owned();
            loop {
                let mut command = redis::cmd("SCAN");
                command.arg(&cursor).arg("MATCH").arg(&pattern);
                command.arg("COUNT").arg(SCAN_COUNT);
                let answer = link.command_at(master.as_ref(), &command).await?;
                let (next, keys): (String, Vec<Vec<u8>>) = answer::parse(answer)?;
                for key in keys {
                    if let Ok(key) = String::from_utf8(key)
                        && let Some(name) = self.name_of(&key)
                    {
                        found.insert(key, name);
                    }
                }
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(found)
    }

    /// The name that a key stands for; inside `None` where it is hashed, outside where the key is
    /// nobody's of ours.
    fn name_of(&self, key: &str) -> Option<Option<LockName>> {
        let encoded = key
            .strip_prefix('{')?
            .strip_prefix(self.inner.options.prefix.as_str())?
            .strip_suffix("}:lock")?;
        match decode(encoded) {
            Some(name) => Some(Some(LockName::new(&name).ok()?)),
            None => encoded.contains("==").then_some(None),
        }
    }

    pub(super) async fn named(
        &self,
        keys: BTreeMap<String, Option<LockName>>,
    ) -> Result<Vec<LockName>> {
        let mut names = Vec::with_capacity(keys.len());
        for (key, name) in keys {
            if let Some(name) = name {
                names.push(name);
                continue;
            }
            let mut command = redis::cmd("HGET");
            command.arg(&key).arg("name");
            let stored: Option<String> = match self.inner.link.command(&command).await {
                Ok(answer) => answer::parse(answer)?,
                // It is not a hash, and nothing else tells its name.
                Err(Failure::Odd(_)) => continue,
                Err(failure) => return Err(failure.into()),
            };
            if let Some(name) = stored.and_then(|name| LockName::new(&name).ok())
                && self.key(&name) == key
            {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    pub(super) async fn find(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let mut names = self.named(self.scan().await?).await?;
        names.retain(|name| {
            name.as_str().starts_with(prefix) && after.is_none_or(|after| name > after)
        });
        let mut states = Vec::new();
        for batch in names.chunks(BATCH) {
            let calls: Vec<_> = batch.iter().map(|n| self.inspect_call(n, "")).collect();
            let answers = run_all(&self.inner.link, &calls, <_>::default()).await;
            for (name, answer) in batch.iter().zip(answers) {
                // A record that was removed in between is left out, and does not use up the limit.
                match state(name, answer?.words) {
                    Ok(state) => states.extend(state),
                    // One damaged record does not hide the others.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        let mut damaged = LockState::new(name.clone(), None);
                        damaged.damage = Some(error.to_string());
                        states.push(damaged);
                    }
                    Err(error) => return Err(error),
                }
                if states.len() >= limit {
                    states.truncate(limit);
                    return Ok(states);
                }
            }
        }
        Ok(states)
    }
}
