//! What the grants of a lock say of L1 to L6.

use std::collections::{BTreeMap, HashMap};

use super::super::plan::{Arm, Lane};
use super::{Sent, Verdict, Violation};

/// A critical section: one grant and what its holder did.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) lane: Lane,
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
    pub(crate) last_sent: Option<u64>,
    pub(crate) pauses: Vec<(u64, Option<u64>)>,
    /// When a newer grant had been told; for the report.
    pub(crate) superseded: Option<u64>,
    /// When writes were answered, and whether they were accepted; for the report.
    pub(crate) writes: Vec<(u64, Arm, bool)>,
}

impl Section {
    pub(super) fn new(lane: Lane, client: u32, life: u32, token: u64, times: [u64; 3]) -> Self {
        let [asked, told, until] = times;
        Self {
            lane,
            client,
            life,
            token,
            asked,
            told,
            until,
            release_sent: None,
            ended: None,
            cut: None,
            last_sent: None,
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

    /// True where its holder wrote after a newer grant had been told.
    pub(crate) fn overlaps(&self) -> bool {
        matches!((self.superseded, self.last_sent), (Some(newer), Some(sent)) if newer < sent)
    }
}

/// Checks all grants, and returns them in the order of their tokens by lane.
pub(super) fn check(sections: &[Section], verdict: &mut Verdict) -> Vec<Section> {
    let mut lanes: BTreeMap<Lane, Vec<Section>> = BTreeMap::new();
    for section in sections {
        let lane = lanes.entry(section.lane).or_default();
        lane.push(section.clone());
    }
    for lane in lanes.values_mut() {
        unique(lane, verdict);
        ordered(lane, verdict);
        lane.sort_by_key(|section| (section.token, section.told));
        exclusive(lane, verdict);
    }
    lanes.into_values().flatten().collect()
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

/// L2, and L6 for the client that lost its lock: what was granted before the asking is smaller.
fn ordered(lane: &[Section], verdict: &mut Verdict) {
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
            let promise = if earlier.client == section.client {
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
pub(super) fn mark_writes(sections: &mut [Section], writes: &[Sent<'_>]) {
    let mut places: HashMap<(Lane, u64, u32, u32), usize> = HashMap::new();
    for (at, section) in sections.iter().enumerate() {
        let key = (section.lane, section.token, section.client, section.life);
        places.insert(key, at);
    }
    for write in writes {
        let key = (write.lane, write.token, write.client, write.life);
        let section = places.get(&key).and_then(|at| sections.get_mut(*at));
        if let (Some(section), Some((t, _))) = (section, write.answer) {
            section.writes.push((t, write.arm, write.is_acknowledged()));
        }
    }
}
