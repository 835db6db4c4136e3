//! Holders whose requests may be delayed without bound, duplicated and reordered, at a storage that
//! judges them: which protocols lose an update, let a smaller token land after a larger one, or
//! change what a newer holder has read.
//!
//! A holder reads each resource, adds a mark of its own to the list that it read, and writes the list
//! back: a read-modify-write. A lease may lapse at any moment, which is what a pause amounts to.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use fencelock::fence::{Domain, HolderTag};
use fencelock::token::{Admission, Intent, Watermark, judge};
use fencelock::{Fence, FencingToken};
use stateright::{Checker as _, Model, Property};

/// What is varied.
#[derive(Clone, Copy, Debug)]
struct Protocol {
    holders: u8,
    resources: u8,
    writes: u8,
    check: Check,
    shows: Shows,
    raise: Raise,
    /// The network may deliver a packet again.
    duplicates: bool,
    /// A fail-over hands one number out twice.
    repeats_tokens: bool,
}

const SOUND: Protocol = Protocol {
    holders: 2,
    resources: 1,
    writes: 1,
    check: Check::Judge,
    shows: Shows::Fence,
    raise: Raise::AllFirst,
    duplicates: false,
    repeats_tokens: false,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    /// The last writer wins.
    None,
    /// The library's rule, in the same step as the write.
    Judge,
    /// The rule is applied by the client to what it read, and the write goes through if the
    /// resource's tag is unchanged. The tag is that of the whole record: a raise changes it.
    SwapRecord,
    /// The same, but the tag is that of the value alone, as where the watermark is kept beside the
    /// value: in the metadata of an object.
    SwapValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shows {
    Number,
    /// Token, holder and domain, without a sequence.
    Holder,
    /// All of it.
    Fence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Raise {
    Never,
    /// Each resource just before it is read, one after the other.
    EachBeforeItsRead,
    /// All resources before any is read.
    AllFirst,
}

/// A mark that a holder adds: holder and number of its write.
type Mark = (u8, u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    holders: Vec<Holder>,
    last_token: u64,
    locked: bool,
    network: BTreeSet<Packet>,
    resources: Vec<Resource>,
    /// A write of a smaller token was accepted after one of a larger.
    disordered: bool,
    /// A write of a smaller token was accepted after a holder of a larger had begun to read.
    unstable: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Holder {
    token: Option<u64>,
    /// What it does next, of its plan.
    at: usize,
    has_read: bool,
    seen: Vec<Vec<Mark>>,
    tags: Vec<Tag>,
    /// Marks that it was told are written.
    acknowledged: BTreeSet<(u8, Mark)>,
}

/// What a conditional write compares.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Tag {
    version: u64,
    value: Vec<Mark>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Resource {
    watermark: Option<(u64, Option<u8>, u64)>,
    value: Vec<Mark>,
    version: u64,
    largest_accepted: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Packet {
    holder: u8,
    resource: u8,
    request: Request,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Request {
    Read,
    Raise,
    /// Sequence, value, and the tag that it expects.
    Write(u8, Vec<Mark>, Tag),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Acquire(u8),
    Lapse,
    Deliver(Packet),
}

/// One entry of a holder's plan.
#[derive(Clone, Copy, Debug)]
enum Planned {
    Read(u8),
    Raise(u8),
    /// All writes at once: they overtake each other.
    Write,
}

impl Protocol {
    fn plan(&self) -> Vec<Planned> {
        let all = 0..self.resources;
        let mut plan = Vec::new();
        match self.raise {
            Raise::Never => plan.extend(all.map(Planned::Read)),
            Raise::EachBeforeItsRead => {
                plan.extend(all.flat_map(|r| [Planned::Raise(r), Planned::Read(r)]));
            }
            Raise::AllFirst => {
                plan.extend(all.clone().map(Planned::Raise));
                plan.extend(all.map(Planned::Read));
            }
        }
        plan.push(Planned::Write);
        plan
    }

    fn fence(&self, holder: u8, token: u64, seq: u8) -> Fence {
        let token = FencingToken::new(token).unwrap();
        if self.shows == Shows::Number {
            return Fence::from(token);
        }
        static DOMAIN: LazyLock<Domain> =
            LazyLock::new(|| Domain::new("model", "realm", &"lock".parse().unwrap()));
        let fence = Fence::new(token, HolderTag::from_bytes([holder; 16]), DOMAIN.clone());
        match self.shows {
            Shows::Fence => fence.with_seq(u64::from(seq)),
            Shows::Number | Shows::Holder => fence.without_seq(),
        }
    }

    /// Lets a holder do what it does next.
    fn go_on(&self, state: &mut State, holder: u8) {
        let me = &state.holders[usize::from(holder)];
        let packet = |resource, request| Packet {
            holder,
            resource,
            request,
        };
        match self.plan().get(me.at) {
            None => {}
            Some(Planned::Read(resource)) => {
                state.network.insert(packet(*resource, Request::Read));
            }
            Some(Planned::Raise(resource)) => {
                state.network.insert(packet(*resource, Request::Raise));
            }
            Some(Planned::Write) => {
                for resource in 0..self.resources {
                    let mut value = me.seen[usize::from(resource)].clone();
                    for seq in 1..=self.writes {
                        value.push((holder, seq));
                        let tag = me.tags[usize::from(resource)].clone();
                        let request = Request::Write(seq, value.clone(), tag);
                        state.network.insert(packet(resource, request));
                    }
                }
            }
        }
    }

    /// What the storage does with a packet, and its answer at the holder. A lost answer is one that
    /// the holder does not get; it is then as stuck as where the packet is never delivered.
    fn deliver(&self, state: &mut State, packet: &Packet) {
        // A read or a raise that comes again changes nothing.
        if !self.duplicates || !matches!(packet.request, Request::Write(..)) {
            state.network.remove(packet);
        }
        let (h, r) = (usize::from(packet.holder), usize::from(packet.resource));
        let token = state.holders[h].token.unwrap();
        match &packet.request {
            Request::Read => {
                let resource = &state.resources[r];
                let (value, tag) = (resource.value.clone(), resource.tag());
                let mark = resource.watermark.map(|(mark, ..)| mark);
                // Whoever compares and swaps judges by what it reads.
                let judges = self.raise != Raise::Never && self.check != Check::Judge;
                let me = &mut state.holders[h];
                if !matches!(self.plan().get(me.at), Some(Planned::Read(at)) if *at == packet.resource)
                {
                    // A duplicate, whose answer nobody waits for.
                    return;
                }
                if judges && mark > Some(token) {
                    return;
                }
                me.seen[r] = value;
                me.tags[r] = tag;
                me.has_read = true;
                me.at += 1;
                self.go_on(state, packet.holder);
            }
            Request::Raise => {
                let fence = self.fence(packet.holder, token, 0);
                if self.admit(&mut state.resources[r], &fence, Intent::Raise) == Answer::Refused {
                    return;
                }
                let me = &mut state.holders[h];
                if matches!(self.plan().get(me.at), Some(Planned::Raise(at)) if *at == packet.resource)
                {
                    me.at += 1;
                    self.go_on(state, packet.holder);
                }
            }
            Request::Write(seq, value, expected) => {
                let fence = self.fence(packet.holder, token, *seq);
                let resource = &mut state.resources[r];
                let same = match self.check {
                    Check::None | Check::Judge => true,
                    Check::SwapRecord => resource.tag().version == expected.version,
                    Check::SwapValue => resource.value == expected.value,
                };
                if !same {
                    return;
                }
                // Whoever compares and swaps judged what it had read; what is there now is not
                // looked at again.
                let answer = match self.check {
                    Check::None => Answer::Applied,
                    Check::Judge => self.admit(resource, &fence, Intent::Write),
                    Check::SwapRecord | Check::SwapValue => {
                        resource.remember(token, packet.holder, *seq);
                        Answer::Applied
                    }
                };
                match answer {
                    Answer::Refused => return,
                    Answer::Repeated => {}
                    Answer::Applied => {
                        resource.value.clone_from(value);
                        // Counted only where it is compared, so that repeats do not count for ever.
                        if self.check == Check::SwapRecord {
                            resource.version += 1;
                        }
                        state.disordered |= token < resource.largest_accepted;
                        resource.largest_accepted = resource.largest_accepted.max(token);
                        state.unstable |= state
                            .holders
                            .iter()
                            .any(|other| other.has_read && other.token > Some(token));
                    }
                }
                let mark = (packet.resource, (packet.holder, *seq));
                state.holders[h].acknowledged.insert(mark);
            }
        }
    }

    fn admit(&self, resource: &mut Resource, fence: &Fence, intent: Intent) -> Answer {
        let current = resource.watermark.map(|(token, holder, seq)| Watermark {
            token: FencingToken::new(token).unwrap(),
            holder: holder.map(|tag| HolderTag::from_bytes([tag; 16])),
            seq,
            domain: None,
        });
        match judge(current.as_ref(), fence, intent, 0) {
            Ok(Admission::Apply(next)) => {
                resource.watermark = Some((
                    next.token.get(),
                    next.holder.map(|tag| tag.as_bytes()[0]),
                    next.seq,
                ));
                if intent == Intent::Raise && self.check == Check::SwapRecord {
                    resource.version += 1;
                }
                Answer::Applied
            }
            Ok(Admission::Repeat(_)) => Answer::Repeated,
            Err(_) => Answer::Refused,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Applied,
    Repeated,
    Refused,
}

impl Resource {
    fn tag(&self) -> Tag {
        Tag {
            version: self.version,
            value: self.value.clone(),
        }
    }

    fn remember(&mut self, token: u64, holder: u8, seq: u8) {
        let larger = self.watermark.is_none_or(|(mark, ..)| mark <= token);
        if larger {
            self.watermark = Some((token, Some(holder), u64::from(seq)));
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let resources = usize::from(self.resources);
        let holder = Holder {
            token: None,
            at: 0,
            has_read: false,
            seen: vec![Vec::new(); resources],
            tags: vec![Tag::default(); resources],
            acknowledged: BTreeSet::new(),
        };
        vec![State {
            holders: vec![holder; usize::from(self.holders)],
            last_token: 0,
            locked: false,
            network: BTreeSet::new(),
            resources: vec![Resource::default(); resources],
            disordered: false,
            unstable: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.locked {
            steps.push(Step::Lapse);
        } else {
            let idle = (0..self.holders).filter(|h| state.holders[usize::from(*h)].token.is_none());
            // Which of the idle ones is next makes no difference.
            steps.extend(idle.take(1).map(Step::Acquire));
        }
        steps.extend(state.network.iter().cloned().map(Step::Deliver));
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Lapse => state.locked = false,
            Step::Acquire(holder) => {
                state.locked = true;
                let repeats = self.repeats_tokens && state.last_token == 2;
                if !repeats {
                    state.last_token += 1;
                }
                state.holders[usize::from(holder)].token = Some(state.last_token);
                self.go_on(&mut state, holder);
            }
            Step::Deliver(packet) => self.deliver(&mut state, &packet),
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // S6
            Property::always(LOST, |_, state: &State| {
                state.holders.iter().all(|holder| {
                    holder.acknowledged.iter().all(|(resource, mark)| {
                        state.resources[usize::from(*resource)].value.contains(mark)
                    })
                })
            }),
            // S4
            Property::always(ORDER, |_, state: &State| !state.disordered),
            // S5
            Property::always(STABLE, |_, state: &State| !state.unstable),
            // Or the model shows nothing.
            Property::sometimes(TWO, |_, state: &State| {
                state.resources.iter().all(|r| r.value.len() >= 2)
            }),
        ]
    }
}

const TWO: &str = "two updates are there";
const LOST: &str = "no acknowledged update is lost";
const ORDER: &str = "tokens of writes do not decrease";
const STABLE: &str = "what a newer holder reads is stable";

/// Visits every state, and asserts that exactly these properties fail.
#[track_caller]
fn expect(protocol: Protocol, broken: &[&str]) {
    let checker = protocol.checker().spawn_bfs().join();
    let found: BTreeSet<&str> = checker
        .discoveries()
        .into_keys()
        .filter(|name| [LOST, ORDER, STABLE].contains(name))
        .collect();
    let states = checker.unique_state_count();
    assert_eq!(
        found,
        broken.iter().copied().collect(),
        "states={states} {protocol:?}"
    );
    assert!(checker.discovery(TWO).is_some(), "{protocol:?}");
}

#[test]
fn raising_before_reading_loses_nothing() {
    expect(SOUND, &[]);
    expect(
        Protocol {
            holders: 3,
            ..SOUND
        },
        &[],
    );
}

#[test]
fn without_fencing_updates_are_lost_and_land_out_of_order() {
    let unfenced = Protocol {
        check: Check::None,
        raise: Raise::Never,
        ..SOUND
    };
    expect(unfenced, &[LOST, ORDER, STABLE]);
}

#[test]
fn a_check_without_a_raise_keeps_the_order_and_loses_updates() {
    let naive = Protocol {
        raise: Raise::Never,
        ..SOUND
    };
    expect(naive, &[LOST, STABLE]);
}

#[test]
fn an_equal_token_of_two_holders_needs_the_holder_in_the_fence() {
    let repeated = Protocol {
        holders: 3,
        repeats_tokens: true,
        ..SOUND
    };
    expect(repeated, &[]);
    let by_number = Protocol {
        shows: Shows::Number,
        ..repeated
    };
    expect(by_number, &[LOST]);
}

#[test]
fn writes_that_overtake_each_other_need_the_sequence() {
    let pipelined = Protocol { writes: 2, ..SOUND };
    expect(pipelined, &[]);
    let duplicated = Protocol {
        duplicates: true,
        ..pipelined
    };
    expect(duplicated, &[]);
    for protocol in [pipelined, duplicated] {
        let without_sequence = Protocol {
            shows: Shows::Holder,
            ..protocol
        };
        expect(without_sequence, &[LOST]);
    }
}

#[test]
fn several_resources_are_all_raised_before_any_is_read() {
    let both = Protocol {
        resources: 2,
        ..SOUND
    };
    expect(both, &[]);
    let one_by_one = Protocol {
        raise: Raise::EachBeforeItsRead,
        ..both
    };
    expect(one_by_one, &[STABLE]);
    let naive = Protocol {
        raise: Raise::Never,
        ..both
    };
    expect(naive, &[LOST, STABLE]);
}

#[test]
fn a_compare_and_swap_fences_where_a_raise_changes_what_is_compared() {
    let sound = Protocol {
        check: Check::SwapRecord,
        ..SOUND
    };
    expect(sound, &[]);
    let beside_the_value = Protocol {
        check: Check::SwapValue,
        ..sound
    };
    expect(beside_the_value, &[STABLE]);
    // No update is lost without any token, and the order of the tokens means nothing.
    let without_tokens = Protocol {
        raise: Raise::Never,
        ..sound
    };
    expect(without_tokens, &[ORDER, STABLE]);
}
