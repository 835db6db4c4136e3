//! What every lock backend passes.

mod grants;
mod names;
mod operator;
mod permits;
mod renewal;
mod tokens;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use super::{Case, LeaseHarness, block_on, long_ttl, odd_names, skipped, token};
use crate::error::ErrorKind;
use crate::lease::{
    AcquireRequest, Attempt, Contention, Grant, HolderState, LeaseRef, LeaseStore, LockState,
    Release, Renewal, Ttl,
};
use crate::name::LockName;
use crate::token::FencingToken;

/// The one list of lock cases: the table, the tests that the macro makes, and what runs them.
macro_rules! cases {
    ($d:tt; $($module:ident::$name:ident $promises:literal $proves:literal)*) => {
        /// All lock cases.
        pub const CASES: &[Case] = &[$(
            Case { name: stringify!($name), promises: $promises, proves: $proves },
        )*];

        /// Runs the case of this name on a fresh harness. The tests that
        /// [`lease_conformance!`](crate::lease_conformance) makes call this.
        ///
        /// # Panics
        /// Where the backend does not pass, or there is no such case.
        pub fn run<H: LeaseHarness>(case: &str, harness: impl Future<Output = H>) {
            block_on(case, async {
                let harness = harness.await;
                if skipped(CASES, harness.skips(), case) {
                    return;
                }
                let lab = Lab::new(&harness);
                match case {
                    $(stringify!($name) => Box::pin($module::$name(&lab)).await,)*
                    other => panic!("there is no lock case of this name: {other:?}"),
                }
            });
        }

        /// Makes one `#[test]` for each lock case, on the harness that the expression gives.
        ///
        /// See [`conformance`](mod@crate::conformance).
        #[macro_export]
        macro_rules! lease_conformance {
            ($d harness:expr) => {$(
                #[test]
                fn $name() {
                    $d crate::conformance::lease::run(stringify!($name), async { $d harness });
                }
            )*};
        }
    };
}

