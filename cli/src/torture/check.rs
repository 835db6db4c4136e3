//! The checker: holds a history against the promises, in time that is linear in it but for sorting.
//!
//! It is that fast because nothing has to be guessed: the values say in which order writes were
//! accepted, and tokens say in which order locks were granted (Wing and Gong's search, which would
//! have to find an order, is exponential). Numbers are those of the guarantees.

mod grants;
mod values;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::history::{Entry, Event, Forgery, Op};
use super::plan::{Arm, Lane, set_of};

pub(crate) use self::grants::Section;

/// How many violations are kept with their evidence; more are only counted.
const KEPT_MAX: usize = 100;

/// A value at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Final {
    pub(crate) value: Vec<u8>,
    /// The watermark, as the run left it.
    pub(crate) watermark: Option<u64>,
    /// The token of whoever wrote the value, as the storage says.
    pub(crate) writer: Option<u64>,
}

/// The values at the end, by arm, object and page; `None` where one could not be read.
pub(crate) type Finals = BTreeMap<(Arm, &'static str, u32), Option<Final>>;

/// What a run was to do, as far as its history is judged by it.
#[derive(Debug)]
pub(crate) struct Rules<'a> {
    pub(crate) arms: &'a [Arm],
    pub(crate) lanes: &'a [Lane],
    /// How many locks each workload had.
    pub(crate) sets: u32,
    pub(crate) ttl_us: u64,
    /// The ceiling of the store's tokens (L9).
    pub(crate) token_max: u64,
}

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    /// The number of the promise, as `S6`.
    pub(crate) promise: &'static str,
    pub(crate) lane: Lane,
    pub(crate) arm: Option<Arm>,
    pub(crate) object: Option<String>,
    /// What happened.
    pub(crate) evidence: String,
    /// The tokens that it is about.
    pub(crate) tokens: Vec<u64>,
    /// When, where it has a time.
    pub(crate) at_us: Option<u64>,
}

/// What became of the updates of an arm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    /// Updates of an object that were acknowledged.
    pub(crate) acknowledged: u64,
    /// Of those, the ones that are not in its value at the end.
    pub(crate) lost: u64,
    /// Writes that were refused as stale.
    pub(crate) refused: u64,
    /// Updates of unknown outcome, all settled by the final reading.
    pub(crate) indeterminate: u64,
    /// Of those, the ones that had taken effect.
    pub(crate) settled: u64,
}

impl Figures {
    /// Lost of a hundred that were acknowledged.
    pub(crate) fn lost_percent(self) -> f64 {
        if self.acknowledged == 0 {
            return 0.0;
        }
        let (lost, all) = (exact(self.lost), exact(self.acknowledged));
        (lost * 10_000.0 / all).round() / 100.0
    }
}

/// Counts of a run are far below what a double holds exactly.
fn exact(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::INFINITY, f64::from)
}

/// What the history says.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Requests to the store and the storages that were judged: acquires, looks at locks, reads and
    /// writes, each once, however often it was sent.
    pub(crate) operations: u64,
    pub(crate) grants: u64,
    /// Grants whose holder still wrote when a newer grant had been told.
    pub(crate) overlaps: u64,
    pub(crate) arms: BTreeMap<Arm, Figures>,
    pub(crate) violations: Vec<Violation>,
    /// All of them, the kept ones included.
    pub(crate) violations_total: u64,
    /// For the report: who held what, in the order of the grants.
    pub(crate) sections: Vec<Section>,
}

impl Verdict {
    fn violate(&mut self, violation: Violation) {
        self.violations_total += 1;
        if self.violations.len() < KEPT_MAX {
            self.violations.push(violation);
        }
    }
}

/// A write, from its being sent to its answer.
#[derive(Clone, Debug)]
pub(crate) struct Sent<'a> {
    pub(crate) client: u32,
    pub(crate) life: u32,
    pub(crate) token: u64,
    pub(crate) op: Op,
    pub(crate) ops: &'a [Op],
    pub(crate) len: u64,
    pub(crate) copy: u32,
    pub(crate) sent: u64,
    /// When and what.
    pub(crate) answer: Option<(u64, &'a str)>,
    /// The section's number.
    pub(crate) section: Option<usize>,
}

