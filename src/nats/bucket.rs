//! The bucket: what it has to be, whose data it holds, and where things are in it.
//!
//! Whoever makes a bucket draws an id for it, keeps it in the bucket's settings, and gives it only
//! subjects that hold the id. So what is meant for a bucket that was deleted finds nobody that takes
//! it, however alike the new one is.

use std::collections::HashMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::connect::Link;
use super::failure::{Effect, Failure, NO_MESSAGE, NO_STREAM, OTHER_SETTINGS};
use super::options::NatsOptions;
use super::record::{Answer, Stored};
use super::server;
use crate::error::{Error, Result};
use crate::fence::hex;
use crate::name::{LockName, ResourceName};
use crate::random;
use crate::settings;

/// The setting that holds the id.
const ID: &str = "fencelock-id";

/// How many subjects one answer may list.
const SUBJECTS_PAGE: u64 = 100_000;

/// A bucket that a store was opened on.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// The stream below it.
    pub(super) stream: String,
    name: String,
    id: String,
}

/// What JetStream says of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    pub(super) config: Config,
    created: String,
    /// The present time of the server that leads the stream.
    ts: Option<String>,
    pub(super) cluster: Option<Cluster>,
    #[serde(default)]
    pub(super) state: State,
    #[serde(default)]
    total: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Config {
    retention: String,
    storage: String,
    #[serde(default)]
    max_msgs: i64,
    #[serde(default)]
    max_bytes: i64,
    #[serde(default)]
    max_age: i64,
    discard: String,
    #[serde(default)]
    pub(super) num_replicas: usize,
    #[serde(default)]
    no_ack: bool,
    #[serde(default)]
    sealed: bool,
    #[serde(default)]
    pub(super) deny_delete: bool,
    #[serde(default)]
    pub(super) deny_purge: bool,
    #[serde(default)]
    persist_mode: String,
    #[serde(default)]
    metadata: HashMap<String, String>,
    mirror: Option<serde_json::Value>,
    #[serde(default)]
    sources: Vec<serde_json::Value>,
    subject_transform: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Cluster {
    /// Of the servers that keep the stream together; none for one server alone.
    raft_group: Option<String>,
    pub(super) leader: Option<String>,
    leader_since: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct State {
    #[serde(default)]
    last_seq: u64,
    #[serde(default)]
    subjects: HashMap<String, u64>,
}

/// The clock of the server that leads, as it stood when it was asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) now_ns: u64,
    /// Since when that server leads, by the same clock; `None` where there is no other.
    pub(super) since_ns: Option<u64>,
}

#[derive(Serialize)]
struct Wanted<'a> {
    name: &'a str,
    subjects: [String; 1],
    retention: &'static str,
    storage: &'static str,
    discard: &'static str,
    max_msgs_per_subject: i64,
    num_replicas: usize,
    deny_delete: bool,
    deny_purge: bool,
    allow_direct: bool,
    metadata: HashMap<&'static str, &'a str>,
}

impl Bucket {
    /// Finds the bucket, or makes it; refuses one that would lose records.
    pub(super) async fn open(link: &Link, options: &NatsOptions) -> Result<(Self, Info)> {
        let stream = format!("KV_{}", options.bucket);
        let info = match info(link, &stream, &Bytes::new()).await {
            Ok(info) => info,
            Err(failure) if failure.code == Some(NO_STREAM) && options.create => {
                create(link, options, &stream).await?
            }
            Err(failure) if failure.code == Some(NO_STREAM) => {
                return Err(Error::invalid(
                    "the bucket does not exist; make it, or leave create=false out",
                )
                .with("bucket", &options.bucket));
            }
            Err(failure) => return Err(failure.into()),
        };
        info.config.check(&options.bucket, options.replicas)?;
        if info.is_replicated() {
            server::check_replicated(link).await?;
        }
        info.clock()?;
        if !settings::is_realm(&info.id()) {
            return Err(Error::corrupt(format!(
                "the bucket's setting {ID} cannot be an id; expected 1 to 64 lowercase letters, digits, - and _"
            ))
            .with("id", format_args!("{:?}", info.id())));
        }
        let bucket = Self {
            id: info.id(),
            stream,
            name: options.bucket.clone(),
        };
        Ok((bucket, info))
    }