cases! {$;
    grants::a_held_lock_is_not_granted_to_another "L3"
        "A second holder, of either client, is told who holds the lock and until when."
    grants::sixteen_at_once_are_one_grant "L3"
        "Of sixteen holders that ask at the same moment through two clients, one is granted."
    grants::the_same_request_finds_its_own_grant "L7"
        "A repeated request gets the same token and a whole TTL, through either client."
    grants::one_request_sent_twice_at_once_is_one_grant "L7"
        "Copies of one request that arrive together have one grant between them."
    grants::a_lost_answer_is_found_by_the_retry "L7"
        "After a grant whose answer was lost, the same request gets that grant."
    grants::a_lost_answer_is_cleaned_up_by_the_holder_alone "L7"
        "A release without a token gives up whatever the lost answer granted."
    grants::an_acquire_dropped_on_the_way_is_one_grant_at_most "L7"
        "After an acquire that was cancelled, its request and its release still work."
    grants::the_ttl_given_is_at_least_the_ttl_asked "L4"
        "TTLs from 100 ms to a year are given in full, and the effective one is told."
    grants::a_lease_without_end_is_taken_or_refused "L5"
        "A backend that sees dead holders takes a lease without expiry; others refuse it."
    grants::a_detached_grant_is_a_grant "L5"
        "A detached grant is held, renewed, lapses and is released like others."
    grants::a_lapsed_lock_is_granted_to_the_next "L3 L6"
        "After the lapse a single try succeeds, with a larger token."
    grants::a_lapsed_grant_is_not_revived_by_its_request "L5 L6"
        "The request of a lapsed grant gets a new, larger token, or nothing."
    renewal::renewing_keeps_the_token_and_extends "L5"
        "A renewed lease outlasts its first TTL with the token it had, through either client."
    renewal::renewing_needs_the_holder_and_the_token "L5"
        "Another holder, another token or another name is told `Lost`, and extends nothing."
    renewal::releasing_needs_the_holder_and_the_token "L5"
        "Another holder, another token or another name frees nothing."
    renewal::a_lapsed_lease_is_not_renewed_though_nobody_took_it "L5"
        "A renewal after the lapse is `Lost`, and the lock stays free."
    renewal::a_lapsed_lease_is_not_released "L5"
        "A release after the lapse is `NotHeld`."
    renewal::a_former_holder_does_not_touch_the_next "L5"
        "After a takeover, renew, release and acquire of the former holder change nothing."
    renewal::after_a_break_the_holder_has_lost "L5 L6"
        "A forced release is a loss for the holder, and the next token is larger."
    renewal::a_released_lease_is_gone "L5"
        "After a release, the lock is free at once, and renew and release say so."
    renewal::a_lingering_release_keeps_others_out_and_then_frees "L5"
        "A release with a linger time keeps the lock held for that time and no longer."
    renewal::a_lingering_lease_is_not_renewed "L5"
        "A renewal that arrives after a lingering release does not prolong it."
    renewal::a_batch_is_answered_each_in_order "L5"
        "A batch of good and lost leases has one answer for each, in order."
    renewal::a_holder_is_named_without_its_token "L7"
        "Without a token, renew and release mean whatever grant the holder has, and no other's."
    renewal::two_hundred_locks_are_held_at_once "L5"
        "One client holds, renews and releases 200 locks."
    tokens::tokens_increase_over_both_clients "L1 L2"
        "Tokens of a name are unique and increase over the grants of both clients."
    tokens::concurrent_grants_do_not_overlap "L1 L2 L3"
        "Of racing holders one is inside at a time, and their tokens are unique and increase."
    tokens::tokens_do_not_go_down "L6 L10"
        "The next token is larger after release, lapse, break and clean-up."
    tokens::the_token_told_is_the_token_kept "L8"
        "The token of a grant is the one that the other client sees."
    tokens::above_makes_the_next_token_larger "L10"
        "A grant is larger than the watermark that a holder met, and never smaller for it."
    tokens::an_implausible_above_is_refused_and_harms_nothing "S11"
        "A forged watermark does not use the tokens up."
    tokens::raising_the_floor_leaves_the_grant "L10"
        "A raised floor makes the next token larger, and the present grant stays."
    tokens::the_floor_is_never_lowered "L10"
        "Raising to a smaller number changes nothing."
    tokens::a_raised_floor_survives_a_clean_up "L10"
        "Clean-up of an idle name does not forget its floor."
    tokens::an_implausible_floor_is_refused_and_harms_nothing "S11"
        "A floor out of bounds is refused, and the next token is an ordinary one."
    tokens::tokens_end_at_the_ceiling_and_never_wrap "L9"
        "After the last token an acquire is `Exhausted`, again and again, and grants nothing."
    tokens::tokens_survive_a_restart "L8 L10"
        "After a restart the next token of every name is larger than those told before."
    permits::n_permits_are_n_holders "L1 L3"
        "A semaphore has as many holders as permits, each with its own token."
    permits::a_hundred_holders_share_the_largest_capacity "L1 L3"
        "A semaphore of 1000 permits takes, renews and releases a hundred holders."
    permits::racing_for_permits_grants_exactly_as_many "L3"
        "Of sixteen holders that race for four permits, four are granted."
    permits::another_capacity_is_refused_while_held "L3"
        "Another number of permits is `Invalid` with both numbers while held, and taken when free."
    permits::a_lapsed_permit_frees_itself_only "L3 L5"
        "One lapsed permit makes room for one holder."
    permits::a_break_takes_every_permit "L5"
        "A forced release ends all grants of a semaphore."
    names::odd_names_are_different_locks "L3"
        "24 odd names are 24 locks that come back exactly: case, Unicode forms, separators, 512 bytes."
    names::a_lock_and_a_path_below_it_do_not_meet "L3"
        "Every operation on `a` leaves `a/b` as it was."
    names::names_are_listed_by_prefix_in_order "L10"
        "A list has the names with the raw prefix, in byte order; no character is a wildcard."
    names::a_list_is_read_in_pages "L10"
        "Pages by `after` and `limit` show each name once."
    operator::an_operator_sees_the_holder_and_not_its_secret "L5"
        "Inspect shows token, tag, TTL and info, and no form of the holder id."
    operator::the_longest_info_comes_back "L5"
        "Host, label and trace id of the longest kind are shown in full, for each holder."
    operator::an_unknown_name_has_no_record "L5"
        "A name that nobody used answers every operation, and gets no record by it."
    operator::a_free_lock_shows_no_holders "L3"
        "Released and lapsed grants are not shown."
    operator::breaking_returns_the_state_before "L6"
        "A forced release tells whom it evicted, and frees the lock for both clients."
    operator::cleaning_up_removes_idle_records_only "L10"
        "Clean-up leaves held and recently used records, and never a smaller token."
    operator::the_profile_is_sane_and_the_same_for_both_clients "S9"
        "Kind and realm make a domain; both clients name the same one."
    operator::a_probe_answers "L8"
        "A probe of a fresh store finds nothing bad."
    waiting::a_watcher_hears_of_a_release "L3"
        "A release by one client wakes a waiter of the other."
    waiting::a_watcher_hears_of_a_break "L3"
        "A forced release wakes waiters."
    waiting::a_change_before_the_first_call_is_heard "L3"
        "A change between the making of a watch and its first call is not lost."
    waiting::a_cancelled_wait_loses_no_change "L3"
        "A change after a cancelled call is reported to the next one."
    waiting::many_waiters_all_hear "L3"
        "Each of ten watches hears of one release."
}