impl Sent<'_> {
    fn is_acknowledged(&self) -> bool {
        matches!(self.answer, Some((_, "ok" | "repeated")))
    }

    /// True where it reached the storage for sure, which took it or refused it.
    fn is_judged(&self) -> bool {
        self.is_acknowledged() || matches!(self.answer, Some((_, "fenced")))
    }

    fn is_applied(&self) -> bool {
        matches!(self.answer, Some((_, "ok")))
    }

    /// True where it may have taken effect, or will.
    fn is_unknown(&self) -> bool {
        matches!(self.answer, None | Some((_, "indeterminate")))
    }
}

/// A read or raise that succeeded.
#[derive(Clone, Debug)]
pub(crate) struct Read {
    pub(crate) token: u64,
    pub(crate) sent: u64,
    pub(crate) t: u64,
    pub(crate) len: u64,
    pub(crate) last: Option<Op>,
    pub(crate) digest: u64,
}

/// What was shown and has to be refused.
#[derive(Clone, Debug)]
pub(crate) struct Forged<'a> {
    pub(crate) t: u64,
    pub(crate) token: u64,
    pub(crate) what: Forgery,
    pub(crate) outcome: &'a str,
}

/// A look at a lock from outside.
#[derive(Clone, Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) lane: Lane,
    pub(crate) set: u32,
    pub(crate) sent: u64,
    pub(crate) t: u64,
    /// Labels and tokens.
    pub(crate) holders: &'a [(String, u64)],
}

/// An object of an arm on a page.
pub(crate) type Key<'a> = (Arm, &'a str, u32);

/// All that was done to an object, in the order of the history.
#[derive(Debug, Default)]
pub(crate) struct Done<'a> {
    pub(crate) writes: Vec<Sent<'a>>,
    pub(crate) reads: Vec<Read>,
    pub(crate) forged: Vec<Forged<'a>>,
    /// The tokens and times of values that were no values.
    pub(crate) unreadable: Vec<(u64, u64)>,
}

/// The history, sorted by what it is about.
#[derive(Debug, Default)]
pub(crate) struct Sorted<'a> {
    pub(crate) sections: Vec<Section>,
    pub(crate) objects: HashMap<Key<'a>, Done<'a>>,
    /// Acquires that brought no grant, and when that was told.
    pub(crate) failed: HashMap<Op, u64>,
    pub(crate) seen: Vec<Seen<'a>>,
    /// When the engine's server was killed.
    pub(crate) server_kills: Vec<u64>,
    pages: BTreeSet<u32>,
    operations: u64,
}

/// Checks a history against the values at its end.
pub(crate) fn check(entries: &[Entry], finals: &Finals, rules: &Rules<'_>) -> Verdict {
    let sorted = sort(entries, rules.sets);
    let mut verdict = Verdict {
        operations: sorted.operations,
        grants: count(sorted.sections.len()),
        ..Verdict::default()
    };
    for arm in rules.arms {
        verdict.arms.insert(*arm, Figures::default());
    }
    let mut sections = grants::check(&sorted, rules, &mut verdict);
    let mut pages = sorted.pages.clone();
    pages.extend(finals.keys().map(|(_, _, page)| *page));
    for page in pages {
        for lane in rules.lanes {
            for arm in rules.arms {
                values::check(*lane, *arm, page, &sorted, finals, &mut verdict);
            }
        }
    }
    grants::mark_writes(&mut sections, &sorted);
    verdict.sections = sections;
    verdict
}

pub(crate) fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

