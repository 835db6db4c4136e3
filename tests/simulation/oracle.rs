//! What must be true, told step by step in the order of the effects: a second, simpler account of
//! locks and values, and the promises that each effect is held against.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fencelock::fence::{Fence, HolderTag, Snapshot, Written};
use fencelock::lease::{AcquireRequest, Attempt, HolderId, LeaseRef, Release, Renewal, Ttl};
use fencelock::simulation::Belief;
use fencelock::{ErrorKind, Result};

use crate::world::World;

#[derive(Default)]
pub(crate) struct Oracle {
    locks: BTreeMap<String, Lock>,
    resources: BTreeMap<String, Resource>,
    /// Increments that were acknowledged, by name: fenced, and not.
    acked: BTreeMap<String, Vec<u32>>,
    acked_unfenced: BTreeMap<String, Vec<u32>>,
    unfenced: BTreeMap<String, Vec<u32>>,
    /// Holders to whom something was granted, and those who know of it or gave it back.
    granted: BTreeSet<[u8; 16]>,
    answered_for: BTreeSet<[u8; 16]>,
    pub(crate) seen: Seen,
}

/// That the schedules were worth running.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) grants: u64,
    pub(crate) writes: u64,
    pub(crate) fenced: u64,
    pub(crate) lost_unfenced: u64,
    pub(crate) broken: u64,
    pub(crate) raised: u64,
    pub(crate) abandoned: u64,
    pub(crate) lost_guards: u64,
    pub(crate) renewals: u64,
}

impl Seen {
    pub(crate) fn each(&self) -> [(&'static str, u64); 9] {
        [
            ("grants", self.grants),
            ("writes", self.writes),
            ("fenced", self.fenced),
            ("lost without fencing", self.lost_unfenced),
            ("broken", self.broken),
            ("raised", self.raised),
            ("abandoned", self.abandoned),
            ("lost guards", self.lost_guards),
            ("renewals", self.renewals),
        ]
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.grants += other.grants;
        self.writes += other.writes;
        self.fenced += other.fenced;
        self.lost_unfenced += other.lost_unfenced;
        self.broken += other.broken;
        self.raised += other.raised;
        self.abandoned += other.abandoned;
        self.lost_guards += other.lost_guards;
        self.renewals += other.renewals;
    }
}

#[derive(Default)]
struct Lock {
    last: u64,
    granted: BTreeSet<u64>,
    live: Vec<Live>,
    believers: Vec<Believer>,
    broken: BTreeSet<u64>,
}

struct Live {
    holder: HolderId,
    token: u64,
    expires: u64,
    released: bool,
}

struct Believer {
    holder: HolderId,
    token: u64,
    belief: Belief,
    gone: bool,
}

#[derive(Default)]
struct Resource {
    value: Vec<u32>,
    token: u64,
    tag: Option<HolderTag>,
    /// The last write under `token`.
    seq: u64,
}

impl Lock {
    fn lapse(&mut self, now: u64) {
        self.live.retain(|live| live.expires > now);
    }

    fn find(&mut self, holder: &HolderId, token: Option<u64>) -> Option<&mut Live> {
        self.live.iter_mut().find(|live| {
            live.holder == *holder && !live.released && token.is_none_or(|t| t == live.token)
        })
    }

