//! Fenced values: every case, the rule in Lua against the rule in Rust, and the fragment for
//! scripts of the user's own.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use fencelock::conformance::{FenceHarness, fence as cases_of_storages};
use fencelock::memory::FencedMemory;
use fencelock::open::destination;
use fencelock::redis::client::Script;
use fencelock::redis::{FencedRedis, GUARD_LUA, fence_key, refusal};
use fencelock::{ErrorKind, Fence, FencedStore, FencingToken, ResourceName};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::redis::{Redis, SERVER};
use fencelock_testbed::{skip, skipped};
use proptest::prelude::*;

use crate::lab::client;

/// `None` where these tests are left out.
struct Values(Option<(Mutex<Redis>, [FencedRedis; 2])>);

impl Values {
    async fn new() -> Self {
        if skipped(SERVER) {
            return Self(None);
        }
        let redis = Redis::with(&["--appendonly", "yes", "--appendfsync", "always"]);
        let clients = [open(&redis).await, open(&redis).await];
        Self(Some((Mutex::new(redis), clients)))
    }
}

async fn open(redis: &Redis) -> FencedRedis {
    FencedRedis::open(&redis.url()).await.unwrap()
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        let [a, b] = self.0.as_ref().unwrap().1.clone();
        [Arc::new(a), Arc::new(b)]
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        let (redis, _) = self.0.as_ref().unwrap();
        redis.lock().unwrap().server().restart();
        let url = redis.lock().unwrap().url();
        let a = FencedRedis::open(&url).await.unwrap();
        let b = FencedRedis::open(&url).await.unwrap();
        Some([Arc::new(a), Arc::new(b)])
    }

    fn skips(&self) -> &'static [&'static str] {
        static ALL: LazyLock<Vec<&str>> = LazyLock::new(|| {
            cases_of_storages::CASES
                .iter()
                .map(|case| case.name)
                .collect()
        });
        if self.0.is_none() { &ALL } else { &[] }
    }
}

mod cases {
    use super::*;
    fencelock::fence_conformance!(Values::new().await);
}

#[derive(Clone, Debug)]
enum Step {
    Put(Fence),
    Raise(Fence),
    Delete(Fence),
    Rebind(Fence),
}

/// Numbers where a rule may go wrong: neighbours, ends of ranges, and what a double confuses.
fn tokens() -> impl Strategy<Value = u64> {
    prop_oneof![
        1_u64..6,
        Just(1 << 32),
        Just((1 << 32) + 1),
        (1_u64 << 53) - 2..(1 << 53) + 3,
        Just(1_796_000_000_000_000),
        Just((1 << 63) - 1),
        (1_u64 << 62)..(1 << 62) + 3,
    ]
}

fn fences() -> impl Strategy<Value = Fence> {
    let holder = prop_oneof![Just("-"), Just("0a"), Just("0b")];
    let domain = prop_oneof![Just("-"), Just("redis/r/a"), Just("redis/r/b")];
    let seq = prop_oneof![
        Just(None),
        (1_u64..4).prop_map(Some),
        ((1_u64 << 53)..(1 << 53) + 3).prop_map(Some),
    ];
    (tokens(), holder, domain, seq).prop_map(|(token, holder, domain, seq)| {
        let holder = match holder {
            "-" => "-".to_owned(),
            digits => digits.repeat(16),
        };
        let text = match seq {
            Some(seq) if holder != "-" => format!("v1:{token}:{holder}:{domain}:{seq}"),
            _ => format!("v1:{token}:{holder}:{domain}"),
        };
        text.parse().unwrap()
    })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..8_u8, fences()).prop_map(|(which, fence)| match which {
        0..4 => Step::Put(fence),
        4..6 => Step::Raise(fence),
        6 => Step::Delete(fence),
        _ => Step::Rebind(fence),
    });
    prop::collection::vec(step, 1..12)
}

