//! What the grants of a lock say of L1 to L9, as far as a history can show it.

use std::collections::{BTreeMap, HashMap};

use super::super::history::Op;
use super::super::plan::{Arm, Lane};
use super::{Rules, Sorted, Verdict, Violation};

/// For how long after an acquire has failed, and three TTLs, a grant of its may still come to light:
/// what was on its way takes effect late, and is given back or lapses.
const LATE_GRANT_US: u64 = 20_000_000;

/// A critical section: one grant and what its holder did.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) lane: Lane,
    /// Which of the workload's locks.
    pub(crate) set: u32,
    /// The update that it was asked for.
    pub(crate) op: Op,
    pub(crate) client: u32,
    pub(crate) life: u32,
    pub(crate) token: u64,
    pub(crate) asked: u64,
    pub(crate) told: u64,
    /// Until when the holder believed in it, by all that it said.
    pub(crate) until: u64,
    pub(crate) release_sent: Option<u64>,
    pub(crate) ended: Option<(u64, String)>,
    /// When its process was killed, or last heard of.
    pub(crate) cut: Option<u64>,
    /// When the last of its writes was sent that reached the storage.
    pub(crate) last_write: Option<u64>,
    pub(crate) pauses: Vec<(u64, Option<u64>)>,
    /// When a newer grant had been told; for the report.
    pub(crate) superseded: Option<u64>,
    /// When writes were answered, and whether they were accepted; for the report.
    pub(crate) writes: Vec<(u64, Arm, bool)>,
}

impl Section {
    pub(super) fn new(
        (lane, set): (Lane, u32),
        (client, life): (u32, u32),
        op: Op,
        token: u64,
        [asked, told, until]: [u64; 3],
    ) -> Self {
        Self {
            lane,
            set,
            op,
            client,
            life,
            token,
            asked,
            told,
            until,
            release_sent: None,
            ended: None,
            cut: None,
            last_write: None,
            pauses: Vec::new(),
            superseded: None,
            writes: Vec::new(),
        }
    }

    /// Until when its holder was there and believed.
    fn believed(&self) -> u64 {
        let bounds = [self.release_sent, self.cut];
        bounds.into_iter().flatten().fold(self.until, u64::min)
    }

    /// When it was over for its holder.
    pub(crate) fn end(&self) -> u64 {
        let ended = self.ended.as_ref().map(|(t, _)| *t);
        ended.or(self.cut).unwrap_or(self.until).max(self.told)
    }

    /// True where its holder sent a write after a newer grant had been told, and the storage had to judge it.
    pub(crate) fn overlaps(&self) -> bool {
        matches!((self.superseded, self.last_write), (Some(newer), Some(sent)) if newer < sent)
    }
}

/// Checks all grants, and returns them in the order of their tokens by lock.
pub(super) fn check(sorted: &Sorted<'_>, rules: &Rules<'_>, verdict: &mut Verdict) -> Vec<Section> {
    let mut locks: BTreeMap<(Lane, u32), Vec<Section>> = BTreeMap::new();
    for section in &sorted.sections {
        let lock = locks.entry((section.lane, section.set)).or_default();
        lock.push(section.clone());
    }
    for lock in locks.values_mut() {
        unique(lock, verdict);
        bounded(lock, rules.token_max, verdict);
        ordered(lock, &sorted.server_kills, verdict);
        lock.sort_by_key(|section| (section.token, section.told));
        exclusive(lock, verdict);
    }
    from_outside(sorted, rules, verdict);
    locks.into_values().flatten().collect()
}

/// L9: no token is 0 or above the ceiling.
fn bounded(lock: &[Section], token_max: u64, verdict: &mut Verdict) {
    for section in lock {
        if !(1..=token_max).contains(&section.token) {
            let evidence = format!(
                "client {} was granted the token {}, and tokens are 1 to {token_max}",
                section.client, section.token
            );
            verdict.violate(of(section, "L9", evidence, vec![section.token]));
        }
    }
}

/// L3 and L7, by what was seen from outside: one grant at a time, and of one acquire one; none of an
/// acquire that failed long ago. The label of a grant is the update that it was asked for.
fn from_outside(sorted: &Sorted<'_>, rules: &Rules<'_>, verdict: &mut Verdict) {
    let granted: HashMap<Op, &Section> = sorted.sections.iter().map(|s| (s.op, s)).collect();
    let late = rules.ttl_us.saturating_mul(3).saturating_add(LATE_GRANT_US);
    for seen in &sorted.seen {
        let mut violate = |promise, evidence, tokens| {
            verdict.violate(Violation {
                promise,
                lane: seen.lane,
                arm: None,
                object: None,
                evidence,
                tokens,
                at_us: Some(seen.t),
            });
        };
        if let [(first, token), (second, other), ..] = seen.holders {
            let promise = if first == second { "L7" } else { "L3" };
            let evidence = format!(
                "the lock {} had two holders at once, for {first} and for {second}",
                seen.set
            );
            violate(promise, evidence, vec![*token, *other]);
        }
        for (label, token) in seen.holders {
            // The run itself looks at the end without a label.
            let Ok(op) = label.parse::<Op>() else {
                continue;
            };
            if let Some(section) = granted.get(&op)
                && section.told < seen.sent
                && section.token != *token
            {
                let evidence = format!(
                    "the acquire for {op} was told the token {}, and has a grant with {token} as well",
                    section.token
                );
                violate("L7", evidence, vec![section.token, *token]);
            }
            // A server that was killed may give every lease its whole TTL again, as etcd does.
            let kills = sorted.server_kills.iter();
            let killed = kills.rev().find(|killed| **killed < seen.sent);
            if let Some(failed) = sorted.failed.get(&op)
                && killed
                    .max(Some(failed))
                    .is_some_and(|at| at.saturating_add(late) < seen.sent)
            {
                let evidence = format!(
                    "the acquire for {op} had failed {} us before, and has a grant with {token}",
                    seen.sent - failed
                );
                violate("L7", evidence, vec![*token]);
            }
        }
    }
}

