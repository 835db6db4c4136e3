//! What operators see and do.

use std::collections::HashMap;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, Txn, TxnOp, TxnOpResponse};
use futures_util::{StreamExt as _, stream};

use super::failure::Failure;
use super::grant::{Hint, minted};
use super::lease::{AT_ONCE, BATCH, Inner};
use super::record::{Record, Seen, SeenHolder};
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::lease::{LockState, Pruned};
use crate::name::LockName;
use crate::token::{FencingToken, check_jump};

/// How many records are asked for in one request.
const PAGE: i64 = 500;

impl Inner {
    pub(super) async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let seen = self.see(name).await?;
        if seen.record.is_none() {
            return Ok(None);
        }
        let left = self.left(&seen.holders).await?;
        let state = seen.state(name, |lease| left.get(&lease).copied())?;
        Ok(Some(state))
    }

    pub(super) async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let mut names = self.names().await?;
        names.retain(|name| {
            name.as_str().starts_with(prefix) && after.is_none_or(|after| name > after)
        });
        names.truncate(limit);
        let mut states = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH / 2) {
            let ops: Vec<TxnOp> = batch
                .iter()
                .flat_map(|name| Seen::ops(&self.keys, name))
                .collect();
            let answer = self.link.read(Txn::new().and_then(ops)).await?;
            let mut answers = answer.op_responses().into_iter();
            let seen = batch
                .iter()
                .map(|name| Seen::of(&self.keys, name, &mut answers))
                .collect::<Result<Vec<_>>>()?;
            let holders: Vec<SeenHolder> =
                seen.iter().flat_map(|seen| seen.holders.clone()).collect();
            let left = self.left(&holders).await?;
            for (name, seen) in batch.iter().zip(seen) {
                states.push(seen.state(name, |lease| left.get(&lease).copied())?);
            }
        }
        Ok(states)
    }

    /// The names of all records, in their own order.
    async fn names(&self) -> Result<Vec<LockName>> {
        let prefix = self.keys.records();
        // No key of ours holds a byte above the slash's successor here.
        let end = format!("{}0", prefix.trim_end_matches('/'));
        let mut names = Vec::new();
        let mut from = prefix.into_bytes();
        loop {
            let options = GetOptions::new().with_range(end.as_str()).with_limit(PAGE);
            let get = TxnOp::get(from.as_slice(), Some(options));
            let answer = self.link.read(Txn::new().and_then([get])).await?;
            let Some(TxnOpResponse::Get(page)) = answer.op_responses().into_iter().next() else {
                break;
            };
            for kv in page.kvs() {
                match serde_json::from_slice::<Record>(kv.value()) {
                    Ok(record) => names.push(LockName::new(&record.name)?),
                    Err(error) => tracing::warn!(
                        key = %String::from_utf8_lossy(kv.key()), %error,
                        "the record of a lock is damaged, and left out of the list"
                    ),
                }
            }
            match page.kvs().last() {
                Some(last) if page.more() => {
                    from = last.key().to_vec();
                    from.push(0);
                }
                _ => break,
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// How long the leases of holders have left, in whole seconds.
    pub(super) async fn left(&self, holders: &[SeenHolder]) -> Result<HashMap<i64, Duration>> {
        let asked = holders.iter().map(|seen| async move {
            let answer = self.link.time_to_live(seen.lease).await?;
            let secs = u64::try_from(answer.ttl()).unwrap_or(0);
            Ok::<_, Failure>((seen.lease, Duration::from_secs(secs)))
        });
        let asked: Vec<_> = asked.collect();
        let answers: Vec<_> = stream::iter(asked).buffered(AT_ONCE).collect().await;
        let mut left = HashMap::with_capacity(answers.len());
        for answer in answers {
            let (lease, duration) = answer?;
            left.insert(lease, duration);
        }
        Ok(left)
    }

    pub(super) async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let record = TxnOp::get(self.keys.record(name), None);
        let all = DeleteOptions::new().with_prefix().with_prev_key();
        let holders = TxnOp::delete(self.keys.holders(name), Some(all));
        let answer = self
            .link
            .write(Txn::new().and_then([record, holders]))
            .await?;
        let mut answers = answer.op_responses().into_iter();
        let (Some(TxnOpResponse::Get(record)), Some(TxnOpResponse::Delete(deleted))) =
            (answers.next(), answers.next())
        else {
            return Err(Error::indeterminate(
                "the etcd server answered a transaction in part",
            ));
        };
        // It is broken by now, whatever can be read of it.
        let seen = Seen::of_parts(&self.keys, name, record.kvs(), deleted.prev_kvs())?;
        if seen.record.is_none() && seen.holders.is_empty() {
            return Ok(None);
        }
        let left = self.left(&seen.holders).await.unwrap_or_default();
        self.revoke_later(seen.holders.iter().map(|seen| seen.lease));
        let state = seen.state(name, |lease| left.get(&lease).copied())?;
        Ok(Some(state))
    }

    pub(super) async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let key = self.keys.record(name);
        loop {
            let ops = Seen::ops(&self.keys, name);
            let answer = self.link.read(Txn::new().and_then(ops)).await?;
            let mut answers = answer.op_responses().into_iter();
            let (base, permits, damaged) = match Seen::of(&self.keys, name, &mut answers) {
                Ok(seen) => (self.base(&seen)?, seen.capacity(), false),
                Err(_) if mend => (
                    Hint {
                        at: written_at(&answer.op_responses()),
                        last: None,
                        free: false,
                    },
                    None,
                    true,
                ),
                Err(error) => return Err(error),
            };
            check_jump(base.last, floor, unix_micros())?;
            if let Some(last) = base.last
                && last >= floor
            {
                return Ok(last);
            }
            let record = Record {
                name: name.as_str().to_owned(),
                // A damaged record may have been a grant's.
                last: if damaged {
                    minted(floor, base.at)?.get()
                } else {
                    floor.get()
                },
                granted: false,
                permits: permits.unwrap_or(0),
            };
            let last = FencingToken::new(record.last)?;
            let mut ops = vec![TxnOp::put(key.as_str(), record.encode()?, None)];
            if damaged {
                let all = DeleteOptions::new().with_prefix();
                ops.push(TxnOp::delete(self.keys.holders(name), Some(all)));
            }
            let compare = Compare::mod_revision(key.as_str(), CompareOp::Equal, base.at);
            let txn = Txn::new().when([compare]).and_then(ops);
            if self.link.write(txn).await?.succeeded() {
                return Ok(last);
            }
        }
    }

    /// Records are the floors of their names' tokens, and stay: see `docs/backends/etcd.md`.
    pub(super) async fn prune(&self) -> Result<Pruned> {
        let options = GetOptions::new().with_prefix().with_count_only();
        let get = TxnOp::get(self.keys.records(), Some(options));
        let answer = self.link.read(Txn::new().and_then([get])).await?;
        let kept = match answer.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(get)) => u64::try_from(get.count()).unwrap_or(0),
            _ => 0,
        };
        Ok(Pruned { removed: 0, kept })
    }
}

/// Where the record that is first among the answers was written.
fn written_at(answers: &[TxnOpResponse]) -> i64 {
    match answers.first() {
        Some(TxnOpResponse::Get(get)) => get.kvs().first().map_or(0, |kv| kv.mod_revision()),
        _ => 0,
    }
}
