//! Every case, on a private server.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fencelock::conformance::LeaseHarness;
use fencelock::redis::{RedisOptions, RedisStore};
use fencelock::{FencingToken, LeaseStore, LockName};
use fencelock_testbed::redis::Redis;

use crate::lab::{client, record_key};

struct Locks {
    redis: Mutex<Redis>,
    options: RedisOptions,
    clients: [RedisStore; 2],
}

impl Locks {
    async fn new(options: RedisOptions) -> Self {
        let redis = Redis::with(&["--appendonly", "yes"]);
        let clients = open(&redis, &options).await;
        Self {
            redis: Mutex::new(redis),
            options,
            clients,
        }
    }
}

async fn open(redis: &Redis, options: &RedisOptions) -> [RedisStore; 2] {
    let open = async || options.clone().open_client(client(redis)).await.unwrap();
    [open().await, open().await]
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        let [a, b] = self.clients.clone();
        [Arc::new(a), Arc::new(b)]
    }

    /// Moves the stored expiry of what was granted at most this long ago into the past.
    async fn expire(&self, name: &LockName, ttl: Duration) {
        let redis = self.redis.lock().unwrap();
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
        self.redis.lock().unwrap().server().restart();
        let url = self.redis.lock().unwrap().url();
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
        let redis = self.redis.lock().unwrap();
        assert_eq!(redis.cli(&record), "2");
        Some(Arc::new(self.clients[0].clone()))
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