    /// Those whose holder would go on, not counting those from whom it was taken by request.
    fn believing(&mut self, world: &World) -> Vec<u64> {
        let mut tokens = Vec::new();
        for believer in &mut self.believers {
            let stands = believer.belief.stands();
            if stands && believer.gone {
                world.violation(format_args!("L5: belief in {} revived", believer.token));
            }
            believer.gone |= !stands;
            if stands && !self.broken.contains(&believer.token) {
                tokens.push(believer.token);
            }
        }
        tokens
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

impl Oracle {
    fn lock(&mut self, name: &str) -> &mut Lock {
        self.locks.entry(name.to_owned()).or_default()
    }

    pub(crate) fn acquired(
        &mut self,
        world: &World,
        request: &AcquireRequest,
        answer: &Result<Attempt>,
    ) {
        let (now, name) = (world.now(), request.name.as_str());
        let permits = usize::try_from(request.permits).unwrap();
        let lock = self.lock(name);
        lock.lapse(now);
        let grant = match answer {
            Ok(Attempt::Granted(grant)) => grant,
            Ok(Attempt::Held(_)) => {
                if lock.live.len() < permits {
                    world.violation(format_args!("{name} was refused though it is free"));
                }
                return;
            }
            Err(error) => return world.violation(format_args!("the store failed: {error}")),
        };
        let token = grant.token.get();
        let expires = now + nanos(grant.ttl.duration().unwrap());
        if let Some(live) = lock.find(&request.holder, None) {
            if live.token != token {
                world.violation(format_args!(
                    "L7: {name} has two live grants of one request"
                ));
            }
            live.expires = expires;
            return;
        }
        world.note(format_args!("grant {name} {token}"));
        if !lock.granted.insert(token) {
            world.violation(format_args!(
                "L1: token {token} of {name} was granted twice"
            ));
        }
        if token <= lock.last {
            let last = lock.last;
            world.violation(format_args!(
                "L2, L6, L10: token {token} of {name} after {last}"
            ));
        }
        if request.above.is_some_and(|above| token <= above.get()) {
            world.violation(format_args!(
                "L10: token {token} of {name} is below its floor"
            ));
        }
        if lock.live.len() >= permits {
            world.violation(format_args!("L3: {name} was granted while it was held"));
        }
        let believing = lock.believing(world);
        if believing.len() >= permits {
            world.violation(format_args!(
                "L4: {name} was granted with {token} while {believing:?} believe"
            ));
        }
        lock.last = lock.last.max(token);
        lock.live.push(Live {
            holder: request.holder,
            token,
            expires,
            released: false,
        });
        self.granted.insert(*request.holder.as_bytes());
        self.seen.grants += 1;
    }

    /// Its sender knows that somebody else holds the lock.
    pub(crate) fn heard(&mut self, holder: &HolderId) {
        self.answered_for.insert(*holder.as_bytes());
    }

    /// A release is being sent.
    pub(crate) fn giving_back(&mut self, lease: &LeaseRef) {
        self.answered_for.insert(*lease.holder.as_bytes());
    }

    /// A holder has its guard.
    pub(crate) fn believes(
        &mut self,
        world: &World,
        name: &str,
        permits: u32,
        of: (HolderId, u64),
        belief: Belief,
    ) {
        let (holder, token) = of;
        self.answered_for.insert(*holder.as_bytes());
        let lock = self.lock(name);
        let newer = lock.granted.range(token + 1..).count();
        if permits == 1 && newer > 0 && belief.stands() && !lock.broken.contains(&token) {
            world.violation(format_args!(
                "L4: {token} of {name} is believed after a newer grant"
            ));
        }
        lock.believers.push(Believer {
            holder,
            token,
            belief,
            gone: false,
        });
    }

    /// Between two steps of a schedule.
    pub(crate) fn look(&mut self, world: &World) {
        for lock in self.locks.values_mut() {
            lock.believing(world);
        }
    }

    /// A renewal is being sent.
    pub(crate) fn renewing(&mut self, world: &World, lease: &LeaseRef) {
        let token = lease.token.map(|t| t.get());
        let lock = self.lock(lease.name.as_str());
        let sender = lock
            .believers
            .iter()
            .find(|b| b.holder == lease.holder && Some(b.token) == token);
        if sender.is_some_and(|sender| !sender.belief.stands()) {
            world.violation(format_args!(
                "L5: a renewal of {token:?} is sent for a holder that lost it or gave it up"
            ));
        }
    }

    pub(crate) fn renewed(&mut self, world: &World, lease: &LeaseRef, ttl: Ttl, answer: &Renewal) {
        let (now, name) = (world.now(), lease.name.as_str());
        let lock = self.lock(name);
        lock.lapse(now);
        let token = lease.token.map(|t| t.get());
        match (answer, lock.find(&lease.holder, token)) {
            (Renewal::Renewed, Some(live)) => {
                live.expires = now + nanos(ttl.duration().unwrap());
                self.seen.renewals += 1;
            }
            (Renewal::Lost, None) => {
                self.answered_for.insert(*lease.holder.as_bytes());
            }
            (Renewal::Renewed, None) => {
                world.violation(format_args!("L5: {token:?} of {name} was revived"));
            }
            (answer, _) => world.violation(format_args!("a good lease of {name}: {answer:?}")),
        }
    }

    pub(crate) fn released(
        &mut self,
        world: &World,
        lease: &LeaseRef,
        linger: Duration,
        answer: &Result<Release>,
    ) {
        let (now, name) = (world.now(), lease.name.as_str());
        let lock = self.lock(name);
        lock.lapse(now);
        let token = lease.token.map(|t| t.get());
        match (answer, lock.find(&lease.holder, token)) {
            (Ok(Release::Released), Some(live)) => {
                world.note(format_args!("release {name} {}", live.token));
                live.released = true;
                live.expires = now + nanos(linger);
            }
            (Ok(Release::NotHeld), None) => {}
            (answer, found) => world.violation(format_args!(
                "L5: release of {name}: {answer:?}, held: {}",
                found.is_some()
            )),
        }
    }

    pub(crate) fn broke(&mut self, world: &World, name: &str) {
        world.note(format_args!("break {name}"));
        let lock = self.lock(name);
        let tokens: Vec<_> = lock.live.drain(..).map(|live| live.token).collect();
        lock.broken.extend(tokens);
        self.seen.broken += 1;
    }

    pub(crate) fn floor_raised(&mut self, world: &World, name: &str, floor: u64) {
        world.note(format_args!("floor {name} {floor}"));
        let lock = self.lock(name);
        lock.last = lock.last.max(floor);
        self.seen.raised += 1;
    }

    fn resource(&mut self, name: &str) -> &mut Resource {
        self.resources.entry(name.to_owned()).or_default()
    }

    pub(crate) fn put(
        &mut self,
        world: &World,
        name: &str,
        value: &[u32],
        fence: &Fence,
        answer: &Result<Written>,
    ) {
        let (token, seq) = (fence.token().get(), fence.seq().unwrap_or(0));
        let resource = self.resource(name);
        match answer {
            Ok(written) if written.applied => {
                world.note(format_args!("put {name} {token}.{seq} {}", value.len()));
                resource.admits(world, fence, "a write");
                if token == resource.token && seq <= resource.seq {
                    world.violation(format_args!("S7: write {token}.{seq} came late to {name}"));
                }
                resource.raise(fence);
                resource.seq = seq;
                resource.value = value.to_vec();
                self.seen.writes += 1;
            }
            Ok(_) => {
                if (token, seq) != (resource.token, resource.seq) || resource.value != value {
                    world.violation(format_args!("S7: {token}.{seq} of {name} is no repeat"));
                }
            }
            Err(error) if error.kind() == ErrorKind::Fenced => {
                self.refused(world, name, fence);
            }
            Err(error) => world.violation(format_args!("the storage failed: {error}")),
        }
    }

    pub(crate) fn raised(
        &mut self,
        world: &World,
        name: &str,
        fence: &Fence,
        answer: &Result<Snapshot>,
    ) {
        let resource = self.resource(name);
        match answer {
            Ok(_) => {
                resource.admits(world, fence, "a raise");
                resource.raise(fence);
            }
            Err(error) if error.kind() == ErrorKind::Fenced => {
                self.refused(world, name, fence);
            }
            Err(error) => world.violation(format_args!("the storage failed: {error}")),
        }
    }

    /// S5, S2: what one step reads is what the account says.
    pub(crate) fn read(&mut self, world: &World, name: &str, value: &[u32]) {
        if self.resource(name).value != value {
            world.violation(format_args!("S5: {name} holds {value:?}"));
        }
    }

    fn refused(&mut self, world: &World, name: &str, fence: &Fence) {
        let token = fence.token().get();
        world.note(format_args!("fenced {name} {token}"));
        let resource = self.resource(name);
        let same = resource.tag == fence.holder();
        let seq = fence.seq().unwrap_or(0);
        if token > resource.token || token == resource.token && same && seq > resource.seq {
            world.violation(format_args!(
                "S10: {token} was refused at {}",
                resource.token
            ));
        }
        self.seen.fenced += 1;
    }

    pub(crate) fn acked(&mut self, name: &str, id: u32) {
        self.acked.entry(name.to_owned()).or_default().push(id);
    }

    pub(crate) fn acked_unfenced(&mut self, name: &str, id: u32) {
        let acked = self.acked_unfenced.entry(name.to_owned()).or_default();
        acked.push(id);
    }

    /// The control: the same value without a fence.
    pub(crate) fn unfenced(&mut self, name: &str) -> &mut Vec<u32> {
        self.unfenced.entry(name.to_owned()).or_default()
    }

    /// S6, and what is left of the leases, at the end.
    pub(crate) fn finish(&mut self, world: &World) {
        for (name, acked) in &self.acked {
            let value = &self.resources[name].value;
            for id in acked.iter().filter(|id| !value.contains(id)) {
                world.violation(format_args!(
                    "S6: acknowledged increment {id} of {name} is lost"
                ));
            }
        }
        for (name, acked) in &self.acked_unfenced {
            let value = self.unfenced.get(name).cloned().unwrap_or_default();
            let lost = acked.iter().filter(|id| !value.contains(id)).count();
            self.seen.lost_unfenced += lost as u64;
        }
        if !self.granted.is_subset(&self.answered_for) {
            world.violation("L7: something was granted that nobody took or gave back");
        }
        let now = world.now();
        for (name, lock) in &mut self.locks {
            lock.lapse(now);
            if !lock.live.is_empty() {
                world.violation(format_args!("{name} is still held when all is over"));
            }
            lock.believing(world);
        }
    }
}

impl Resource {
    fn admits(&self, world: &World, fence: &Fence, what: &str) {
        let token = fence.token().get();
        if token < self.token {
            let mark = self.token;
            world.violation(format_args!("S1, S4: {what} with {token} after {mark}"));
        }
        if token == self.token && self.tag != fence.holder() {
            world.violation(format_args!("S8: {what} with {token} of another holder"));
        }
    }

    fn raise(&mut self, fence: &Fence) {
        if fence.token().get() > self.token {
            self.token = fence.token().get();
            self.tag = fence.holder();
            self.seq = 0;
        }
    }
}

pub(crate) type Shared = Arc<std::sync::Mutex<Oracle>>;
