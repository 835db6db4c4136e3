//! `fencelock demo`: the stale write, played by two processes with a real pause.
//!
//! The parent only starts, pauses and wakes the two workers, and tells the reader what they report.
//! Nothing is simulated: the lease lapses because its holder is stopped, and the storage refuses
//! because of the token.

pub(crate) mod worker;

use std::fmt;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::lease::Severity;
use fencelock::{FencingToken, LockName, Locks};
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::DemoArgs;
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::fenced::Destination;
use crate::output::{self, clean, human};
use crate::store::StoreUrl;

/// The lock of the demo.
const LOCK: &str = "payment-export";

/// How long a lease of the demo lasts: long enough to read a line, short enough to wait for.
const TTL: Duration = Duration::from_secs(2);

/// How long the lapse is waited for beyond the TTL, where the store cannot say.
const LAPSE_SLACK: Duration = Duration::from_secs(2);

/// How often the lock is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(50);

const VALUE_A: &str = "payments, exported by A\n";
const VALUE_B: &str = "payments, exported by B\n";

/// What a worker says on its standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// It holds the lock, with this token.
    Acquired(FencingToken),
    /// Its write was accepted, and this is the watermark.
    Accepted(FencingToken),
    /// Its write was refused, and this is the watermark.
    Refused(FencingToken),
    /// It wrote, and nobody looked at its token.
    Unchecked,
}

/// Plays the demo, and fails where the promise did not hold.
pub(crate) async fn demo(store: Option<&str>, args: &DemoArgs, json: bool) -> Result<u8> {
    if json {
        return Err(Failure::usage(
            "the demo is a story for people and has no JSON; leave --json away",
        ));
    }
    let dir = tempfile::tempdir().map_err(|e| Failure::system("temporary directory", e))?;
    let store = match store {
        Some(url) => StoreUrl::resolve(Some(url))?,
        None => StoreUrl::of_path(&dir.path().join("locks")),
    };
    if store.is_of_one_process() {
        return Err(Failure::new(
            exit_codes::CONFIG,
            format!(
                "the demo's two processes need a store that both see, and {store} is one process's own; leave --store away or give file:///dir"
            ),
        ));
    }
    let dest = match &args.dest {
        Some(dest) => dest.clone(),
        None => dir.path().join("today.csv").to_string_lossy().into_owned(),
    };
    let checked = !args.without_fencing;
    if !checked && dest.contains("://") {
        return Err(Failure::usage(
            "without fencing, the demo writes a plain file; expected --dest PATH",
        ));
    }
    check(&dest).await?;
    let stage = Stage {
        locks: store.open().await?,
        name: LockName::new(LOCK)?,
        store,
        dest,
        checked,
        style: Style::detect(),
    };
    let outcome = stage.play().await?;
    stage.close(&outcome)
}

/// Checks, before anything is played, that the last steps can be.
async fn check(dest: &str) -> Result<()> {
    let found = Destination::open(dest).await?.probe().await?;
    match found.into_iter().find(|f| f.severity == Severity::Bad) {
        None => Ok(()),
        Some(bad) => Err(Failure::new(
            exit_codes::CONFIG,
            format!(
                "destination {}: {}: {}",
                fencelock::open::without_secrets(dest),
                bad.subject,
                bad.detail
            ),
        )),
    }
}

/// Where the demo plays.
struct Stage {
    locks: Locks,
    name: LockName,
    store: StoreUrl,
    dest: String,
    checked: bool,
    style: Style,
}

/// How it ended.
#[derive(Debug)]
struct Outcome {
    a: FencingToken,
    b: FencingToken,
    /// What became of A's late write.
    late: Report,
    value: Vec<u8>,
}

