//! What a client has seen of grants, for leases that are judged by observation: a grant that was not
//! renewed for a whole TTL, as counted here, has lapsed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::record::{Entry, Record};
use super::time::slack;
use crate::clock::Tick;
use crate::name::LockName;

/// How many names are remembered. Above it all are forgotten, which only makes waiters wait longer.
const NAMES_MAX: usize = 4_096;

/// Since when each grant has been seen unchanged.
#[derive(Debug, Default)]
pub(super) struct Observations(Mutex<HashMap<LockName, Vec<Seen>>>);

/// A grant, and when this renewal of it was seen first.
struct Seen {
    holder: String,
    beat: String,
    since: Tick,
}

impl Observations {
    /// Notes what `record` holds, which was read or written before `now`. What it does not hold any
    /// more is forgotten.
    pub(super) fn note(&self, name: &LockName, record: &Record, now: Tick) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if record.holders.is_empty() {
            names.remove(name);
            return;
        }
        if names.len() >= NAMES_MAX && !names.contains_key(name) {
            names.clear();
        }
        let seen = names.entry(name.clone()).or_default();
        let before = std::mem::take(seen);
        seen.extend(record.holders.iter().map(|entry| {
            Seen {
                holder: entry.holder().to_owned(),
                beat: entry.beat.clone(),
                since: before
                    .iter()
                    .find(|seen| seen.is(entry))
                    .map_or(now, |seen| seen.since),
            }
        }));
    }

    /// How long the grant is still good at `now`; `None` where it has lapsed.
    pub(super) fn left(&self, name: &LockName, entry: &Entry, now: Tick) -> Option<Duration> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = names.get(name).into_iter().flatten().find(|s| s.is(entry));
        let since = seen.map_or(now, |seen| seen.since);
        // The holder counts from before it asked, and on a clock that may be 2 % slow.
        let left = slack(entry.ttl()).saturating_sub(now.since(since));
        (!left.is_zero()).then_some(left)
    }
}

impl Seen {
    fn is(&self, entry: &Entry) -> bool {
        self.beat == entry.beat && self.holder == entry.holder()
    }
}

/// Shows no secret.
impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seen")
            .field("since", &self.since)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::nonce;
    use super::*;
    use crate::lease::{HolderId, LeaseInfo};
    use crate::token::FencingToken;

    const TTL: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> Tick {
        Tick::from_nanos(ms * 1_000_000)
    }

    fn held() -> (LockName, Record) {
        let name = LockName::new("a").unwrap();
        let mut record = Record::new(&name);
        record.nonce = nonce();
        let mut entry = Entry::new(
            &HolderId::random(),
            FencingToken::MIN,
            &LeaseInfo::default(),
        );
        entry.extend(TTL, &record.nonce);
        record.holders.push(entry);
        (name, record)
    }

    #[test]
    fn a_grant_lapses_once_it_was_seen_unchanged_for_its_ttl() {
        let (seen, (name, mut record)) = (Observations::default(), held());
        let entry = |record: &Record| record.holders[0].clone();
        seen.note(&name, &record, at(1_000));
        seen.note(&name, &record, at(9_000));
        assert!(seen.left(&name, &entry(&record), at(11_199)).is_some());
        assert_eq!(seen.left(&name, &entry(&record), at(11_200)), None);
        // A renewal begins anew.
        record.holders[0].extend(TTL, "other");
        assert!(seen.left(&name, &entry(&record), at(99_000)).is_some());
        seen.note(&name, &record, at(12_000));
        assert!(seen.left(&name, &entry(&record), at(22_199)).is_some());
        assert_eq!(seen.left(&name, &entry(&record), at(22_200)), None);
    }

    #[test]
    fn what_was_never_seen_is_good() {
        let (seen, (name, record)) = (Observations::default(), held());
        let left = seen.left(&name, &record.holders[0], at(1 << 40));
        assert_eq!(left, Some(slack(TTL)));
    }

    #[test]
    fn memory_is_bounded() {
        let (seen, (_, record)) = (Observations::default(), held());
        for i in 0..=NAMES_MAX {
            let name = LockName::new(&i.to_string()).unwrap();
            seen.note(&name, &record, at(1));
        }
        assert!(seen.0.lock().unwrap().len() <= NAMES_MAX);
    }
}
