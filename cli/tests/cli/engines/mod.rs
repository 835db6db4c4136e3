//! What has to hold on every engine, from outside: the real binary on a real store, and for engines
//! with a server, with a network and a server that fail. One list for all, so that none is forgotten.

mod access;
mod clocks;
mod engine;
mod kills;
mod servers;
mod stores;
mod table;

/// The program of the documentation: a job that changes two values.
#[path = "../../../../examples/two_values.rs"]
mod two_values;

use engine::*;

/// The cases of every store that is reached by URL.
macro_rules! store_cases {
    ($engine:ty, $name:literal) => {
        store_cases!(
            $engine,
            $name,
            the_seven_steps,
            eight_processes_count_without_a_loss,
            a_killed_holder_is_replaced_after_its_ttl,
            values_keep_their_watermark,
            operators_see_and_take_locks,
            the_demo_shows_a_real_pause,
        );
        clock_cases!($engine, $name);

        #[test]
        fn a_writer_killed_at_any_moment_leaves_a_whole_value() {
            fencelock_testbed::skip!($name);
            kills::a_writer_killed_at_any_moment_leaves_a_whole_value::<$engine>();
        }
    };
    ($engine:ty, $name:literal, $($case:ident,)+) => {
        $(
            #[test]
            fn $case() {
                fencelock_testbed::skip!($name);
                stores::$case::<$engine>();
            }
        )+
    };
}

/// The cases of wall clocks, of every store.
macro_rules! clock_cases {
    ($engine:ty, $name:literal) => {
        clock_cases!(
            $engine,
            $name,
            clients_whose_wall_clocks_disagree_exclude_each_other,
            a_wall_clock_that_is_set_loses_no_lock,
        );
    };
    ($engine:ty, $name:literal, $($case:ident,)+) => {
        $(
            #[test]
            fn $case() {
                fencelock_testbed::skip!($name);
                fencelock_testbed::skip!("faketime");
                clocks::$case::<$engine>();
            }
        )+
    };
}

/// The cases of every store that is a server: also those above.
macro_rules! server_cases {
    ($engine:ty, $name:literal) => {
        store_cases!($engine, $name);
        store_cases!($engine, $name, two_values_are_changed_under_one_lock,);

        #[test]
        fn the_table_is_what_was_measured() {
            fencelock_testbed::skip!($name);
            table::the_table_is_what_was_measured::<$engine>();
        }

        kill_cases!($engine, $name);

        server_cases!(
            $engine,
            $name,
            a_lost_answer_is_found_by_the_same_command,
            a_silent_server_ends_every_command_in_time,
            a_holder_stops_its_command_before_a_silent_server_could_grant_again,
            a_waiter_outlives_the_silence,
            a_waiter_waits_for_a_server_that_is_down_at_the_start,
            a_killed_server_keeps_what_it_acknowledged,
            who_cannot_be_reached_is_named_without_the_password,
        );
    };
    ($engine:ty, $name:literal, $($case:ident,)+) => {
        $(
            #[test]
            fn $case() {
                fencelock_testbed::skip!($name);
                servers::$case::<$engine>();
            }
        )+
    };
}

/// Who is killed in the middle of a write.
macro_rules! kill_cases {
    ($engine:ty, $name:literal) => {
        kill_cases!(
            $engine,
            $name,
            a_writer_killed_before_its_effect_has_none,
            a_killed_writers_request_that_arrives_late_is_refused,
            a_writer_killed_before_its_answer_has_written_once,
            a_writer_killed_between_watermark_and_value_keeps_older_ones_out,
            a_writer_killed_in_the_middle_of_a_value_leaves_the_former_one,
            a_server_killed_before_an_effect_has_the_former_value,
            a_server_killed_before_its_answer_has_the_new_value,
        );
    };
    ($engine:ty, $name:literal, $($case:ident,)+) => {
        $(
            #[test]
            fn $case() {
                fencelock_testbed::skip!($name);
                kills::$case::<$engine>();
            }
        )+
    };
}

mod file {
    use super::*;
    store_cases!(File, "file");
    store_cases!(File, "file", two_values_are_changed_under_one_lock,);

    #[test]
    fn the_table_is_what_was_measured() {
        table::the_table_of_a_local_store_is_what_was_measured::<File>();
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use super::*;
    store_cases!(Sqlite, "sqlite");

    #[test]
    fn the_table_is_what_was_measured() {
        table::the_table_of_a_local_store_is_what_was_measured::<Sqlite>();
    }
}

#[cfg(feature = "redis")]
mod redis {
    use super::*;
    server_cases!(fencelock_testbed::redis::Redis, "redis");
}

#[cfg(feature = "postgres")]
mod postgres {
    use super::*;
    server_cases!(fencelock_testbed::postgres::Postgres, "postgres");
}

#[cfg(feature = "mysql")]
mod mysql {
    use super::*;
    server_cases!(fencelock_testbed::mysql::Mysql, "mysql");
}

#[cfg(feature = "etcd")]
mod etcd {
    use super::*;
    server_cases!(fencelock_testbed::etcd::Etcd, "etcd");
}

#[cfg(feature = "nats")]
mod nats {
    use super::*;
    server_cases!(fencelock_testbed::nats::Nats, "nats");
}

#[cfg(feature = "s3")]
mod s3 {
    use super::*;
    use fencelock_testbed::s3::S3;

    store_cases!(S3, "s3");
    kill_cases!(S3, "s3");
    // The table is measured in a process, whose environment has no keys.
    server_cases!(
        S3,
        "s3",
        a_lost_answer_is_found_by_the_same_command,
        a_silent_server_ends_every_command_in_time,
        a_holder_stops_its_command_before_a_silent_server_could_grant_again,
        a_waiter_outlives_the_silence,
        a_waiter_waits_for_a_server_that_is_down_at_the_start,
        a_killed_server_keeps_what_it_acknowledged,
    );
}
