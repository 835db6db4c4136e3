//! What operators see and do.

use futures_util::{StreamExt as _, stream};

use super::connect::Swap;
use super::grant::Edit;
use super::lease::{AT_ONCE, Inner};
use super::record::{DAMAGE, Lock, corrupt};
use crate::clock::unix_micros;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{LockState, Pruned};
use crate::name::{LockName, decode};
use crate::token::{FencingToken, check_jump};

impl Inner {
    pub(super) async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let look = self.look(name).await?;
        if look.lock.at == 0 {
            return Ok(None);
        }
        Ok(Some(look.lock.state(name, look.clock)))
    }

    pub(super) async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let (subjects, clock) = tokio::join!(
            self.bucket.records(&self.link),
            self.bucket.clock(&self.link)
        );
        let (subjects, clock) = (subjects?, clock?);
        let wanted = |name: &LockName| {
            name.as_str().starts_with(prefix) && after.is_none_or(|after| name > after)
        };
        // A long name is in its record only.
        let (mut named, mut hashed) = (Vec::new(), Vec::new());
        for subject in subjects {
            let name = self.bucket.encoded_of(&subject).and_then(decode);
            match name.and_then(|name| LockName::new(&name).ok()) {
                Some(name) if wanted(&name) => named.push((name, subject)),
                Some(_) => {}
                None => hashed.push(subject),
            }
        }
        named.sort_unstable();
        named.truncate(limit);
        let names = named
            .into_iter()
            .map(|(name, subject)| (Some(name), subject));
        let all = names.chain(hashed.into_iter().map(|subject| (None, subject)));
        let reads = all.map(|(name, subject)| async move {
            let stored = self.bucket.read(&self.link, &subject).await?;
            Ok::<_, Error>((name, stored))
        });
        let reads: Vec<_> = reads.collect();
        let read: Vec<_> = stream::iter(reads).buffered(AT_ONCE).collect().await;
        let mut states = Vec::with_capacity(read.len());
        for answer in read {
            let (name, stored) = answer?;
            let Some(stored) = stored else { continue };
            match (Lock::of(&stored, name.as_ref()), name) {
                (Some((name, lock)), _) if wanted(&name) => states.push(lock.state(&name, clock)),
                (Some(_), _) => {}
                (None, Some(name)) => {
                    let mut state = LockState::new(name, None);
                    state.damage = Some(DAMAGE.to_owned());
                    states.push(state);
                }
                (None, None) => tracing::warn!(
                    sequence = stored.at,
                    "the record of a lock with a long name is damaged, and left out of the list"
                ),
            }
        }
        states.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        states.truncate(limit);
        Ok(states)
    }

    pub(super) async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let broken = self.edit(name, |lock, clock| {
            if lock.at == 0 {
                return Ok(Edit::Leave(None));
            }
            let before = lock.state(name, clock);
            lock.holders.clear();
            Ok(Edit::Store(Some(before)))
        });
        let before = broken.await?;
        self.link.tell(self.bucket.freed(name)).await;
        Ok(before)
    }

    pub(super) async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let raised = self.edit(name, |lock, _| {
            check_jump(lock.last, floor, unix_micros())?;
            let last = lock.last.map_or(floor, |last| last.max(floor));
            lock.last = Some(last);
            Ok(Edit::Store(last))
        });
        match raised.await {
            Err(error) if error.kind() == ErrorKind::Corrupt && mend => {
                self.mend(name, floor).await
            }
            raised => raised,
        }
    }

    /// Writes a damaged record anew. Whatever tokens it granted are below its own sequence, or were
    /// named by whoever knows better.
    async fn mend(&self, name: &LockName, floor: FencingToken) -> Result<FencingToken> {
        check_jump(None, floor, unix_micros())?;
        let subject = self.bucket.record(name);
        let stored = self.bucket.read(&self.link, &subject).await?;
        let stored = stored.ok_or_else(|| corrupt(name))?;
        let last = FencingToken::new(floor.get().max(stored.at))?;
        let lock = Lock {
            at: stored.at,
            last: Some(last),
            ..Lock::default()
        };
        self.forget(name);
        match self.store(name, &lock, false).await? {
            Swap::Stored(_) => {
                self.link.tell(self.bucket.freed(name)).await;
                Ok(last)
            }
            Swap::Moved => Err(Error::unavailable(
                "the record changed while it was being repaired; look at it again",
            )
            .with("name", format_args!("{name:?}"))),
        }
    }

    /// Keeps everything: a record holds the floor of its name, and a bucket forgets nothing.
    pub(super) async fn prune(&self) -> Result<Pruned> {
        let kept = self.bucket.records(&self.link).await?.len();
        Ok(Pruned {
            removed: 0,
            kept: u64::try_from(kept).unwrap_or(u64::MAX),
        })
    }
}