impl Stage {
    async fn play(&self) -> Result<Outcome> {
        self.say(
            "Two processes share one lock and one file. One of them is paused at the worst moment,",
        )?;
        self.say("as a moved virtual machine or a long garbage collection would do it.")?;
        self.say(&format!("  lock  {LOCK:?} in {}", self.store))?;
        self.say(&format!(
            "  file  {}",
            fencelock::open::without_secrets(&self.dest)
        ))?;
        self.say("")?;

        let mut a = self.start("A", VALUE_A)?;
        let token_a = a.acquired()?;
        self.step(
            1,
            &format!("A (process {}) acquires the lock.", a.id),
            &format!("token {token_a}"),
        )?;

        a.signal(Signal::STOP)?;
        self.step(
            2,
            "A is paused (SIGSTOP), just after it checked that the lock is its own.",
            "",
        )?;

        self.lapse().await?;
        let lapsed = format!(
            "A's lease of {} is over, and nobody renewed it. A does not know.",
            human(TTL)
        );
        self.step(3, &lapsed, "")?;

        let mut b = self.start("B", VALUE_B)?;
        let token_b = b.acquired()?;
        if token_b <= token_a {
            return Err(Failure::new(
                exit_codes::INDETERMINATE,
                format!(
                    "the demo did not end as promised: B's token is not larger than A's a={token_a} b={token_b}"
                ),
            ));
        }
        self.step(
            4,
            &format!("B (process {}) acquires the same lock.", b.id),
            &format!("token {token_b}, which is larger"),
        )?;

        let written = b.write()?;
        let said = match written {
            Report::Accepted(watermark) => self
                .style
                .good(&format!("accepted; highest token seen: {watermark}")),
            Report::Refused(watermark) => {
                return Err(Failure::new(
                    exit_codes::FENCED,
                    format!(
                        "destination {} has seen a larger token than B's, so it cannot show the demo; give another --dest token={token_b} watermark={watermark}",
                        fencelock::open::without_secrets(&self.dest)
                    ),
                ));
            }
            Report::Acquired(_) | Report::Unchecked => "written, no token checked".to_owned(),
        };
        self.step(5, &format!("B writes {:?}.", VALUE_B.trim_end()), &said)?;

        a.signal(Signal::CONT)?;
        let late = a.write()?;
        let said = match late {
            Report::Refused(watermark) => self.style.bad(&format!(
                "REFUSED: token {token_a} is older than {watermark}"
            )),
            Report::Unchecked => self.style.bad("written over B's data, no token checked"),
            _ => "accepted".to_owned(),
        };
        self.step(
            6,
            &format!("A wakes up (SIGCONT) and writes {:?}.", VALUE_A.trim_end()),
            &said,
        )?;

        let value = self.value().await?;
        let shown = String::from_utf8_lossy(&value);
        self.step(7, &format!("The file now says {:?}.", shown.trim_end()), "")?;
        b.end()?;
        a.end()?;
        Ok(Outcome {
            a: token_a,
            b: token_b,
            late,
            value,
        })
    }

    /// Says what the reader has seen, and asserts it.
    fn close(&self, outcome: &Outcome) -> Result<u8> {
        let kept = outcome.value == VALUE_B.as_bytes();
        let overwritten = outcome.value == VALUE_A.as_bytes();
        let refused = outcome.late == Report::Refused(outcome.b);
        self.say("")?;
        if outcome.b > outcome.a && self.checked && refused && kept {
            self.say("A did nothing wrong, and no lock could have stopped it. The storage could: the token of")?;
            self.say("A's write was older than one that it had seen. B's data is safe.")?;
            self.say("")?;
            self.say("Now see it go wrong:  fencelock demo --without-fencing")?;
            return Ok(exit_codes::OK);
        }
        if outcome.b > outcome.a && !self.checked && overwritten {
            self.say("B's data is lost, and nobody saw an error: that is what a lock without fencing tokens does.")?;
            self.say("")?;
            self.say("Protect your own job:  fencelock run NAME -- sh -c './export | fencelock put FILE'")?;
            return Ok(exit_codes::OK);
        }
        Err(Failure::new(
            exit_codes::INDETERMINATE,
            format!(
                "the demo did not end as promised: A had token {}, B had token {}, A's late write was {:?}, the value is {:?}",
                outcome.a,
                outcome.b,
                outcome.late,
                String::from_utf8_lossy(&outcome.value)
            ),
        ))
    }

