//! What a run has shown so far, as far as that is to be seen without the values at its end: for a run
//! that ends when it has shown enough.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::history::{Event, Op};
use super::super::plan::{Arm, Plan};

/// How many writes have to have come late and been accepted: without fencing more than with the naive
/// check.
const LATE_MIN: u64 = 3;

/// An object of an arm on a page.
type Key = (Arm, String, u32);

#[derive(Debug, Default)]
pub(super) struct Shown {
    /// The largest token that has read each object.
    read: HashMap<Key, u64>,
    /// The writes that were sent where a newer holder had read.
    under_way: HashSet<(Arm, String, Op)>,
    /// By arm: the updates that were acknowledged, and those of them that came late.
    acknowledged: BTreeMap<Arm, u64>,
    late: BTreeMap<Arm, u64>,
}

impl Shown {
    /// Hears what a client tells of a page.
    pub(super) fn hear(&mut self, page: u32, event: &Event) {
        match event {
            Event::Read {
                arm,
                object,
                token,
                outcome,
                ..
            } if outcome == "ok" => {
                let newest = self.read.entry((*arm, object.clone(), page)).or_default();
                *newest = (*newest).max(*token);
            }
            Event::Sent {
                arm,
                object,
                token,
                op,
                copy: 0,
                ..
            } => {
                let newest = self.read.get(&(*arm, object.clone(), page));
                if newest.is_some_and(|newest| newest > token) {
                    self.under_way.insert((*arm, object.clone(), *op));
                }
            }
            Event::Answered {
                arm,
                object,
                op,
                copy: 0,
                outcome,
                ..
            } => {
                let is_late = self.under_way.remove(&(*arm, object.clone(), *op));
                if outcome == "ok" {
                    *self.acknowledged.entry(*arm).or_default() += 1;
                    *self.late.entry(*arm).or_default() += u64::from(is_late);
                }
            }
            _ => {}
        }
    }

    /// True where the run may end, as its plan says.
    pub(super) fn is_enough(&self, plan: &Plan) -> bool {
        let Some(updates) = plan.updates else {
            return false;
        };
        let count = |counts: &BTreeMap<Arm, u64>, arm| counts.get(&arm).copied().unwrap_or(0);
        let worked = |arm: &Arm| count(&self.acknowledged, *arm) >= updates;
        let has = |arm| plan.arms.contains(&arm);
        let (unfenced, naive) = (
            count(&self.late, Arm::Unfenced),
            count(&self.late, Arm::Naive),
        );
        plan.arms.iter().all(worked)
            && (!has(Arm::Naive) || naive >= LATE_MIN)
            && (!has(Arm::Unfenced) || unfenced >= naive + LATE_MIN)
    }
}
