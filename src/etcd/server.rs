//! Whose data this is, whether it has gone back in time, and what else an operator should know.
//!
//! A snapshot that is restored brings the revision of its time with it, and with that the tokens
//! that were told since. It also begins a new raft log, whose index counts from about zero, while
//! in the life of one log no entry raises the revision by more than one. So a revision that is
//! ahead of the index tells of a restore, and the distance between them only shrinks in one life:
//! a distance above the one that was accepted tells of another restore.

use std::sync::OnceLock;

use etcd_client::{Compare, CompareOp, StatusResponse, Txn, TxnOp, TxnOpResponse, TxnResponse};
use serde::{Deserialize, Serialize};

use super::connect::{Link, went_back};
use super::keys::Keys;
use super::options::EtcdOptions;
use crate::error::{Error, Result};
use crate::fence::hex;
use crate::lease::{Durability, Finding, Severity};
use crate::random;
use crate::settings;

/// What a member may lag behind between its two numbers, where the distance is written down.
const SLACK: i64 = 1_000;

/// The releases before these can lose revisions at a crash during a compaction (etcd#17780).
const FIXED: [(u64, u64, u64); 2] = [(3, 4, 32), (3, 5, 14)];

/// What a store knows of the data that it was opened on.
pub(super) struct Identity {
    key: String,
    /// The realm that the user named.
    named: Option<String>,
    accept_restored: bool,
    known: OnceLock<Stored>,
}

/// What stands in the realm's key.
#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
struct Stored {
    realm: String,
    /// How far the revision may be ahead of the raft index.
    ahead: i64,
}

impl Stored {
    fn read(value: &[u8]) -> Result<Self> {
        let illegible = || {
            Error::corrupt(
                "the realm that is stored in etcd is illegible; delete its key, and rebind the resources",
            )
        };
        let stored: Self = serde_json::from_slice(value).map_err(|e| illegible().with_source(e))?;
        // One that no domain can hold would make every fence malformed.
        if settings::is_realm(&stored.in_cluster(u64::MAX)) {
            Ok(stored)
        } else {
            Err(illegible())
        }
    }

    /// As the domains of locks hold it: with the cluster's id.
    fn in_cluster(&self, cluster: u64) -> String {
        format!("{cluster:x}-{}", self.realm)
    }
}

impl Identity {
    pub(super) fn new(keys: &Keys, options: &EtcdOptions) -> Self {
        Self {
            key: keys.realm(),
            named: options.realm.clone(),
            accept_restored: options.accept_restored,
            known: OnceLock::new(),
        }
    }

    pub(super) fn is_known(&self) -> bool {
        self.known.get().is_some()
    }

    pub(super) fn read(&self) -> Txn {
        Txn::new().and_then([TxnOp::get(self.key.as_str(), None)])
    }

    /// Compares what a new connection says with what the store was opened on.
    pub(super) fn recognise(&self, status: &StatusResponse, stored: &TxnResponse) -> Result<()> {
        let Some(known) = self.known.get() else {
            return Ok(());
        };
        let stored = parse(stored)?.map(|(stored, _)| stored);
        match stored {
            Some(stored) if stored.realm == known.realm => check_ahead(status, &stored),
            _ => Err(Error::unavailable(
                "the etcd cluster holds other data than the store was opened on; open it again",
            )),
        }
    }

    /// The realm, found or made; refuses a cluster that was restored.
    pub(super) async fn find(&self, link: &Link) -> Result<String> {
        let status = link.status().await?;
        loop {
            let answer = link.read(self.read()).await?;
            let cluster = answer.header().map_or(0, |header| header.cluster_id());
            let present = parse(&answer)?;
            let wanted = match &present {
                None => Stored {
                    realm: hex(&random::id()),
                    ahead: allowed(&status),
                },
                Some((stored, _)) if check_ahead(&status, stored).is_ok() => stored.clone(),
                Some((stored, _)) if self.accept_restored => Stored {
                    realm: stored.realm.clone(),
                    ahead: allowed(&status),
                },
                Some((stored, _)) => {
                    check_ahead(&status, stored)?;
                    stored.clone()
                }
            };
            let is_there = present
                .as_ref()
                .is_some_and(|(stored, _)| *stored == wanted);
            if !is_there
                && !self
                    .store(link, present.map_or(0, |(_, at)| at), &wanted)
                    .await?
            {
                // Somebody else was first.
                continue;
            }
            let realm = match &self.named {
                Some(named) => named.clone(),
                None => wanted.in_cluster(cluster),
            };
            // The first one found stays.
            let _ = self.known.set(wanted);
            return Ok(realm);
        }
    }

