//! Every case, on a private server.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use fencelock::conformance::{LeaseHarness, lease};
use fencelock::redis::{RedisOptions, RedisStore};
use fencelock::{FencingToken, LeaseStore, LockName};
use fencelock_testbed::redis::{Redis, SERVER};
use fencelock_testbed::skipped;

use crate::lab::{client, record_key};

struct Locks {
    options: RedisOptions,
    /// `None` where these tests are left out.
    running: Option<(Mutex<Redis>, [RedisStore; 2])>,
}

impl Locks {
    async fn new(options: RedisOptions) -> Self {
        let mut running = None;
        if !skipped(SERVER) {
            let redis = Redis::with(&["--appendonly", "yes", "--appendfsync", "always"]);
            let clients = open(&redis, &options).await;
            running = Some((Mutex::new(redis), clients));
        }
        Self { options, running }
    }

    fn redis(&self) -> MutexGuard<'_, Redis> {
        self.running.as_ref().unwrap().0.lock().unwrap()
    }

    fn stores(&self) -> [RedisStore; 2] {
        self.running.as_ref().unwrap().1.clone()
    }
}

async fn open(redis: &Redis, options: &RedisOptions) -> [RedisStore; 2] {
    let open = async || options.clone().open_client(client(redis)).await.unwrap();
    [open().await, open().await]
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        let [a, b] = self.stores();
        [Arc::new(a), Arc::new(b)]
    }

    /// Moves the stored expiry of what was granted at most this long ago into the past.
    async fn expire(&self, name: &LockName, ttl: Duration) {
        let redis = self.redis();
        let key = record_key(name);
        let lapse = "\
            local t = redis.call('TIME')
            local now = t[1] * 1000000 + t[2]
            local all = redis.call('HGETALL', KEYS[1])
            for i = 1, #all, 2 do
              local token, expires, rest = string.match(all[i + 1], '^(%d+) (%d+) (.*)$')
              if string.sub(all[i], 1, 2) == 'h:' and tonumber(expires) <= now + tonumber(ARGV[1]) then
                redis.call('HSET', KEYS[1], all[i], token .. ' ' .. string.format('%.0f', now) .. ' ' .. rest)
              end
            end
            return 'ok'";
        let ttl_us = ttl.as_micros().to_string();
        assert_eq!(redis.cli(&["EVAL", lapse, "1", &key, &ttl_us]), "ok");
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        self.redis().server().restart();
        let url = self.redis().url();
        let mut clients: Vec<Arc<dyn LeaseStore>> = Vec::new();
        for _ in 0..2 {
            let client = fencelock::redis::client::Client::open(url.as_str()).unwrap();
            let store = self.options.clone().open_client(client).await.unwrap();
            clients.push(Arc::new(store));
        }
        clients.try_into().ok()
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let (key, token) = (record_key(name), token.to_string());
        let record = ["HSET", &key, "last", &token, "name", name.as_str()];
        let [store, _] = self.stores();
        assert_eq!(self.redis().cli(&record), "2");
        Some(Arc::new(store))
    }

    fn skips(&self) -> &'static [&'static str] {
        static ALL: LazyLock<Vec<&str>> =
            LazyLock::new(|| lease::CASES.iter().map(|case| case.name).collect());
        if self.running.is_none() { &ALL } else { &[] }
    }
}

mod clock_tokens {
    use super::*;
    fencelock::lease_conformance!(Locks::new(RedisStore::options()).await);
}

mod counted_tokens {
    use super::*;
    fencelock::lease_conformance!(Locks::new(RedisStore::options().count_tokens()).await);
}