/// L1: no token twice.
fn unique(lane: &[Section], verdict: &mut Verdict) {
    let mut known: HashMap<u64, &Section> = HashMap::new();
    for section in lane {
        if let Some(first) = known.insert(section.token, section) {
            let evidence = format!(
                "the token {} was granted to client {} and to client {}",
                section.token, first.client, section.client
            );
            verdict.violate(of(section, "L1", evidence, vec![section.token]));
        }
    }
}

/// L2, and L6 for the client that lost its lock: what was granted before the asking is smaller. Where
/// the server was killed in between, it told what it had not kept: L8.
fn ordered(lane: &[Section], server_kills: &[u64], verdict: &mut Verdict) {
    let mut by_told: Vec<&Section> = lane.iter().collect();
    by_told.sort_by_key(|section| section.told);
    let mut by_asked: Vec<&Section> = lane.iter().collect();
    by_asked.sort_by_key(|section| section.asked);
    let mut before = by_told.into_iter().peekable();
    let mut largest: Option<&Section> = None;
    for section in by_asked {
        while let Some(earlier) = before.next_if(|earlier| earlier.told < section.asked) {
            if largest.is_none_or(|largest| earlier.token > largest.token) {
                largest = Some(earlier);
            }
        }
        if let Some(earlier) = largest.filter(|earlier| earlier.token > section.token) {
            let between = earlier.told..section.told;
            let promise = if server_kills.iter().any(|kill| between.contains(kill)) {
                "L8"
            } else if earlier.client == section.client {
                "L6"
            } else {
                "L2"
            };
            let evidence = format!(
                "client {} was granted the token {}, and the larger {} had been granted before it asked",
                section.client, section.token, earlier.token
            );
            let tokens = vec![earlier.token, section.token];
            verdict.violate(of(section, promise, evidence, tokens));
        }
    }
}

/// L3 to L5: nobody is granted what another still has, and nobody gives back what is another's. `lane`
/// is sorted by token.
fn exclusive(lane: &mut [Section], verdict: &mut Verdict) {
    // When the first of the newer grants was told, and its token.
    let mut newer: Option<(u64, u64)> = None;
    for section in lane.iter_mut().rev() {
        // Where it was told before, it is L2 that is broken.
        let next = newer.filter(|(told, _)| *told > section.told);
        section.superseded = next.map(|(told, _)| told);
        if let Some((told, token)) = next {
            let tokens = vec![section.token, token];
            let believed = section.believed();
            if told < believed {
                let evidence = format!(
                    "client {} could believe in the token {} for {} us more when the token {token} had been granted",
                    section.client,
                    section.token,
                    believed - told
                );
                verdict.violate(of(section, "L4", evidence, tokens.clone()));
            }
            let released = matches!(&section.ended, Some((_, how)) if how == "released");
            if released && section.release_sent.is_some_and(|sent| told < sent) {
                let evidence = format!(
                    "client {} was told that it released the token {}, when the token {token} had been granted before",
                    section.client, section.token
                );
                verdict.violate(of(section, "L5", evidence, tokens));
            }
            if section.overlaps() {
                verdict.overlaps += 1;
            }
        }
        if newer.is_none_or(|(told, _)| section.told < told) {
            newer = Some((section.told, section.token));
        }
    }
}

fn of(section: &Section, promise: &'static str, evidence: String, tokens: Vec<u64>) -> Violation {
    Violation {
        promise,
        lane: section.lane,
        arm: None,
        object: None,
        evidence,
        tokens,
        at_us: Some(section.told),
    }
}

/// For the report: which writes of a section were accepted.
pub(super) fn mark_writes(sections: &mut [Section], sorted: &Sorted<'_>) {
    let mut places: HashMap<Op, usize> = HashMap::new();
    for (at, section) in sections.iter().enumerate() {
        places.insert(section.op, at);
    }
    for ((arm, _, _), done) in &sorted.objects {
        for write in &done.writes {
            let section = write.section.and_then(|at| sorted.sections.get(at));
            let place = section.and_then(|section| places.get(&section.op));
            let section = place.and_then(|at| sections.get_mut(*at));
            if let (Some(section), Some((t, _))) = (section, write.answer) {
                section.writes.push((t, *arm, write.is_acknowledged()));
            }
        }
    }
}
