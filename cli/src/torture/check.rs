//! The checker: holds a history against the promises, in time that is linear in it but for sorting.
//!
//! It is that fast because nothing has to be guessed: the values say in which order writes were
//! accepted, and tokens say in which order locks were granted (Wing and Gong's search, which would
//! have to find an order, is exponential). Numbers are those of the guarantees.

mod grants;
mod values;

use std::collections::{BTreeMap, HashMap};

use super::history::{Entry, Event, Op};
use super::plan::{Arm, Lane};

pub(crate) use self::grants::Section;

/// How many violations are kept with their evidence; more are only counted.
const KEPT_MAX: usize = 100;

/// The values at the end, by arm and object; `None` where one could not be read.
pub(crate) type Finals = BTreeMap<(Arm, &'static str), Option<Vec<u8>>>;

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
    /// Acquires, reads and writes.
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
    pub(crate) lane: Lane,
    pub(crate) arm: Arm,
    pub(crate) object: &'a str,
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
pub(crate) struct Read<'a> {
    pub(crate) arm: Arm,
    pub(crate) object: &'a str,
    pub(crate) token: u64,
    pub(crate) sent: u64,
    pub(crate) t: u64,
    pub(crate) len: u64,
    pub(crate) last: Option<Op>,
    pub(crate) digest: u64,
}

/// The history, sorted by what it is about.
pub(crate) struct Sorted<'a> {
    pub(crate) sections: Vec<Section>,
    pub(crate) writes: Vec<Sent<'a>>,
    pub(crate) reads: Vec<Read<'a>>,
    /// Values that were no values.
    pub(crate) unreadable: Vec<(Arm, &'a str, u64, u64)>,
    operations: u64,
}

/// Checks a history against the values at its end.
pub(crate) fn check(entries: &[Entry], finals: &Finals, arms: &[Arm], lanes: &[Lane]) -> Verdict {
    let sorted = sort(entries);
    let mut verdict = Verdict {
        operations: sorted.operations,
        grants: count(sorted.sections.len()),
        ..Verdict::default()
    };
    for arm in arms {
        verdict.arms.insert(*arm, Figures::default());
    }
    let mut sections = grants::check(&sorted.sections, &mut verdict);
    for lane in lanes {
        for arm in arms {
            values::check(*lane, *arm, &sorted, finals, &mut verdict);
        }
    }
    grants::mark_writes(&mut sections, &sorted.writes);
    verdict.sections = sections;
    verdict
}

pub(crate) fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

fn sort(entries: &[Entry]) -> Sorted<'_> {
    let mut sorted = Sorted {
        sections: Vec::new(),
        writes: Vec::new(),
        reads: Vec::new(),
        unreadable: Vec::new(),
        operations: 0,
    };
    // Of each process: its open section, and when it was last heard of.
    let mut open: HashMap<(u32, u32), usize> = HashMap::new();
    let mut heard: HashMap<(u32, u32), u64> = HashMap::new();
    let mut under_way: HashMap<(Arm, &str, Op, u32), usize> = HashMap::new();
    for entry in entries {
        let who = (entry.client, entry.life);
        heard.insert(who, entry.event.at());
        let at = open.get(&who).copied();
        let section = at.and_then(|at| sorted.sections.get_mut(at));
        match &entry.event {
            Event::NotGranted { .. } => sorted.operations += 1,
            Event::Granted {
                t,
                asked,
                lane,
                token,
                until,
            } => {
                sorted.operations += 1;
                open.insert(who, sorted.sections.len());
                sorted.sections.push(Section::new(
                    *lane,
                    entry.client,
                    entry.life,
                    *token,
                    [*asked, *t, *until],
                ));
            }
            Event::Checked { good, until, .. } => {
                if let Some(section) = section.filter(|_| *good) {
                    section.until = section.until.max(*until);
                }
            }
            Event::Paused { t, .. } | Event::Stopped { t } => {
                if let Some(section) = section {
                    section.pauses.push((*t, None));
                }
            }
            Event::Woke { t } | Event::Continued { t } => {
                if let Some((_, end)) = section.and_then(|section| section.pauses.last_mut()) {
                    end.get_or_insert(*t);
                }
            }
            Event::Killed { t } | Event::Dying { t, .. } => {
                if let Some(section) = section {
                    section.cut.get_or_insert(*t);
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
                match outcome.as_str() {
                    "ok" => sorted.reads.push(Read {
                        arm: *arm,
                        object,
                        token: *token,
                        sent: *sent,
                        t: *t,
                        len: *len,
                        last: *last,
                        digest: *digest,
                    }),
                    "unreadable" => sorted.unreadable.push((*arm, object, *token, *t)),
                    _ => {}
                }
            }
            Event::Sent {
                t,
                lane,
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
                if let Some(section) = section {
                    section.last_sent = Some(*t);
                }
                under_way.insert((*arm, object, *op, *copy), sorted.writes.len());
                sorted.writes.push(Sent {
                    lane: *lane,
                    arm: *arm,
                    object,
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
                let sent = under_way.get(&(*arm, object.as_str(), *op, *copy));
                if let Some(write) = sent.and_then(|at| sorted.writes.get_mut(*at)) {
                    write.answer = Some((*t, outcome));
                }
            }
            Event::Ended {
                t, sent, outcome, ..
            } => {
                if let Some(section) = section {
                    section.release_sent = Some(*sent);
                    section.ended = Some((*t, outcome.clone()));
                }
                open.remove(&who);
            }
            Event::Ready { .. } | Event::Failed { .. } | Event::Thinking { .. } => {}
        }
    }
    // Whoever was not heard of again has ended.
    for (who, at) in open {
        if let (Some(section), Some(last)) = (sorted.sections.get_mut(at), heard.get(&who)) {
            section.cut.get_or_insert(*last);
        }
    }
    sorted
}

#[cfg(test)]
mod tests;
