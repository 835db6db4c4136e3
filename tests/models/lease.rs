//! Clients that acquire, renew and release leases of one lock over a network that delays and loses
//! requests and answers: whether somebody may still believe in a lease that the store has given to
//! another (L3, L4), and whether a token is told twice (L1).
//!
//! Time passes in whole ticks. The store decides expiry by its own clock; clients only count from
//! moments of their own, so where their clock stands makes no difference.

use std::collections::BTreeSet;

use stateright::{Checker as _, HasDiscoveries, Model, Property};

const CLIENTS: u8 = 2;
/// How often a client may acquire.
const TRIES: u8 = 2;

/// The choices that the protocol makes. Each other one is a defect.
#[derive(Clone, Copy, Debug)]
struct Protocol {
    ttl: u8,
    /// Time stands still from here on: long enough for two lapses and what is late of the first.
    end: u8,
    /// A grant is believed for a TTL from when its request was sent, not from when its answer came.
    counts_from_the_request: bool,
    /// A renewal without an answer extends nothing.
    unknown_extends_nothing: bool,
    /// An answer that comes late is not taken for that of the next renewal.
    matches_answers: bool,
    /// The store renews and releases for the holder with its token only.
    compares_the_holder: bool,
    /// A lapsed grant is not renewed, though nobody has taken the lock.
    lapsed_is_lost: bool,
    /// The token is minted in the step that grants, and not read by a second request.
    minted_in_the_grant: bool,
    /// A grant that was not told is found again by the same request, and is no second one.
    request_is_remembered: bool,
}

