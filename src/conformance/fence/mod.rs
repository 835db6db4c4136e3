//! What every fenced storage passes.

mod domains;
mod races;
mod repeats;
mod stale;
mod values;

use std::sync::Arc;

use super::{Case, FenceHarness, block_on, missing_hook, odd_names, skipped, token};
use crate::body::Body;
use crate::error::{Error, ErrorKind};
use crate::fence::{Domain, Fence, FencedStore, HolderTag, Snapshot, Written};
use crate::name::ResourceName;
use crate::token::FencingToken;

/// The one list of storage cases: the table, the tests that the macro makes, and what runs them.
macro_rules! cases {
    ($d:tt; $($module:ident::$name:ident $promises:literal $proves:literal)*) => {
        /// All storage cases.
        pub const CASES: &[Case] = &[$(
            Case { name: stringify!($name), promises: $promises, proves: $proves },
        )*];

        /// Runs the case of this name on a fresh harness. The tests that
        /// [`fence_conformance!`](crate::fence_conformance) makes call this.
        ///
        /// # Panics
        /// Where the storage does not pass, or there is no such case.
        pub fn run<H: FenceHarness>(case: &str, harness: impl Future<Output = H>) {
            block_on(case, async {
                let harness = harness.await;
                if skipped(CASES, harness.skips(), case) {
                    return;
                }
                let lab = Lab::new(&harness);
                match case {
                    $(stringify!($name) => Box::pin($module::$name(&lab)).await,)*
                    other => panic!("there is no storage case of this name: {other:?}"),
                }
            });
        }

        /// Makes one `#[test]` for each storage case, on the harness that the expression gives.
        ///
        /// See [`conformance`](mod@crate::conformance).
        #[macro_export]
        macro_rules! fence_conformance {
            ($d harness:expr) => {$(
                #[test]
                fn $name() {
                    $d crate::conformance::fence::run(stringify!($name), async { $d harness });
                }
            )*};
        }
    };
}

cases! {$;
    stale::a_stale_put_is_refused_and_the_value_stands "S1 S10"
        "After a put with 34, one with 33 is `Fenced` with both numbers, through either client."
    stale::a_stale_raise_and_delete_are_refused "S1"
        "A raise and a delete with a smaller token are refused and change nothing."
    stale::a_raise_refuses_what_is_below_it "S1"
        "After a raise to 40, every operation with 39 is refused, though nothing was written."
    stale::a_refused_write_leaves_nothing "S1 S10"
        "A refused first write of another token leaves value, writer and watermark as they were."
    stale::deleting_keeps_the_watermark "S1"
        "After a delete, a smaller token is still refused."
    stale::deleting_what_is_not_there_raises "S1"
        "A delete of a resource without a value succeeds and counts for the watermark."
    stale::one_bad_number_cannot_brick_a_resource "S11"
        "A token of 2^62 is refused by every operation, and ordinary ones go on."
    stale::first_tokens_of_counters_and_of_clocks_pass "S11"
        "1 and the present time in microseconds are both good first tokens."
    stale::watermarks_survive_a_restart "S3"
        "After a restart, value, writer and watermark are there, and stale tokens are refused."
    repeats::an_equal_token_is_for_its_holder_only "S8"
        "The holder of the highest token goes on with it; another with the same number is refused."
    repeats::own_writes_are_ordered "S7"
        "An older sequence of the same holder is refused, and the later value stands."
    repeats::a_repeat_is_acknowledged_and_not_applied "S7"
        "The same write again is acknowledged as applied before, and changes nothing."
    repeats::a_repeated_delete_is_acknowledged "S7"
        "The same delete again is acknowledged, and does not remove what came later."
    repeats::a_repeat_after_a_higher_token_is_refused "S1 S7"
        "A repeat that arrives after a newer holder was there is stale."
    repeats::a_raise_is_not_a_write "S7"
        "Raises with a sequence neither use it up nor are refused for it."
    repeats::sequences_begin_anew_with_each_token "S7"
        "A new holder's first sequence passes, whatever its predecessor's was."
    repeats::shuffled_sequences_leave_the_last "S7"
        "Of twenty writes of one holder that arrive in any order, the last one's value stands."
    repeats::a_lost_answer_can_be_asked_for_again "S7 S10"
        "A put whose answer was lost is retried and was applied once."
    repeats::bare_numbers_are_ordered "S7"
        "Without holder and sequence, an equal number writes again and a smaller one is refused."
    domains::another_lock_is_refused "S9"
        "Tokens of another lock are `DomainMismatch`, larger ones too, and change nothing."
    domains::a_rebind_moves_a_resource_to_another_lock "S9"
        "A rebind raises, keeps the value, and from then on refuses the former lock."
    domains::a_rebind_that_does_not_raise_is_refused "S9"
        "A rebind with an equal or a smaller token is `Fenced`."
    domains::a_bare_number_rebinds_nothing "S9"
        "A rebind without a lock is `Invalid`, and the resource stays bound."
    domains::a_bare_number_binds_nothing "S9"
        "A bare number passes where its number passes; the first fence with a lock binds."
    values::a_resource_that_was_never_written_is_empty "S5"
        "Get shows nothing and leaves nothing behind; raise shows nothing and raises."
    values::a_raise_returns_the_value "S5"
        "A raise reads the present value, and a put with the same token follows."
    values::values_come_back_exactly "S3"
        "Empty, binary and large values, from memory and from a file, through the other client."
    values::get_tells_the_writer "S4"
        "The writer's token stays when the watermark is raised, and goes with the value."
    values::resources_are_independent "S1"
        "A watermark counts for its resource only."
    values::odd_names_are_different_resources "S1"
        "Names that the storage takes are resources of their own; others are `Invalid`."
    values::a_write_is_seen_by_the_other_client "S1"
        "What one client wrote, the other reads at once."
    values::a_probe_answers "S3"
        "A probe of a fresh storage finds nothing bad."
    races::forty_writers_leave_the_highest "S1 S4"
        "Of forty writers in any order the highest stands, and no reader sees tokens go down."
    races::racing_holders_of_one_number_are_one "S8"
        "Of two holders of one number that write at once, only one is ever accepted."
    races::a_read_modify_write_with_a_raise_loses_nothing "S5 S6"
        "Eight tasks count to eighty; the same run without the raise loses counts."
}

