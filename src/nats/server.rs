//! What the server has to be, and what an operator should know of it and of the bucket.

use super::bucket::{Bucket, Info};
use super::connect::Link;
use crate::error::{Error, Result};
use crate::lease::{Finding, Severity};

/// The first release whose messages and answers tell the time, and whose settings hold an id.
const OLDEST: (u64, u64) = (2, 10);

/// Refuses a server that cannot hold a bucket.
pub(super) async fn check(link: &Link) -> Result<()> {
    let (server, _) = link.greeting().await?;
    if version(&server.version) < OLDEST {
        return Err(
            Error::unsupported("the NATS server is too old; expected 2.10 or later")
                .with("version", &server.version),
        );
    }
    if !server.headers {
        return Err(Error::unsupported(
            "the NATS server takes no headers (no_header_support); let it",
        ));
    }
    if !server.jetstream && server.cluster.is_none() {
        return Err(Error::unsupported(
            "JetStream is not enabled on the NATS server; start it with -js, or with a jetstream block in its configuration",
        )
        .with("host", &server.host)
        .with("port", server.port));
    }
    Ok(())
}

/// The first release that tells since when the leader of a stream leads.
const OLDEST_REPLICATED: (u64, u64) = (2, 12);

/// Refuses a cluster whose servers' clocks cannot be told apart.
pub(super) async fn check_replicated(link: &Link) -> Result<()> {
    let (server, _) = link.greeting().await?;
    if version(&server.version) < OLDEST_REPLICATED {
        return Err(Error::unsupported(
            "the NATS cluster does not tell since when its leader leads, so that its clocks cannot be told apart; expected 2.12 or later, or replicas=1",
        )
        .with("version", &server.version));
    }
    Ok(())
}

/// What an operator should know.
pub(super) async fn findings(link: &Link, bucket: &Bucket) -> Result<Vec<Finding>> {
    let (server, max_payload) = link.greeting().await?;
    let info = bucket.info(link).await?;
    Ok(vec![
        Finding::new(
            Severity::Good,
            "version",
            format!("NATS {}", server.version),
        ),
        replicas(&info),
        Finding::new(
            Severity::Warning,
            "durability",
            "a server acknowledges what it has written and not yet synced: a crash of the machine or power loss can take back up to sync_interval (2 minutes at first), and with it tokens that were told. A client cannot see that setting; have `sync_interval: always` in the jetstream block of each server",
        ),
        denials(&info),
        Finding::new(
            Severity::Good,
            "values",
            format!("a message has at most {max_payload} bytes (max_payload)"),
        ),
    ])
}

fn replicas(info: &Info) -> Finding {
    let count = info.config.num_replicas.max(1);
    let leader = info
        .cluster
        .as_ref()
        .and_then(|cluster| cluster.leader.as_deref());
    let leader = leader.unwrap_or("unknown");
    let detail = format!("{count} replica(s), led by {leader}");
    match count {
        3.. => Finding::new(Severity::Good, "replicas", detail),
        _ => Finding::new(
            Severity::Warning,
            "replicas",
            format!(
                "{detail}: the loss of a server stops the locks, and the loss of its disk the tokens"
            ),
        ),
    }
}

fn denials(info: &Info) -> Finding {
    if info.config.deny_delete && info.config.deny_purge {
        return Finding::new(
            Severity::Good,
            "records",
            "no client can delete or purge them one by one",
        );
    }
    Finding::new(
        Severity::Warning,
        "records",
        "clients may delete or purge them (deny_delete and deny_purge are not set): a deleted watermark admits stale writes again",
    )
}

/// The first two parts; what is none counts as 0.
fn version(text: &str) -> (u64, u64) {
    let mut parts = text
        .split(['.', '-', '+'])
        .map(|part| part.parse::<u64>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    (next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (text, old) in [
            ("2.9.10", true),
            ("2.10.0", false),
            ("2.15.1", false),
            ("2.10-beta", false),
            ("3.0.0", false),
            ("", true),
        ] {
            assert_eq!(version(text) < OLDEST, old, "{text}");
        }
    }
}
