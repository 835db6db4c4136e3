//! What a run has shown so far, as far as that is to be seen without the values at its end: for a run
//! that ends when it has shown enough.

use std::collections::{BTreeMap, HashMap};

use super::super::history::Event;
use super::super::plan::{Arm, Lane, Plan, set_of};

/// How many writes have to have come late and been accepted: without fencing more than with the naive
/// check.
const LATE_MIN: u64 = 3;

#[derive(Debug, Default)]
pub(super) struct Shown {
    /// The largest token that was told of each lock.
    newest: HashMap<(Lane, u32), u64>,
    /// What each hand of each client holds.
    held: HashMap<(usize, u32), (Lane, u64)>,
    /// By arm: the updates that were acknowledged, and those of holders that had been overtaken.
    acknowledged: BTreeMap<Arm, u64>,
    late: BTreeMap<Arm, u64>,
}

impl Shown {
    /// Hears what a client tells of a page.
    pub(super) fn hear(&mut self, seat: usize, page: u32, event: &Event, sets: u32) {
        let set = set_of(page, sets);
        match event {
            Event::Granted { lane, token, .. } => {
                let newest = self.newest.entry((*lane, set)).or_default();
                *newest = (*newest).max(*token);
                self.held.insert((seat, set), (*lane, *token));
            }
            Event::Answered {
                arm, copy, outcome, ..
            } if *copy == 0 && outcome == "ok" => {
                *self.acknowledged.entry(*arm).or_default() += 1;
                let Some((lane, token)) = self.held.get(&(seat, set)) else {
                    return;
                };
                if self.newest.get(&(*lane, set)).is_some_and(|n| n > token) {
                    *self.late.entry(*arm).or_default() += 1;
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