/// A harness and its two clients.
pub(super) struct Lab<'a> {
    harness: &'a dyn LeaseHarness,
    a: Arc<dyn LeaseStore>,
    b: Arc<dyn LeaseStore>,
}

/// A grant and the request that got it.
#[derive(Clone, Debug)]
struct Taken {
    request: AcquireRequest,
    grant: Grant,
}

impl<'a> Lab<'a> {
    fn new(harness: &'a dyn LeaseHarness) -> Self {
        let [a, b] = harness.clients();
        Self { harness, a, b }
    }

    /// Both clients in turn.
    fn each(&self) -> [&Arc<dyn LeaseStore>; 2] {
        [&self.a, &self.b]
    }

    fn short_ttl(&self) -> Ttl {
        let ttl = self.harness.short_ttl().max(self.a.profile().ttl_min);
        Ttl::new(ttl).expect("the harness's short TTL is in range")
    }

    /// A request whose grant a case lets lapse.
    fn short(&self, name: &str) -> AcquireRequest {
        AcquireRequest::new(lock(name), self.short_ttl())
    }

    async fn expire(&self, taken: &Taken) {
        let ttl = taken.grant.ttl.duration().expect("a grant with an expiry");
        self.harness.expire(&taken.request.name, ttl).await;
    }
}

impl Taken {
    fn token(&self) -> FencingToken {
        self.grant.token
    }

    fn lease(&self) -> LeaseRef {
        LeaseRef {
            name: self.request.name.clone(),
            holder: self.request.holder,
            token: Some(self.grant.token),
        }
    }
}

fn lock(name: &str) -> LockName {
    LockName::new(name).expect("BUG: a case uses valid names")
}

/// A request whose grant outlasts the case.
fn long(name: &str) -> AcquireRequest {
    AcquireRequest::new(lock(name), long_ttl())
}

async fn take(store: &Arc<dyn LeaseStore>, request: AcquireRequest) -> Taken {
    match store.acquire(&request).await {
        Ok(Attempt::Granted(grant)) => Taken { request, grant },
        other => panic!("expected a grant of name={:?}, got {other:?}", request.name),
    }
}

async fn refuse(store: &Arc<dyn LeaseStore>, request: &AcquireRequest) -> Contention {
    match store.acquire(request).await {
        Ok(Attempt::Held(contention)) => contention,
        other => panic!("expected name={:?} to be held, got {other:?}", request.name),
    }
}

/// Asserts that another holder is kept out, through both clients.
async fn assert_held(lab: &Lab<'_>, request: &AcquireRequest) {
    for store in lab.each() {
        let mut other = AcquireRequest::new(request.name.clone(), request.ttl);
        other.permits = request.permits;
        refuse(store, &other).await;
    }
}

async fn give(store: &Arc<dyn LeaseStore>, taken: &Taken) {
    let answer = store.release(&taken.lease(), Duration::ZERO).await;
    assert_eq!(answer.expect("a release is answered"), Release::Released);
}

async fn renew(store: &Arc<dyn LeaseStore>, lease: LeaseRef, ttl: Ttl) -> Renewal {
    let mut answers = store.renew(&[(lease, ttl)]).await;
    assert_eq!(answers.len(), 1, "one answer for one lease");
    answers.remove(0)
}

fn assert_renewed(answer: &Renewal) {
    assert!(
        matches!(answer, Renewal::Renewed),
        "expected Renewed, got {answer:?}"
    );
}

fn assert_lost(answer: &Renewal) {
    assert!(
        matches!(answer, Renewal::Lost),
        "expected Lost, got {answer:?}"
    );
}

async fn release(store: &Arc<dyn LeaseStore>, lease: &LeaseRef) -> Release {
    let answer = store.release(lease, Duration::ZERO).await;
    answer.expect("a release is answered")
}

async fn state(store: &Arc<dyn LeaseStore>, name: &LockName) -> Option<LockState> {
    store.inspect(name).await.expect("inspect answers")
}

async fn holders(store: &Arc<dyn LeaseStore>, name: &LockName) -> Vec<HolderState> {
    state(store, name)
        .await
        .map_or(Vec::new(), |state| state.holders)
}

/// A token near to, but not, the one that is told.
fn another_token(token: FencingToken) -> FencingToken {
    FencingToken::new(token.get() + 1).expect("BUG: a case's tokens are small")
}

fn kind_of<T: std::fmt::Debug>(result: crate::Result<T>) -> ErrorKind {
    result.expect_err("expected a refusal").kind()
}