    /// The identity of the data.
    pub(super) fn realm(&self) -> &str {
        &self.id
    }

    /// The record of a lock.
    pub(super) fn record(&self, name: &LockName) -> String {
        format!("$KV.{}.{}.lock.{}", self.name, self.id, name.encoded())
    }

    /// The encoded name of the lock whose record is here.
    pub(super) fn encoded_of<'a>(&self, subject: &'a str) -> Option<&'a str> {
        let prefix = format!("$KV.{}.{}.lock.", self.name, self.id);
        subject.strip_prefix(prefix.as_str())
    }

    /// A fenced value and its watermark.
    pub(super) fn value(&self, resource: &ResourceName) -> String {
        format!("$KV.{}.{}.value.{}", self.name, self.id, resource.encoded())
    }

    /// Where waiters for a lock hear that it was given up. Nothing is stored here.
    pub(super) fn freed(&self, name: &LockName) -> String {
        format!(
            "fencelock.{}.{}.freed.{}",
            self.name,
            self.id,
            name.encoded()
        )
    }

    /// The clock of the server that leads; refuses what is not the bucket as we know it.
    pub(super) async fn clock(&self, link: &Link) -> Result<Clock> {
        let known = link.acknowledged();
        let info = self.info(link).await?;
        if info.state.last_seq < known {
            return Err(Error::unavailable(
                "the bucket is behind what it has acknowledged: its leader was replaced and does not know it yet, or data was lost; where this stays, see \"Loss of data\" in docs/backends/nats.md",
            )
            .with("bucket", &self.name)
            .with("sequence", info.state.last_seq)
            .with("acknowledged", known));
        }
        info.clock()
    }

    /// What JetStream says now; refuses another bucket of the same name.
    pub(super) async fn info(&self, link: &Link) -> Result<Info> {
        let info = info(link, &self.stream, &Bytes::new()).await?;
        self.recognise(&info)?;
        Ok(info)
    }

    /// The message at a subject, as the server that leads has it; `None` where there is none.
    pub(super) async fn read(&self, link: &Link, subject: &str) -> Result<Option<Stored>> {
        let body = serde_json::json!({"last_by_subj": subject}).to_string();
        let api = format!("$JS.API.STREAM.MSG.GET.{}", self.stream);
        match link.api::<Answer>(&api, &Bytes::from(body)).await {
            Ok(answer) => Stored::of(answer).map(Some),
            Err(failure) if failure.code == Some(NO_MESSAGE) => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    fn recognise(&self, info: &Info) -> Result<()> {
        if info.id() == self.id {
            return Ok(());
        }
        Err(Error::unavailable(
            "the bucket was deleted and made anew since the store was opened, with other data; open the store again",
        )
        .with("bucket", &self.name))
    }

    /// The subjects of all records.
    pub(super) async fn records(&self, link: &Link) -> Result<Vec<String>> {
        let filter = format!("$KV.{}.{}.lock.*", self.name, self.id);
        let mut subjects = Vec::new();
        loop {
            let body = serde_json::json!({"subjects_filter": filter, "offset": subjects.len()});
            let info = info(link, &self.stream, &Bytes::from(body.to_string())).await?;
            self.recognise(&info)?;
            let more = info.state.subjects.len();
            subjects.extend(info.state.subjects.into_keys());
            let count = u64::try_from(subjects.len()).unwrap_or(u64::MAX);
            if more == 0 || count >= info.total || count % SUBJECTS_PAGE != 0 {
                return Ok(subjects);
            }
        }
    }
}

async fn info(link: &Link, stream: &str, body: &Bytes) -> Result<Info, Failure> {
    link.api(&format!("$JS.API.STREAM.INFO.{stream}"), body)
        .await
}

async fn create(link: &Link, options: &NatsOptions, stream: &str) -> Result<Info> {
    let id = hex(&random::id());
    let wanted = Wanted {
        name: stream,
        subjects: [format!("$KV.{}.{id}.>", options.bucket)],
        retention: "limits",
        storage: "file",
        // A full bucket refuses, and forgets nothing.
        discard: "new",
        max_msgs_per_subject: 1,
        num_replicas: options.replicas.unwrap_or(1),
        deny_delete: true,
        deny_purge: true,
        // A follower may be behind.
        allow_direct: false,
        metadata: HashMap::from([(ID, id.as_str())]),
    };
    let body = serde_json::to_vec(&wanted)
        .map_err(|e| Error::invalid("a bucket that cannot be described").with_source(e))?;
    let subject = format!("$JS.API.STREAM.CREATE.{stream}");
    match link.api_once(&subject, &Bytes::from(body)).await {
        Ok(info) => Ok(info),
        // Somebody else was first; or nobody knows, which the next look tells.
        Err(failure)
            if failure.code == Some(OTHER_SETTINGS) || failure.effect == Effect::Unknown =>
        {
            match info(link, stream, &Bytes::new()).await {
                Err(now) if now.code == Some(NO_STREAM) => Err(failure.into()),
                looked => Ok(looked?),
            }
        }
        Err(failure) => Err(failure.into()),
    }
}

impl Info {
    /// The id that stands in the settings; of a bucket that others made, when it was made.
    fn id(&self) -> String {
        match self.config.metadata.get(ID) {
            Some(id) => id.clone(),
            None => self.created.chars().filter(char::is_ascii_digit).collect(),
        }
    }

    /// True where several servers keep the stream together, one of which leads.
    fn is_replicated(&self) -> bool {
        let cluster = self.cluster.as_ref();
        cluster.is_some_and(|cluster| cluster.raft_group.is_some())
    }

    pub(super) fn clock(&self) -> Result<Clock> {
        let now = self.ts.as_deref().ok_or_else(|| {
            Error::unsupported("the NATS server does not tell its time; it has to be 2.10 or later")
        })?;
        let cluster = self.cluster.as_ref();
        let since = match cluster.and_then(|cluster| cluster.leader_since.as_deref()) {
            Some(since) => Some(unix_ns(since)?),
            // Whoever answers does not lead, or not any more: its clock is not the one that stamps.
            None if self.is_replicated() => {
                return Err(Error::unavailable(
                    "the bucket has no leader now that tells its time",
                ));
            }
            None => None,
        };
        Ok(Clock {
            now_ns: unix_ns(now)?,
            since_ns: since,
        })
    }
}

impl Config {
    /// Refuses a bucket in which a record could be lost, or an acknowledged write.
    fn check(&self, bucket: &str, replicas: Option<usize>) -> Result<()> {
        let limited = self.max_msgs > 0 || self.max_bytes > 0;
        let unfit = if self.storage != "file" {
            "it is kept in memory, and its tokens would begin again after a restart; make it with file storage"
        } else if self.max_age > 0 {
            "its records expire (max_age, or a TTL), and tokens with them; make it without"
        } else if self.mirror.is_some() || !self.sources.is_empty() {
            "it is a copy of another (mirror or sources), which is behind; name the original"
        } else if self.retention != "limits" {
            "its records go when they are read; make it with retention limits"
        } else if limited && self.discard != "new" {
            "it drops old records when it is full (max_msgs or max_bytes); make it with discard new"
        } else if self.no_ack {
            "it acknowledges nothing (no_ack); make it with acknowledgements"
        } else if self.persist_mode == "async" {
            "it acknowledges what is not written yet (persist_mode async); make it with the default"
        } else if self.subject_transform.is_some() {
            "it renames its subjects (subject_transform); make it without"
        } else if self.sealed {
            "it is sealed, so that nothing can be written to it"
        } else {
            return self.check_replicas(bucket, replicas);
        };
        Err(
            Error::unsupported(format!("the bucket cannot hold locks: {unfit}"))
                .with("bucket", bucket),
        )
    }

    fn check_replicas(&self, bucket: &str, wanted: Option<usize>) -> Result<()> {
        match wanted {
            Some(wanted) if wanted != self.num_replicas => Err(Error::invalid(
                "the bucket is there with another number of replicas; change it with `nats stream edit`, or leave replicas out",
            )
            .with("bucket", bucket)
            .with("replicas", wanted)
            .with("present", self.num_replicas)),
            _ => Ok(()),
        }
    }
}

/// A server's time, `2026-12-02T01:37:37.939642143Z`, in nanoseconds since the Unix epoch.
pub(super) fn unix_ns(text: &str) -> Result<u64> {
    parse_time(text).ok_or_else(|| {
        Error::corrupt("not a time that a NATS server tells").with("time", format_args!("{text:?}"))
    })
}

fn parse_time(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, ""));
    let numbers = |text: &str, separator| -> Option<[u64; 3]> {
        let parts: Option<Vec<u64>> = text.split(separator).map(|n| n.parse().ok()).collect();
        parts?.try_into().ok()
    };
    let ([year, month, day], [hour, minute, second]) = (numbers(date, '-')?, numbers(time, ':')?);
    let in_range = (1970..=2500).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    // A sign is not a digit, though it is where numbers are parsed.
    if !in_range || text.contains('+') {
        return None;
    }
    // Years begin in March here, so that the leap day is their last.
    let (year, month) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let leap_days = year / 4 - year / 100 + year / 400;
    let days = year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1;
    // The days from March of the year 0 to 1970.
    let days = days.checked_sub(719_468)?;
    let secs = days * 86_400 + hour * 3_600 + minute * 60 + second;
    let nanos: u64 = if fraction.is_empty() {
        0
    } else {
        format!("{fraction:0<9}").get(..9)?.parse().ok()?
    };
    Some(secs * 1_000_000_000 + nanos)
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, ns) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:00.5Z", 500_000_000),
            ("2000-02-29T12:00:00Z", 951_825_600_000_000_000),
            ("2026-12-02T01:37:37.939642143Z", 1_796_175_457_939_642_143),
        ] {
            assert_eq!(unix_ns(text).unwrap(), ns, "{text}");
        }
        for bad in [
            "",
            "now",
            "2026-12-02",
            "2026-13-02T00:00:00Z",
            "0001-01-01T00:00:00Z",
        ] {
            assert!(unix_ns(bad).is_err(), "{bad}");
        }
    }

    fn config(changes: &serde_json::Value) -> Config {
        let mut config = serde_json::json!({
            "retention": "limits", "storage": "file", "discard": "new", "num_replicas": 1
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn a_bucket_that_could_forget_is_refused() {
        let good = [
            serde_json::json!({}),
            serde_json::json!({"max_bytes": 1000}),
            serde_json::json!({"discard": "old", "max_bytes": -1, "max_msgs": -1}),
        ];
        for changes in good {
            config(&changes).check("b", None).unwrap();
        }
        for (changes, said) in [
            (serde_json::json!({"storage": "memory"}), "memory"),
            (serde_json::json!({"max_age": 1}), "expire"),
            (serde_json::json!({"mirror": {"name": "x"}}), "copy"),
            (serde_json::json!({"sources": [{"name": "x"}]}), "copy"),
            (serde_json::json!({"retention": "interest"}), "retention"),
            (
                serde_json::json!({"discard": "old", "max_msgs": 9}),
                "drops",
            ),
            (serde_json::json!({"no_ack": true}), "acknowledges nothing"),
            (serde_json::json!({"persist_mode": "async"}), "not written"),
            (serde_json::json!({"subject_transform": {}}), "renames"),
            (serde_json::json!({"sealed": true}), "sealed"),
        ] {
            let error = config(&changes).check("b", None).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
        let error = config(&serde_json::json!({}))
            .check("b", Some(3))
            .unwrap_err();
        assert!(
            error.to_string().contains("replicas=3 present=1"),
            "{error}"
        );
    }
}
