//! Every model under random schedules and under PCT; and each planted defect is found.
//!
//! The seeds are fixed, so that a failure repeats; `FENCELOCK_LONG=1` explores a hundred times as many
//! schedules. On failure shuttle prints the schedule that failed.

use std::panic::catch_unwind;

use fencelock_threads as variants;
use fencelock_threads::sound;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner};

const SCHEDULES: usize = 2_000;

fn run(scheduler: impl Scheduler + 'static, persist: bool, model: fn()) {
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.silence_warnings = true;
    if !persist {
        config.failure_persistence = FailurePersistence::None;
    }
    Runner::new(scheduler, config).run(model);
}

fn holds(model: fn()) {
    let times = if std::env::var_os("FENCELOCK_LONG").is_some() {
        100
    } else {
        1
    };
    run(
        RandomScheduler::new_from_seed(1, SCHEDULES * times),
        true,
        model,
    );
    run(
        PctScheduler::new_from_seed(1, 3, SCHEDULES * times),
        true,
        model,
    );
}

/// One of both schedulers finds what is broken.
fn finds(model: fn()) {
    let random = catch_unwind(|| run(RandomScheduler::new_from_seed(1, SCHEDULES), false, model));
    let pct = catch_unwind(|| run(PctScheduler::new_from_seed(1, 3, SCHEDULES), false, model));
    println!("random: {}, pct: {}", random.is_err(), pct.is_err());
    assert!(random.is_err() || pct.is_err(), "the defect was not found");
}

#[test]
fn turns_are_taken_one_at_a_time() {
    holds(sound::models::turns_are_taken_one_at_a_time);
}

#[test]
fn a_place_that_is_counted_outside_of_the_lock_is_found() {
    finds(variants::uncounted_place::models::turns_are_taken_one_at_a_time);
}

#[test]
fn a_freed_lock_finds_its_waiter() {
    holds(sound::models::a_freed_lock_finds_its_waiter);
}

#[test]
fn a_hint_that_is_not_kept_is_found() {
    finds(variants::unkept_hint::models::a_freed_lock_finds_its_waiter);
}

#[test]
fn a_loss_is_heard_and_final() {
    holds(sound::models::a_loss_is_heard_and_final);
}

#[test]
fn a_loss_that_is_not_heard_is_found() {
    finds(variants::unheard_loss::models::a_loss_is_heard_and_final);
}

#[test]
fn a_lease_ends_once() {
    holds(sound::models::a_lease_ends_once);
}

#[test]
fn draining_ends() {
    holds(sound::models::draining_ends);
}

#[test]
fn news_before_the_count_is_down_is_found() {
    finds(variants::early_news::models::draining_ends);
}

#[test]
fn a_new_lease_is_renewed_in_time() {
    holds(sound::models::a_new_lease_is_renewed_in_time);
}

#[test]
fn an_alarm_of_the_last_nap_is_found() {
    finds(variants::stale_alarm::models::a_new_lease_is_renewed_in_time);
}

#[test]
fn an_ended_lease_is_forgotten() {
    holds(sound::models::an_ended_lease_is_forgotten);
}