    async fn store(&self, link: &Link, at: i64, wanted: &Stored) -> Result<bool> {
        let value = serde_json::to_vec(wanted)
            .map_err(|e| Error::invalid("a realm that cannot be written").with_source(e))?;
        let txn = Txn::new()
            .when([Compare::mod_revision(
                self.key.as_str(),
                CompareOp::Equal,
                at,
            )])
            .and_then([TxnOp::put(self.key.as_str(), value, None)]);
        Ok(link.write(txn).await?.succeeded())
    }
}

fn parse(answer: &TxnResponse) -> Result<Option<(Stored, i64)>> {
    let Some(TxnOpResponse::Get(get)) = answer.op_responses().into_iter().next() else {
        return Ok(None);
    };
    let Some(kv) = get.kvs().first() else {
        return Ok(None);
    };
    Ok(Some((Stored::read(kv.value())?, kv.mod_revision())))
}

/// How far the revision is ahead of the raft index.
fn ahead(status: &StatusResponse) -> i64 {
    let revision = status.header().map_or(0, |header| header.revision());
    // The second is the first, or a little more, and all that servers before 3.4 tell.
    let index = match status.raft_applied_index() {
        0 => status.raft_index(),
        applied => applied,
    };
    let index = i64::try_from(index).unwrap_or(i64::MAX);
    revision.saturating_sub(index)
}

/// The distance that is accepted from now on.
fn allowed(status: &StatusResponse) -> i64 {
    match ahead(status) {
        ..=0 => 0,
        restored => restored.saturating_add(SLACK),
    }
}

fn check_ahead(status: &StatusResponse, stored: &Stored) -> Result<()> {
    let ahead = ahead(status);
    if ahead > stored.ahead {
        return Err(went_back()
            .with("ahead", ahead)
            .with("accepted", stored.ahead));
    }
    Ok(())
}

/// What a told token survives: the loss of a member, where a majority is left without it.
pub(super) async fn durability(link: &Link) -> Durability {
    match link.voters().await {
        Ok(3..) => Durability::D3Failover,
        _ => Durability::D2PowerLoss,
    }
}

/// The shortest TTL in seconds that the cluster gives: one and a half times its election timeout.
pub(super) async fn least_ttl(link: &Link) -> Result<i64> {
    let (lease, ttl_secs) = link.grant(1).await?;
    // It would lapse by itself.
    let _ = link.revoke(lease).await;
    Ok(ttl_secs)
}

/// What an operator should know.
pub(super) async fn findings(link: &Link) -> Result<Vec<Finding>> {
    let (status, voters, alarms) = tokio::join!(link.status(), link.voters(), link.alarms());
    let status = status?;
    let mut findings = vec![version(status.version())];
    if let Ok(voters) = voters {
        findings.push(members(voters));
    }
    findings.push(match ahead(&status) {
        ..=0 => Finding::new(
            Severity::Good,
            "revision",
            "the cluster was never restored from a snapshot",
        ),
        _ => Finding::new(
            Severity::Warning,
            "revision",
            "the cluster was restored from a snapshot: unless --bump-revision was used, tokens told after the snapshot may be told again",
        ),
    });
    if !matches!(alarms, Ok(0)) {
        let detail = match alarms {
            Ok(_) => {
                "the cluster has raised an alarm, and may take no writes; see `etcdctl alarm list`"
            }
            Err(_) => "the cluster's alarms could not be read",
        };
        findings.push(Finding::new(Severity::Warning, "alarms", detail));
    }
    Ok(findings)
}

fn members(voters: usize) -> Finding {
    let detail = format!("{voters} voting member(s)");
    match voters {
        3.. => Finding::new(Severity::Good, "members", detail),
        _ => Finding::new(
            Severity::Warning,
            "members",
            format!(
                "{detail}: the loss of one stops the cluster, and the loss of its disk the tokens"
            ),
        ),
    }
}

fn version(text: &str) -> Finding {
    let mut parts = text
        .split(['.', '-', '+'])
        .map(|part| part.parse::<u64>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    let (major, minor, patch) = (next(), next(), next());
    let old = FIXED
        .iter()
        .any(|(a, b, c)| (major, minor) == (*a, *b) && patch < *c)
        || (major, minor) < (3, 4);
    if old {
        return Finding::new(
            Severity::Warning,
            "version",
            format!(
                "etcd {text} can lose revisions in a crash during a compaction, and with them tokens; 3.4.32, 3.5.14 and later do not"
            ),
        );
    }
    Finding::new(Severity::Good, "version", format!("etcd {text}"))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_warned_of() {
        for (text, severity) in [
            ("3.3.27", Severity::Warning),
            ("3.4.23", Severity::Warning),
            ("3.4.32", Severity::Good),
            ("3.5.13", Severity::Warning),
            ("3.5.14", Severity::Good),
            ("3.6.0-rc.1", Severity::Good),
            ("4.0.0", Severity::Good),
        ] {
            assert_eq!(version(text).severity, severity, "{text}");
        }
    }
}