fn sort(entries: &[Entry], sets: u32) -> Sorted<'_> {
    let mut sorted = Sorted::default();
    // Of each process: its open sections by set, and when it was last heard of.
    let mut open: HashMap<(u32, u32), BTreeMap<u32, usize>> = HashMap::new();
    let mut heard: HashMap<(u32, u32), u64> = HashMap::new();
    let mut under_way: HashMap<(Key<'_>, Op, u32), usize> = HashMap::new();
    for entry in entries {
        let who = (entry.client, entry.life);
        let page = entry.page;
        let set = set_of(page, sets);
        heard.insert(who, entry.event.at());
        let held = open.entry(who).or_default();
        let at = held.get(&set).copied();
        // What befalls a process befalls all its sections.
        let all: Vec<usize> = held.values().copied().collect();
        match &entry.event {
            Event::NotGranted { t, op, .. } => {
                sorted.operations += 1;
                sorted.failed.insert(*op, *t);
            }
            Event::Granted {
                t,
                asked,
                lane,
                op,
                token,
                until,
            } => {
                sorted.operations += 1;
                held.insert(set, sorted.sections.len());
                let times = [*asked, *t, *until];
                let section = Section::new((*lane, set), who, *op, *token, times);
                sorted.sections.push(section);
            }
            Event::Seen {
                t,
                sent,
                lane,
                holders,
            } => {
                sorted.operations += 1;
                sorted.seen.push(Seen {
                    lane: *lane,
                    set,
                    sent: *sent,
                    t: *t,
                    holders,
                });
            }
            Event::Checked { good, until, .. } => {
                let section = at.and_then(|at| sorted.sections.get_mut(at));
                if let Some(section) = section.filter(|_| *good) {
                    section.until = section.until.max(*until);
                }
            }
            Event::Paused { t, .. } | Event::Stopped { t } => {
                for at in all {
                    if let Some(section) = sorted.sections.get_mut(at) {
                        section.pauses.push((*t, None));
                    }
                }
            }
            Event::Woke { t } | Event::Continued { t } => {
                for at in all {
                    let section = sorted.sections.get_mut(at);
                    if let Some((_, end)) = section.and_then(|section| section.pauses.last_mut()) {
                        end.get_or_insert(*t);
                    }
                }
            }
            Event::Killed { t } | Event::Dying { t, .. } => {
                for at in all {
                    if let Some(section) = sorted.sections.get_mut(at) {
                        section.cut.get_or_insert(*t);
                    }
                }
            }
            Event::Read {
                t,
                sent,
                token,
                arm,
                object,
                outcome,
                len,
                last,
                digest,
                ..
            } => {
                sorted.operations += 1;
                sorted.pages.insert(page);
                let done = sorted.objects.entry((*arm, object, page)).or_default();
                match outcome.as_str() {
                    "ok" => done.reads.push(Read {
                        token: *token,
                        sent: *sent,
                        t: *t,
                        len: *len,
                        last: *last,
                        digest: *digest,
                    }),
                    "unreadable" => done.unreadable.push((*token, *t)),
                    _ => {}
                }
            }
            Event::Sent {
                t,
                token,
                arm,
                object,
                op,
                ops,
                len,
                copy,
                ..
            } => {
                sorted.operations += 1;
                sorted.pages.insert(page);
                let key = (*arm, object.as_str(), page);
                let done = sorted.objects.entry(key).or_default();
                under_way.insert((key, *op, *copy), done.writes.len());
                done.writes.push(Sent {
                    client: entry.client,
                    life: entry.life,
                    token: *token,
                    op: *op,
                    ops,
                    len: *len,
                    copy: *copy,
                    sent: *t,
                    answer: None,
                    section: at,
                });
            }
            Event::Answered {
                t,
                arm,
                object,
                op,
                copy,
                outcome,
            } => {
                let key = (*arm, object.as_str(), page);
                let sent = under_way.remove(&(key, *op, *copy));
                let done = sorted.objects.get_mut(&key);
                if let (Some(done), Some(sent)) = (done, sent)
                    && let Some(write) = done.writes.get_mut(sent)
                {
                    write.answer = Some((*t, outcome));
                    let section = write.section.and_then(|at| sorted.sections.get_mut(at));
                    if let Some(section) = section.filter(|_| write.is_judged()) {
                        section.last_write = section.last_write.max(Some(write.sent));
                    }
                }
            }
            Event::Forged {
                t,
                token,
                arm,
                object,
                what,
                outcome,
                ..
            } => {
                sorted.operations += 1;
                sorted.pages.insert(page);
                let done = sorted.objects.entry((*arm, object, page)).or_default();
                done.forged.push(Forged {
                    t: *t,
                    token: *token,
                    what: *what,
                    outcome,
                });
            }
            Event::Releasing { t, .. } => {
                if let Some(section) = at.and_then(|at| sorted.sections.get_mut(at)) {
                    section.release_sent = Some(*t);
                }
            }
            Event::Ended {
                t, sent, outcome, ..
            } => {
                if let Some(section) = at.and_then(|at| sorted.sections.get_mut(at)) {
                    section.release_sent = Some(*sent);
                    section.ended = Some((*t, outcome.clone()));
                }
                held.remove(&set);
            }
            Event::ServerKilled { t } => sorted.server_kills.push(*t),
            Event::Ready { .. } | Event::Failed { .. } | Event::Thinking { .. } => {}
        }
    }
    // Whoever was not heard of again has ended.
    for (who, held) in open {
        for at in held.into_values() {
            if let (Some(section), Some(last)) = (sorted.sections.get_mut(at), heard.get(&who)) {
                section.cut.get_or_insert(*last);
            }
        }
    }
    sorted
}

#[cfg(test)]
mod tests;