/// A harness and its two clients.
pub(super) struct Lab<'a> {
    harness: &'a dyn FenceHarness,
    a: Arc<dyn FencedStore>,
    b: Arc<dyn FencedStore>,
}

impl<'a> Lab<'a> {
    fn new(harness: &'a dyn FenceHarness) -> Self {
        let [a, b] = harness.clients();
        Self { harness, a, b }
    }

    /// Both clients in turn.
    fn each(&self) -> [&Arc<dyn FencedStore>; 2] {
        [&self.a, &self.b]
    }

    fn resource(&self, stem: &str) -> ResourceName {
        self.harness.resource(stem)
    }
}

fn domain(lock: &str) -> Domain {
    let lock = lock.parse().expect("BUG: a case uses valid names");
    Domain::new("conformance", "r0", &lock)
}

/// A fence of holder 1 of the usual lock.
fn fence(number: u64) -> Fence {
    held_by(1, number)
}

fn held_by(holder: u8, number: u64) -> Fence {
    Fence::new(
        token(number),
        HolderTag::from_bytes([holder; 16]),
        domain("lock"),
    )
}

/// A fence of another lock.
fn of_another_lock(number: u64) -> Fence {
    Fence::new(
        token(number),
        HolderTag::from_bytes([9; 16]),
        domain("another"),
    )
}

fn bare(number: u64) -> Fence {
    Fence::from(token(number))
}

async fn put(
    store: &Arc<dyn FencedStore>,
    to: &ResourceName,
    text: &str,
    fence: &Fence,
) -> Written {
    let answer = try_put(store, to, text, fence).await;
    answer.unwrap_or_else(|error| panic!("a put of {fence} was refused: {error:?}"))
}

async fn try_put(
    store: &Arc<dyn FencedStore>,
    to: &ResourceName,
    text: &str,
    fence: &Fence,
) -> crate::Result<Written> {
    store.put(to, Body::from(text.to_owned()), fence).await
}

async fn get(store: &Arc<dyn FencedStore>, resource: &ResourceName) -> Snapshot {
    store.get(resource).await.expect("get answers")
}

fn bytes(snapshot: Snapshot) -> Option<Vec<u8>> {
    let limit = 1 << 30;
    snapshot
        .value
        .map(|body| body.into_bytes(limit).expect("a value is read").into())
}

fn text(snapshot: Snapshot) -> Option<String> {
    bytes(snapshot).map(|bytes| String::from_utf8(bytes).expect("a case's text"))
}

fn number(token: Option<FencingToken>) -> Option<u64> {
    token.map(FencingToken::get)
}

/// Asserts value, writer and watermark, through both clients.
async fn assert_is(
    lab: &Lab<'_>,
    of: &ResourceName,
    value: Option<&str>,
    writer: Option<u64>,
    mark: u64,
) {
    for store in lab.each() {
        let snapshot = get(store, of).await;
        assert_eq!(number(snapshot.writer), writer, "the writer of {of:?}");
        let watermark = snapshot.watermark.as_ref().map(|w| w.token.get());
        assert_eq!(watermark, Some(mark), "the watermark of {of:?}");
        assert_eq!(text(snapshot).as_deref(), value, "the value of {of:?}");
    }
}

/// Asserts that every operation with this fence is refused so.
async fn assert_all_refused(
    lab: &Lab<'_>,
    resource: &ResourceName,
    fence: &Fence,
    kind: ErrorKind,
) {
    for store in lab.each() {
        let refusals: [Error; 3] = [
            store
                .put(resource, "refused".into(), fence)
                .await
                .expect_err("put"),
            store
                .raise(resource, fence)
                .await
                .map(drop)
                .expect_err("raise"),
            store.delete(resource, fence).await.expect_err("delete"),
        ];
        for refusal in refusals {
            assert_eq!(refusal.kind(), kind, "{refusal:?}");
        }
    }
}