const SOUND: Protocol = Protocol {
    ttl: 2,
    end: 5,
    counts_from_the_request: true,
    unknown_extends_nothing: true,
    matches_answers: true,
    compares_the_holder: true,
    lapsed_is_lost: true,
    minted_in_the_grant: true,
    request_is_remembered: true,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    last_token: u8,
    grant: Option<Grant>,
    clients: Vec<Client>,
    requests: BTreeSet<Request>,
    answers: BTreeSet<Answer>,
    /// Tokens that clients were told of their grants, with the request.
    told: BTreeSet<(u8, u8, u8)>,
    told_twice: bool,
    /// A grant that had lapsed was good again.
    revived: bool,
    /// The store granted one request twice while its first grant was good.
    doubled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Grant {
    client: u8,
    /// Of which acquire of the client.
    request: u8,
    token: u8,
    expires: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    tries: u8,
    /// It waits for an answer to its acquire since then.
    asks_since: Option<u8>,
    held: Option<Held>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Held {
    request: u8,
    token: u8,
    until: u8,
    renews_since: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Request {
    Acquire { client: u8, request: u8 },
    ReadToken { client: u8, request: u8 },
    Renew { client: u8, token: u8, sent: u8 },
    Release { client: u8, request: u8, token: u8 },
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Answer {
    Granted { client: u8, request: u8, token: u8 },
    Renewed { client: u8, token: u8, sent: u8 },
    Lost { client: u8, token: u8 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Tick,
    Ask(u8),
    /// The same request again: its answer did not come.
    AskAgain(u8),
    Renew(u8),
    GiveUpOnRenewal(u8),
    Release(u8),
    /// The store handles a request, whenever it arrives.
    Handle(Request),
    Hear(Answer),
    Lose(Answer),
}

impl State {
    fn believes(&self, client: u8) -> Option<&Held> {
        let held = self.clients[usize::from(client)].held.as_ref()?;
        (self.now < held.until).then_some(held)
    }

    fn client(&mut self, client: u8) -> &mut Client {
        &mut self.clients[usize::from(client)]
    }

    fn good(&self) -> Option<&Grant> {
        self.grant.as_ref().filter(|grant| self.now < grant.expires)
    }
}

impl Protocol {
    fn handle(&self, state: &mut State, request: Request) {
        let expires = state.now + self.ttl;
        match request {
            Request::Acquire { client, request } => {
                if let Some(good) = state.good() {
                    let own = good.client == client && good.request == request;
                    if own && self.request_is_remembered {
                        let token = good.token;
                        state.grant.as_mut().unwrap().expires = expires;
                        state.answers.insert(Answer::Granted {
                            client,
                            request,
                            token,
                        });
                        return;
                    }
                    if !own {
                        return;
                    }
                    state.doubled = true;
                }
                state.last_token += 1;
                let token = state.last_token;
                state.grant = Some(Grant {
                    client,
                    request,
                    token,
                    expires,
                });
                if self.minted_in_the_grant {
                    state.answers.insert(Answer::Granted {
                        client,
                        request,
                        token,
                    });
                } else {
                    // The client asks for the number next.
                    state
                        .requests
                        .insert(Request::ReadToken { client, request });
                }
            }
            Request::ReadToken { client, request } => {
                state.answers.insert(Answer::Granted {
                    client,
                    request,
                    token: state.last_token,
                });
            }
            Request::Renew {
                client,
                token,
                sent,
            } => {
                let lapsed = state.good().is_none();
                let ours = state.grant.as_ref().is_some_and(|grant| {
                    !self.compares_the_holder || (grant.client == client && grant.token == token)
                });
                if ours && (!lapsed || !self.lapsed_is_lost) {
                    state.revived |= lapsed;
                    state.grant.as_mut().unwrap().expires = expires;
                    state.answers.insert(Answer::Renewed {
                        client,
                        token,
                        sent,
                    });
                } else {
                    state.answers.insert(Answer::Lost { client, token });
                }
            }
            Request::Release { client, token, .. } => {
                let ours = state.grant.as_ref().is_some_and(|grant| {
                    !self.compares_the_holder || (grant.client == client && grant.token == token)
                });
                if ours {
                    state.grant = None;
                }
            }
        }
    }

    fn hear(&self, state: &mut State, answer: &Answer) {
        let now = state.now;
        match *answer {
            Answer::Granted {
                client,
                request,
                token,
            } => {
                let me = state.client(client);
                let awaited = me.tries == request;
                if let (Some(since), true) = (me.asks_since, awaited) {
                    let from = if self.counts_from_the_request {
                        since
                    } else {
                        now
                    };
                    me.asks_since = None;
                    me.held = Some(Held {
                        request,
                        token,
                        until: from + self.ttl,
                        renews_since: None,
                    });
                    state.told_twice |= state
                        .told
                        .iter()
                        .any(|(told, by, of)| *told == token && (*by, *of) != (client, request));
                    state.told.insert((token, client, request));
                }
            }
            Answer::Renewed {
                client,
                token,
                sent,
            } => {
                let from_request = self.counts_from_the_request;
                if let Some(held) = &mut state.client(client).held
                    && held.token == token
                    && let Some(since) = held.renews_since
                    && (since == sent || !self.matches_answers)
                    && now < held.until
                {
                    held.renews_since = None;
                    let from = if from_request { since } else { now };
                    held.until = held.until.max(from + self.ttl);
                }
            }
            Answer::Lost { client, token } => {
                let me = state.client(client);
                if me.held.as_ref().is_some_and(|held| held.token == token) {
                    me.held = None;
                }
            }
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            last_token: 0,
            grant: None,
            clients: vec![Client::default(); usize::from(CLIENTS)],
            requests: BTreeSet::new(),
            answers: BTreeSet::new(),
            told: BTreeSet::new(),
            told_twice: false,
            revived: false,
            doubled: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.now < self.end {
            steps.push(Step::Tick);
        }
        for client in 0..CLIENTS {
            let me = &state.clients[usize::from(client)];
            match &me.held {
                None if me.asks_since.is_none() && me.tries < TRIES => {
                    steps.push(Step::Ask(client));
                }
                None => {}
                Some(held) if state.now < held.until => {
                    steps.push(Step::Release(client));
                    match held.renews_since {
                        None => steps.push(Step::Renew(client)),
                        Some(since) if since < state.now => {
                            steps.push(Step::GiveUpOnRenewal(client));
                        }
                        Some(_) => {}
                    }
                }
                // It noticed; what it holds is lost for good.
                Some(_) if me.tries < TRIES => steps.push(Step::Ask(client)),
                Some(_) => {}
            }
            // An answer that took a tick may be lost.
            if me.asks_since.is_some_and(|since| since < state.now) {
                steps.push(Step::AskAgain(client));
            }
        }
        steps.extend(state.requests.iter().cloned().map(Step::Handle));
        for answer in &state.answers {
            steps.push(Step::Hear(answer.clone()));
            steps.push(Step::Lose(answer.clone()));
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let now = state.now;
        match step {
            Step::Tick => state.now += 1,
            Step::Ask(client) => {
                let me = state.client(client);
                me.tries += 1;
                me.held = None;
                me.asks_since = Some(now);
                let request = me.tries;
                state.requests.insert(Request::Acquire { client, request });
            }
            Step::AskAgain(client) => {
                let me = state.client(client);
                // Belief counts from the try that is answered; whichever that is, not before the
                // first, so the first is what a client that cannot tell them apart counts from.
                let request = me.tries;
                if !state.requests.insert(Request::Acquire { client, request }) {
                    return None;
                }
            }
            Step::Renew(client) => {
                let held = state.client(client).held.as_mut().unwrap();
                held.renews_since = Some(now);
                let token = held.token;
                state.requests.insert(Request::Renew {
                    client,
                    token,
                    sent: now,
                });
            }
            Step::GiveUpOnRenewal(client) => {
                let held = state.client(client).held.as_mut().unwrap();
                let since = held.renews_since.take();
                if !self.unknown_extends_nothing {
                    held.until = held.until.max(since.unwrap_or(now) + self.ttl);
                }
            }
            Step::Release(client) => {
                let held = state.client(client).held.take().unwrap();
                state.requests.insert(Request::Release {
                    client,
                    request: held.request,
                    token: held.token,
                });
            }
            Step::Handle(request) => {
                state.requests.remove(&request);
                self.handle(&mut state, request);
            }
            Step::Hear(answer) => {
                state.answers.remove(&answer);
                self.hear(&mut state, &answer);
            }
            Step::Lose(answer) => {
                state.answers.remove(&answer);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ALONE, |_, state: &State| {
                (0..CLIENTS).all(|client| {
                    state.believes(client).is_none_or(|held| {
                        state.good().is_none_or(|grant| {
                            (grant.client, grant.request) == (client, held.request)
                        })
                    })
                })
            }),
            Property::always(ONCE, |_, state: &State| !state.told_twice),
            Property::always(LAPSED, |_, state: &State| !state.revived),
            Property::always(SINGLE, |_, state: &State| !state.doubled),
            // Or the model shows nothing.
            Property::sometimes(HANDED, |_, state: &State| {
                let grant = state.good();
                grant.is_some_and(|grant| grant.client == 1 && state.believes(1).is_some())
                    && state.clients[0].tries == 1
                    && state.told.len() == 2
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        // A few requests under way at once show all that more would.
        state.requests.len() + state.answers.len() <= 2
    }
}

const ALONE: &str = "nobody believes in a lease that another has (L4)";
const ONCE: &str = "no token is told to two (L1)";
const LAPSED: &str = "a lapsed grant is not revived (L5)";
const SINGLE: &str = "one request has one grant (L7)";
const HANDED: &str = "the lock goes from one to the other";

#[test]
fn belief_ends_before_another_is_granted() {
    let checker = SOUND.checker().spawn_bfs().join();
    let found: BTreeSet<&str> = checker.discoveries().into_keys().collect();
    let states = checker.unique_state_count();
    assert_eq!(found, BTreeSet::from([HANDED]), "states={states}");
}

/// Asserts that this is what goes wrong first.
#[track_caller]
fn expect(broken: Protocol, property: &str) {
    let checker = broken
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let found = checker.discoveries().into_keys();
    let found: BTreeSet<&str> = found.filter(|name| *name != HANDED).collect();
    assert_eq!(found, BTreeSet::from([property]), "{broken:?}");
}

#[test]
fn a_deadline_from_the_time_of_the_answer_outlives_the_lease() {
    let late = Protocol {
        counts_from_the_request: false,
        ..SOUND
    };
    expect(late, ALONE);
}

#[test]
fn a_renewal_of_unknown_outcome_must_not_extend() {
    let hopeful = Protocol {
        unknown_extends_nothing: false,
        // Time to renew, to give up, and to believe on.
        ttl: 3,
        end: 6,
        ..SOUND
    };
    expect(hopeful, ALONE);
}

#[test]
fn the_late_answer_of_a_renewal_must_not_count_for_the_next() {
    let confused = Protocol {
        matches_answers: false,
        ..SOUND
    };
    expect(confused, ALONE);
}

#[test]
fn a_late_release_must_not_free_the_next_holders_lock() {
    let careless = Protocol {
        compares_the_holder: false,
        ..SOUND
    };
    expect(careless, ALONE);
}

#[test]
fn a_lapsed_lease_must_not_be_renewed() {
    let reviving = Protocol {
        lapsed_is_lost: false,
        ..SOUND
    };
    expect(reviving, LAPSED);
}

#[test]
fn a_token_that_a_second_request_reads_may_be_the_next_holders() {
    let two_requests = Protocol {
        minted_in_the_grant: false,
        ..SOUND
    };
    expect(two_requests, ONCE);
}

#[test]
fn a_repeated_request_must_find_its_own_grant() {
    let forgetful = Protocol {
        request_is_remembered: false,
        ..SOUND
    };
    expect(forgetful, SINGLE);
}
