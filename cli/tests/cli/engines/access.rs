//! What is wrong with how a store is named, and what is wrong with its server: trying again helps with
//! the second only, so the exit codes differ. One list for all engines.

use super::engine::Served;
use crate::bench::Bench;

/// Whoever names no password, or a wrong one, is told what to check.
#[track_caller]
fn expect_wrong(bench: &Bench, said: &str) {
    for args in [&["acquire", "job"][..], &["list"][..], &["doctor"][..]] {
        let ended = bench.fencelock(args);
        assert_eq!(ended.code, 78, "{args:?} {ended:?}");
        let all = format!("{}{}", ended.out, ended.err);
        assert!(all.contains(said), "{args:?} {all}");
        assert!(!all.contains("canary"), "{args:?} {all}");
    }
}

/// A server that asks for the password `right`, and the URLs of those who do not have it.
fn a_wrong_password_is_wrong_configuration<E: Served>(mut engine: E, urls: &[String], good: &str) {
    for url in urls {
        expect_wrong(&Bench::on(url), "refused the user or the password");
    }
    let bench = Bench::on(good);
    bench.fencelock(["acquire", "job"]).expect_code(0);
    engine.server().kill();
    let down = bench.fencelock(["acquire", "other"]);
    assert_eq!(down.code, 69, "{down:?}");
}

#[cfg(feature = "redis")]
mod redis {
    use fencelock_testbed::redis::Redis;

    #[test]
    fn a_wrong_password_is_wrong_configuration() {
        fencelock_testbed::skip!("redis");
        let redis = Redis::with_password("right");
        let at = redis.address();
        let urls = [
            format!("redis://:canary@{at}"),
            format!("redis://user:canary@{at}"),
            format!("redis://{at}"),
        ];
        let good = format!("redis://:right@{at}");
        super::a_wrong_password_is_wrong_configuration(redis, &urls, &good);
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use fencelock_testbed::etcd::Etcd;

    #[test]
    fn a_wrong_password_is_wrong_configuration() {
        fencelock_testbed::skip!("etcd");
        let etcd = Etcd::start();
        etcd.protect("right");
        let at = etcd.address();
        let urls = [
            format!("etcd://root:canary@{at}"),
            format!("etcd://nobody:canary@{at}"),
            format!("etcd://{at}"),
        ];
        let good = format!("etcd://root:right@{at}");
        super::a_wrong_password_is_wrong_configuration(etcd, &urls, &good);
    }
}

#[cfg(feature = "nats")]
mod nats {
    use fencelock_testbed::nats::Nats;

    use super::*;

    #[test]
    fn a_wrong_password_is_wrong_configuration() {
        fencelock_testbed::skip!("nats");
        let nats = Nats::with_user("user", "right", "");
        let at = nats.address();
        let urls = [
            format!("nats://user:canary@{at}"),
            format!("nats://canary@{at}"),
            format!("nats://{at}"),
        ];
        let good = format!("nats://user:right@{at}");
        super::a_wrong_password_is_wrong_configuration(nats, &urls, &good);
    }

    #[test]
    fn tls_asked_of_a_server_without_it_is_wrong_configuration() {
        fencelock_testbed::skip!("nats");
        let nats = Nats::start();
        let bench = Bench::on(&format!("tls://{}", nats.address()));
        expect_wrong(&bench, "speaks no TLS");
    }

    #[test]
    fn a_bucket_that_must_be_there_and_is_not_is_wrong_configuration() {
        fencelock_testbed::skip!("nats");
        let nats = Nats::start();
        let bench = Bench::on(&format!("nats://{}?create=false", nats.address()));
        expect_wrong(&bench, "the bucket does not exist");
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use fencelock_testbed::port::Port;
    use fencelock_testbed::s3::S3;

    use super::*;

    #[test]
    fn wrong_keys_are_wrong_configuration_and_none_are_named() {
        fencelock_testbed::skip!("s3");
        let server = S3::seaweed();
        let bench = Bench::on(&server.url("locks"));
        let wrong = crate::bench::ended(
            bench
                .command(["acquire", "job"])
                .env("AWS_SECRET_ACCESS_KEY", "canary"),
        );
        assert_eq!(wrong.code, 78, "{wrong:?}");
        assert!(wrong.err.contains("denied access"), "{wrong:?}");
        assert!(!wrong.err.contains("canary"), "{wrong:?}");

        // The machine's own role is asked for at a place where nobody answers.
        let nobody = Port::free();
        let mut command = bench.command(["acquire", "job"]);
        for variable in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
            command.env_remove(variable);
        }
        let metadata = format!("http://127.0.0.1:{}", nobody.number());
        let none = crate::bench::ended(command.env("AWS_METADATA_ENDPOINT", metadata));
        assert_eq!(none.code, 69, "{none:?}");
        for variable in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
            assert!(none.err.contains(variable), "{none:?}");
        }
    }
}
