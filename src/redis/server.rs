//! What a server says of itself: whether it keeps what it is told, and what it is called.

use redis::Value;

use super::answer::{self, Failure};
use super::connect::Link;
use super::options::RedisOptions;
use crate::error::{Error, Result};
use crate::lease::{Durability, Finding, Severity};

/// The least that every master says.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) version: String,
    pub(super) policy: Policy,
    pub(super) role: String,
    pub(super) keeps: Keeps,
    pub(super) replicas: u32,
    /// It can say when a write is on its disk (WAITAOF).
    pub(super) waits_for_disk: bool,
}

/// What a server does at its memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Refuses writes.
    Keep,
    /// Drops keys that have an expiry.
    DropVolatile,
    /// Drops any key.
    DropAny,
    /// It does not say.
    Unknown,
}

/// What of its data a server finds again after it crashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Keeps {
    /// What was in the last snapshot, if there was one.
    Snapshots,
    /// All writes but those of the last moments: with `appendfsync everysec` a write that comes
    /// while the disk is slow is answered first, and logged up to two seconds later. Even a killed
    /// process loses it.
    LateLog,
    /// All writes, unless the power is lost.
    Log,
    /// All writes.
    SyncedLog,
}

impl Server {
    /// Asks every master, and answers with the worst of each thing.
    pub(super) async fn ask(link: &Link) -> Result<Self> {
        let mut worst: Option<Self> = None;
        for master in link.masters().await? {
            let one = Self::ask_one(link, master.as_ref()).await?;
            worst = Some(match worst {
                None => one,
                Some(other) => other.worse(one),
            });
        }
        worst.ok_or_else(|| Error::unavailable("the redis cluster has no masters"))
    }

    async fn ask_one(link: &Link, master: Option<&(String, u16)>) -> Result<Self> {
        let info = link.command_at(master, &redis::cmd("INFO")).await?;
        let info: String = answer::parse(info).map_err(Error::from)?;
        let field = |name: &str| {
            info.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key == name).then(|| value.trim().to_owned())
            })
        };
        let policy = match field("maxmemory_policy").as_deref() {
            Some("noeviction") => Policy::Keep,
            Some(policy) if policy.starts_with("volatile-") => Policy::DropVolatile,
            Some(policy) if policy.starts_with("allkeys-") => Policy::DropAny,
            _ => Policy::Unknown,
        };
        let logs = field("aof_enabled").as_deref() == Some("1");
        let keeps = if logs {
            Self::log(link, master).await
        } else {
            Keeps::Snapshots
        };
        let version = field("valkey_version").map_or_else(
            || format!("redis {}", field("redis_version").unwrap_or_default()),
            |version| format!("valkey {version}"),
        );
        // What Valkey calls its version of Redis is 7.2 at the least.
        let compatible = field("redis_version").unwrap_or_default();
        let mut parts = compatible.split('.').map(|part| part.parse::<u32>().ok());
        let at_least = (parts.next().flatten(), parts.next().flatten());
        Ok(Self {
            waits_for_disk: at_least >= (Some(7), Some(2)),
            version,
            policy,
            role: field("role").unwrap_or_default(),
            keeps,
            replicas: field("connected_slaves")
                .and_then(|n| n.parse().ok())
                .unwrap_or(0),
        })
    }

    /// How late the log is. A server that does not let its settings be read counts as set to what
    /// it comes with, `everysec`.
    async fn log(link: &Link, master: Option<&(String, u16)>) -> Keeps {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("appendfsync");
        let answer: Result<Value, Failure> = link.command_at(master, &command).await;
        let settings = answer.and_then(answer::parse::<std::collections::HashMap<String, String>>);
        let setting = settings.ok().and_then(|mut s| s.remove("appendfsync"));
        match setting.as_deref() {
            Some("always") => Keeps::SyncedLog,
            Some("no") => Keeps::Log,
            _ => Keeps::LateLog,
        }
    }

    fn worse(self, other: Self) -> Self {
        let rank = |policy| match policy {
            Policy::Keep => 0,
            Policy::DropVolatile => 1,
            Policy::Unknown => 2,
            Policy::DropAny => 3,
        };
        Self {
            policy: std::cmp::max_by_key(self.policy, other.policy, |p| rank(*p)),
            keeps: self.keeps.min(other.keeps),
            replicas: self.replicas.min(other.replicas),
            waits_for_disk: self.waits_for_disk && other.waits_for_disk,
            version: self.version,
            role: if self.role == "master" {
                other.role
            } else {
                self.role
            },
        }
    }

    /// Refuses a server that may forget what it was told.
    pub(super) fn check(&self, options: &RedisOptions) -> Result<()> {
        if self.role == "slave" {
            return Err(Error::unavailable(
                "the redis server is a replica; name its master, or the Sentinels that know it",
            ));
        }
        if self.policy == Policy::DropAny && !options.allow_eviction {
            return Err(Error::unsupported(
                "the redis server evicts any key at its memory limit, held locks and watermarks included; set maxmemory-policy to noeviction or volatile-lru, or say allow_eviction=true",
            ));
        }
        if options.acknowledge.aof && (self.keeps == Keeps::Snapshots || !self.waits_for_disk) {
            return Err(Error::unsupported(
                "wait_aof needs redis 7.2 or later, or valkey, with appendonly yes",
            )
            .with("server", &self.version));
        }
        Ok(())
    }

    pub(super) fn durability(&self, options: &RedisOptions) -> Durability {
        match self.keeps {
            _ if options.acknowledge.aof => Durability::D2PowerLoss,
            Keeps::SyncedLog => Durability::D2PowerLoss,
            Keeps::Log => Durability::D1ProcessCrash,
            // What a crash takes from the log, the clock still keeps from being told again.
            Keeps::LateLog if !options.counter => Durability::D1ProcessCrash,
            Keeps::LateLog => Durability::D0Memory,
            Keeps::Snapshots => Durability::D0Memory,
        }
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let eviction = match self.policy {
            Policy::Keep => (Severity::Good, "writes are refused at the memory limit"),
            Policy::DropVolatile => (
                Severity::Good,
                "only keys with an expiry are evicted, and locks are then kept without one",
            ),
            Policy::DropAny => (
                Severity::Bad,
                "any key may be evicted at the memory limit, held locks and watermarks included; set maxmemory-policy to noeviction",
            ),
            Policy::Unknown => (
                Severity::Warning,
                "the server does not say what it evicts; make sure that it is not allkeys-*",
            ),
        };
        let durability = match self.keeps {
            Keeps::SyncedLog => (
                Severity::Good,
                "every write is on the disk before it is answered",
            ),
            Keeps::Log => (
                Severity::Good,
                "a crash of the server loses nothing; a power loss may",
            ),
            Keeps::LateLog => (
                Severity::Warning,
                "a crash of the server may lose its last moments, up to two seconds where the disk is slow; set appendfsync always to keep what was acknowledged",
            ),
            Keeps::Snapshots => (
                Severity::Warning,
                "a crash of the server loses every lock since its last snapshot; set appendonly yes",
            ),
        };
        vec![
            Finding::new(Severity::Good, "server", &self.version),
            Finding::new(eviction.0, "eviction", eviction.1),
            Finding::new(durability.0, "durability", durability.1),
            Finding::new(
                Severity::Good,
                "replicas",
                format!("{} replicas are connected", self.replicas),
            ),
        ]
    }
}