async fn act(store: &dyn FencedStore, name: &ResourceName, step: &Step, value: String) -> String {
    let told = match step {
        Step::Put(fence) => store
            .put(name, value.into(), fence)
            .await
            .map(|written| format!("{written:?}")),
        Step::Raise(fence) => store
            .raise(name, fence)
            .await
            .map(|snapshot| format!("{:?} {:?}", snapshot.watermark, snapshot.writer)),
        Step::Delete(fence) => store
            .delete(name, fence)
            .await
            .map(|written| format!("{written:?}")),
        Step::Rebind(fence) => store
            .rebind(name, fence)
            .await
            .map(|written| format!("{written:?}")),
    };
    match told {
        Ok(told) => told,
        // The limit of a jump follows the clock.
        Err(error) if error.kind() == ErrorKind::Invalid => "out of bounds".to_owned(),
        Err(error) => format!("{:?} {error}", error.kind()),
    }
}

#[test]
fn the_script_and_the_rule_agree_on_random_histories() {
    skip!("redis");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = Redis::start();
    let real = runtime.block_on(open(&redis));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(400));
    let mut history = 0;
    let seen = Mutex::new(std::collections::BTreeMap::<String, u32>::new());
    let history = Mutex::new(&mut history);
    let outcome = runner.run(&steps(), |steps| {
        let model = FencedMemory::new();
        let mut count = history.lock().unwrap();
        **count += 1;
        let name = ResourceName::new(&format!("r{}", **count)).unwrap();
        runtime.block_on(async {
            for (i, step) in steps.iter().enumerate() {
                let expected = act(&model, &name, step, i.to_string()).await;
                let told = act(&real, &name, step, i.to_string()).await;
                prop_assert_eq!(&told, &expected, "step {}: {:?}", i, step);
                let kind = told.split([' ', '{']).next().unwrap_or_default().to_owned();
                *seen.lock().unwrap().entry(kind).or_default() += 1;
                let (a, b) = (
                    real.get(&name).await.unwrap(),
                    model.get(&name).await.unwrap(),
                );
                prop_assert_eq!(&a.watermark, &b.watermark);
                prop_assert_eq!(a.writer, b.writer);
                let bytes = |body: Option<fencelock::body::Body>| {
                    body.map(|body| body.into_bytes(1 << 20).unwrap())
                };
                prop_assert_eq!(bytes(a.value), bytes(b.value));
            }
            Ok(())
        })
    });
    outcome.unwrap();
    // It proved something only where every answer came up.
    let seen = seen.into_inner().unwrap();
    for answer in ["Written", "Fenced", "DomainMismatch", "out", "Some"] {
        assert!(
            seen.keys().any(|told| told.starts_with(answer)),
            "{answer} never came up: {seen:?}"
        );
    }
}