    /// Waits until the store says that the lock is free, or for as long as it can take.
    async fn lapse(&self) -> Result<()> {
        let clock = Clock::system();
        let started = clock.now();
        while clock.now().since(started) < TTL + LAPSE_SLACK {
            let state = self.locks.inspect(&self.name).await?;
            if state.is_none_or(|state| state.holders.is_empty()) {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    async fn value(&self) -> Result<Vec<u8>> {
        if !self.checked {
            return std::fs::read(&self.dest).map_err(|e| Failure::system(&self.dest, e));
        }
        Destination::open(&self.dest).await?.bytes().await
    }

    fn start(&self, who: &'static str, value: &str) -> Result<Worker> {
        let mode = if self.checked { "checked" } else { "unchecked" };
        let mut process = Command::new("/proc/self/exe")
            .arg0("fencelock")
            .args([worker::ARG, self.name.as_str(), &self.dest, value, mode])
            .env(env::STORE, self.store.reveal())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::system("the demo's process cannot be started", e))?;
        let id = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        match (id, process.stdin.take(), process.stdout.take()) {
            (Some(id), Some(orders), Some(reports)) => Ok(Worker {
                who,
                id,
                process,
                orders,
                reports: BufReader::new(reports),
            }),
            _ => Err(Failure::new(
                exit_codes::INDETERMINATE,
                "the demo's process has no pipes",
            )),
        }
    }

    fn step(&self, number: u32, text: &str, result: &str) -> Result<()> {
        // Wide enough that the results stand in one column.
        let line = format!("{number}. {text:<66} {result}");
        self.say(line.trim_end())
    }

    fn say(&self, text: &str) -> Result<()> {
        Ok(output::line(text)?)
    }
}

/// One of the two processes. Killed, paused or not, when the demo is over.
struct Worker {
    who: &'static str,
    id: Pid,
    process: Child,
    orders: ChildStdin,
    reports: BufReader<ChildStdout>,
}

impl Worker {
    fn acquired(&mut self) -> Result<FencingToken> {
        match self.report()? {
            Report::Acquired(token) => Ok(token),
            other => Err(self.unexpected(&other)),
        }
    }

    fn write(&mut self) -> Result<Report> {
        self.tell()?;
        match self.report()? {
            report @ Report::Acquired(_) => Err(self.unexpected(&report)),
            report => Ok(report),
        }
    }

    fn end(mut self) -> Result<()> {
        self.tell()?;
        self.process
            .wait()
            .map_err(|e| Failure::system("the demo's process cannot be waited for", e))?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(self.id, signal)
            .map_err(|e| Failure::system("the demo's process cannot be signalled", e))
    }

    fn tell(&mut self) -> Result<()> {
        writeln!(self.orders, "go").map_err(|e| Failure::system("the demo's process is gone", e))
    }

    fn report(&mut self) -> Result<Report> {
        let mut line = String::new();
        self.reports
            .read_line(&mut line)
            .map_err(|e| Failure::system("the demo's process cannot be heard", e))?;
        if let Some(report) = Report::parse(line.trim_end()) {
            return Ok(report);
        }
        // It has said why on standard error, which is ours too, and its code tells whose fault it is.
        let status = self.process.wait().ok();
        let code = status
            .and_then(|status| status.code())
            .and_then(|code| u8::try_from(code).ok())
            .filter(|code| *code != exit_codes::OK)
            .unwrap_or(exit_codes::INDETERMINATE);
        Err(Failure::new(
            code,
            format!("process {} of the demo failed", self.who),
        ))
    }

    fn unexpected(&self, report: &Report) -> Failure {
        Failure::new(
            exit_codes::INDETERMINATE,
            format!(
                "process {} of the demo said something else: {report}",
                self.who
            ),
        )
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Report {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let word = words.next()?;
        let mut token = || words.next()?.parse().ok();
        Some(match word {
            "acquired" => Self::Acquired(token()?),
            "accepted" => Self::Accepted(token()?),
            "refused" => Self::Refused(token()?),
            "unchecked" => Self::Unchecked,
            _ => return None,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Acquired(token) => write!(f, "acquired {token}"),
            Self::Accepted(watermark) => write!(f, "accepted {watermark}"),
            Self::Refused(watermark) => write!(f, "refused {watermark}"),
            Self::Unchecked => f.write_str("unchecked"),
        }
    }
}

/// Colours, where a terminal is there to show them and nobody asked for none (no-color.org).
#[derive(Clone, Copy, Debug)]
struct Style {
    coloured: bool,
}

impl Style {
    fn detect() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Self {
            coloured: io::stdout().is_terminal() && !refused && !dumb,
        }
    }

    fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        let text = clean(text);
        if self.coloured {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_round_trip() {
        let token = FencingToken::new(34).unwrap();
        for report in [
            Report::Acquired(token),
            Report::Accepted(token),
            Report::Refused(token),
            Report::Unchecked,
        ] {
            assert_eq!(Report::parse(&report.to_string()), Some(report));
        }
        assert_eq!(Report::parse(""), None);
    }
}
