//! Scripts: sent by their hash, and in full where the server does not know them.

use redis::{Cmd, Script, Value};

use super::answer::{self, Failure, Words};
use super::connect::{ACKNOWLEDGE_LIMIT, Link};
use crate::error::{Error, Result};

/// One call of a script. All its keys are in one slot.
pub(super) struct Call<'a> {
    script: &'a Script,
    code: &'static str,
    keys: Vec<String>,
    args: Vec<Vec<u8>>,
}

/// A script and its text.
pub(super) struct Scripted {
    script: Script,
    code: &'static str,
}

impl Scripted {
    pub(super) fn new(code: &'static str) -> Self {
        Self {
            script: Script::new(code),
            code,
        }
    }

    pub(super) fn call(&self, key: impl Into<String>) -> Call<'_> {
        Call {
            script: &self.script,
            code: self.code,
            keys: vec![key.into()],
            args: Vec::new(),
        }
    }
}

/// How many servers have to confirm a write before it counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Acknowledge {
    /// Replicas that have it in memory (WAIT).
    pub(super) replicas: u32,
    /// The server has it on its disk (WAITAOF).
    pub(super) aof: bool,
}

impl Acknowledge {
    pub(super) fn is_needed(self) -> bool {
        self.replicas > 0 || self.aof
    }

    fn command(self) -> Cmd {
        let limit_ms = ACKNOWLEDGE_LIMIT.as_millis().to_string();
        if self.aof {
            let mut command = redis::cmd("WAITAOF");
            command.arg(1).arg(self.replicas).arg(limit_ms);
            command
        } else {
            let mut command = redis::cmd("WAIT");
            command.arg(self.replicas).arg(limit_ms);
            command
        }
    }

    /// `None` where enough confirmed, else what to say.
    fn missing(self, answer: Value) -> Option<String> {
        let confirmed = if self.aof {
            answer::parse::<(u32, u32)>(answer)
        } else {
            answer::parse::<u32>(answer).map(|replicas| (1, replicas))
        };
        match confirmed {
            Ok((disk, replicas)) if disk >= 1 && replicas >= self.replicas => None,
            Ok((disk, replicas)) => Some(format!(
                "too few servers confirmed in time, so the write does not count needed_replicas={} replicas={replicas} disk={disk}",
                self.replicas
            )),
            Err(failure) => Some(format!(
                "the server cannot say whether others have the write: {}",
                Error::from(failure)
            )),
        }
    }
}

/// The answer of a script, and whether it is confirmed.
pub(super) struct Acknowledged {
    pub(super) words: Words,
    /// What to say where too few servers confirmed.
    pub(super) missing: Option<Error>,
}

impl Call<'_> {
    pub(super) fn key(mut self, key: &str) -> Self {
        self.keys.push(key.to_owned());
        self
    }

    pub(super) fn arg(mut self, arg: impl AsRef<[u8]>) -> Self {
        self.args.push(arg.as_ref().to_vec());
        self
    }

    pub(super) fn number(self, number: u64) -> Self {
        self.arg(number.to_string())
    }

    fn command(&self, in_full: bool) -> Cmd {
        let mut command = if in_full {
            let mut command = redis::cmd("EVAL");
            command.arg(self.code);
            command
        } else {
            let mut command = redis::cmd("EVALSHA");
            command.arg(self.script.get_hash());
            command
        };
        command.arg(self.keys.len()).arg(&self.keys);
        for arg in &self.args {
            command.arg(arg.as_slice());
        }
        command
    }

    /// Runs it in one round trip.
    pub(super) async fn run(&self, link: &Link) -> Result<Words, Failure> {
        let answer = match link.command(&self.command(false)).await {
            Err(failure) if failure.is_unknown_script() => link.command(&self.command(true)).await,
            answer => answer,
        }?;
        Words::of(answer)
    }

    /// Runs it, and waits on the same connection until enough servers have its effect: in the
    /// same round trip.
    pub(super) async fn run_acknowledged(
        &self,
        link: &Link,
        needed: Acknowledge,
    ) -> Result<Acknowledged, Failure> {
        if !needed.is_needed() {
            let words = self.run(link).await?;
            return Ok(Acknowledged {
                words,
                missing: None,
            });
        }
        let mut answers = self.with(link, needed, false).await?;
        if let Some(Value::ServerError(error)) = answers.first()
            && error.code() == "NOSCRIPT"
        {
            answers = self.with(link, needed, true).await?;
        }
        let mut answers = answers.into_iter();
        let words = Words::of(answers.next().unwrap_or(Value::Nil))?;
        let missing = needed
            .missing(answers.next().unwrap_or(Value::Nil))
            .map(Error::unavailable);
        Ok(Acknowledged { words, missing })
    }

    async fn with(
        &self,
        link: &Link,
        needed: Acknowledge,
        in_full: bool,
    ) -> Result<Vec<Value>, Failure> {
        let mut pipeline = redis::pipe();
        pipeline.add_command(self.command(in_full));
        pipeline.add_command(needed.command());
        link.pipeline(&pipeline).await
    }
}

/// Runs many calls of one script: in one round trip where all keys are on one server, else each on
/// its own at the same time. One answer for each, in order.
pub(super) async fn run_all(
    link: &Link,
    calls: &[Call<'_>],
    needed: Acknowledge,
) -> Vec<Result<Acknowledged, Failure>> {
    if calls.len() == 1 || !link.is_single() {
        let runs = calls.iter().map(|call| call.run_acknowledged(link, needed));
        return futures_util::future::join_all(runs).await;
    }
    let (mut answers, mut missing) =
        send_all(link, calls.iter().map(|call| call.command(false)), needed).await;
    let unknown = |answer: &Result<Value, Failure>| matches!(answer, Ok(Value::ServerError(error)) if error.code() == "NOSCRIPT");
    // Those alone: the others were applied.
    let again: Vec<usize> = (0..)
        .zip(&answers)
        .filter(|(_, a)| unknown(a))
        .map(|(i, _)| i)
        .collect();
    if !again.is_empty() {
        // Once in full is enough, for the rest of the pipeline comes after it.
        let commands = (0..)
            .zip(&again)
            .filter_map(|(turn, i)| Some(calls.get(*i)?.command(turn == 0)));
        let (second, missing_again) = send_all(link, commands, needed).await;
        for (i, answer) in again.into_iter().zip(second) {
            if let Some(slot) = answers.get_mut(i) {
                *slot = answer;
            }
        }
        missing = missing_again;
    }
    answers
        .into_iter()
        .map(|answer| {
            Ok(Acknowledged {
                words: Words::of(answer?)?,
                missing: missing.as_deref().map(Error::unavailable),
            })
        })
        .collect()
}

/// Sends commands as one pipeline. One answer for each, and what to say where too few servers
/// confirmed.
async fn send_all(
    link: &Link,
    commands: impl Iterator<Item = Cmd>,
    needed: Acknowledge,
) -> (Vec<Result<Value, Failure>>, Option<String>) {
    let mut pipeline = redis::pipe();
    for command in commands {
        pipeline.add_command(command);
    }
    let count = pipeline.len();
    if needed.is_needed() {
        pipeline.add_command(needed.command());
    }
    match link.pipeline(&pipeline).await {
        Ok(mut values) => {
            let confirmed = values.split_off(count.min(values.len()));
            let missing = confirmed
                .into_iter()
                .next()
                .and_then(|answer| needed.missing(answer));
            (values.into_iter().map(Ok).collect(), missing)
        }
        Err(failure) => {
            let each = (0..count).map(|_| Err(failure.repeat()));
            (each.collect(), None)
        }
    }
}