#[tokio::test]
async fn neighbours_that_a_double_confuses_are_told_apart() {
    skip!("redis");
    let redis = Redis::start();
    let store = open(&redis).await;
    let name = ResourceName::new("v").unwrap();
    // Ordinary tokens do not come this far (S11), so the watermark is planted.
    let high = (1_u64 << 62) + 1;
    let planted = ["HSET", &fence_key(&name), "token", &high.to_string()];
    assert_eq!(redis.cli(&planted), "1");
    let bare = |number: u64| Fence::from(FencingToken::new(number).unwrap());
    let error = store.put(&name, "x".into(), &bare(high - 1)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Fenced);
    let written = store.put(&name, "x".into(), &bare(high + 1)).await.unwrap();
    assert_eq!(written.watermark.token.get(), high + 1);
    let error = store.raise(&name, &bare(high)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Fenced);
    let far = bare(high + 1 + (1 << 32));
    store.put(&name, "x".into(), &far).await.unwrap();
    let too_far = bare(far.token().get() + (1 << 32) + 1);
    let error = store.put(&name, "x".into(), &too_far).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_script_that_begins_with_the_guard_runs_only_for_fresh_fences() {
    skip!("redis");
    let redis = Redis::start();
    let mut connection = client(&redis)
        .get_multiplexed_async_connection()
        .await
        .unwrap();
    let script = Script::new(&format!(
        "{GUARD_LUA}\nreturn redis.call('INCRBY', KEYS[2], ARGV[2])"
    ));
    let resource = ResourceName::new("balance").unwrap();
    let mut run = async |fence: &str| {
        let mut call = script.prepare_invoke();
        call.key(fence_key(&resource))
            .key("balance")
            .arg(fence)
            .arg(5);
        call.invoke_async::<fencelock::redis::client::Value>(&mut connection)
            .await
    };
    let holder = "0a".repeat(16);
    let fence = |token: u64, seq: u64| format!("v1:{token}:{holder}:redis/r/a:{seq}");
    assert!(run(&fence(34, 1)).await.is_ok());
    let repeated = run(&fence(34, 1)).await.unwrap();
    assert_eq!(
        repeated,
        fencelock::redis::client::Value::SimpleString("REPEATED".to_owned())
    );
    let stale = refusal(&run(&fence(33, 1)).await.unwrap_err()).unwrap();
    assert_eq!(stale.kind(), ErrorKind::Fenced, "{stale:?}");
    assert_eq!(stale.watermark().unwrap().get(), 34);
    let other = refusal(&run(&format!("v1:35:{holder}:redis/r/b")).await.unwrap_err());
    assert_eq!(other.unwrap().kind(), ErrorKind::DomainMismatch);
    for bad in ["34", "", "v1:x:-:-", &format!("v1:{}:-:-", 1_u64 << 62)] {
        let refused = refusal(&run(bad).await.unwrap_err());
        assert_eq!(refused.unwrap().kind(), ErrorKind::Invalid, "{bad}");
    }
    assert_eq!(redis.cli(&["GET", "balance"]), "5");
    // The same watermark as the storage's.
    let store = open(&redis).await;
    let stale = Fence::from(FencingToken::new(33).unwrap());
    let error = store.put(&resource, "x".into(), &stale).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_acknowledged_once() {
    skip!("redis");
    let redis = Redis::start();
    let proxy = Proxy::start(redis.address());
    let store = FencedRedis::open(&format!("redis://{}", proxy.address()))
        .await
        .unwrap();
    let name = ResourceName::new("v").unwrap();
    store.get(&name).await.unwrap();
    let holder = "0a".repeat(16);
    let fence: Fence = format!("v1:7:{holder}:redis/r/a:1").parse().unwrap();
    store.put(&name, "warm".into(), &fence).await.unwrap();
    let fence = fence.with_seq(2);
    proxy.swallow_answer(b"");
    let error = store.put(&name, "new".into(), &fence).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    proxy.await_swallowed(Duration::from_secs(10));
    let again = store.put(&name, "new".into(), &fence).await.unwrap();
    assert!(!again.applied);
    assert_eq!(redis.cli(&["GET", "v"]), "new");
}

#[tokio::test]
async fn a_destination_is_a_plain_key() {
    skip!("redis");
    let redis = Redis::start();
    let (values, name) = destination(&format!("{}/0?key=today%2Fcsv", redis.url()))
        .await
        .unwrap();
    assert_eq!(name.as_str(), "today/csv");
    let token = FencingToken::new(34).unwrap();
    values.put(&name, "bytes", token).await.unwrap();
    assert_eq!(redis.cli(&["GET", "today/csv"]), "bytes");
    for (bad, said) in [
        ("", "names no resource"),
        ("?key=", "empty"),
        ("?key=a&realm=b", "for locks"),
        ("?key=a&colour=red", "colour"),
    ] {
        let error = destination(&format!("{}{bad}", redis.url()))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[tokio::test]
async fn damaged_and_full_resources_are_told_apart() {
    skip!("redis");
    let redis = Redis::start();
    let store = open(&redis).await;
    let name = ResourceName::new("v").unwrap();
    let fence = Fence::from(FencingToken::new(7).unwrap());
    let key = fence_key(&name);
    let planted: [&[&str]; 3] = [
        &["SET", &key, "x"],
        &["HSET", &key, "token", "x"],
        &["HSET", &key, "holder", "x"],
    ];
    for plant in planted {
        assert_ne!(redis.cli(plant), "");
        for error in [
            store.put(&name, "x".into(), &fence).await.unwrap_err(),
            store.raise(&name, &fence).await.unwrap_err(),
            store.get(&name).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{plant:?} {error:?}");
        }
        assert_eq!(redis.cli(&["DEL", &key]), "1");
    }
    store.put(&name, "kept".into(), &fence).await.unwrap();
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    let later = Fence::from(FencingToken::new(8).unwrap());
    let error = store.put(&name, "x".into(), &later).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let state = store.get(&name).await.unwrap();
    assert_eq!(state.watermark.unwrap().token.get(), 7);
    store.delete(&name, &later).await.unwrap();
    let reserved = ResourceName::new("v:fencelock").unwrap();
    let error = store.put(&reserved, "x".into(), &later).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
}
