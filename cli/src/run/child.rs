//! The command: started in a group of its own, held at the gate, watched, and reaped last.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child as Process, Command, ExitStatus};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, getpid, kill_process, waitid,
};
use tokio::sync::mpsc;

use super::group::Group;
use super::launch;
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// This executable, even where its file was replaced or removed meanwhile.
pub(super) const SELF: &str = "/proc/self/exe";

/// What happens to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// It ended, and is not yet reaped.
    Ended,
    /// A signal stopped it.
    Stopped,
}

/// The command's process.
#[derive(Debug)]
pub(super) struct Child {
    process: Process,
    id: Pid,
    events: Option<mpsc::UnboundedReceiver<Event>>,
}

impl Child {
    /// Starts the command up to the gate, where it is stopped with its death signal set.
    ///
    /// Called on the main thread: the death signal follows the *thread* that spawned, and that one
    /// lives as long as the process.
    pub(super) fn start(
        command: &OsString,
        args: &[OsString],
        environment: &[(&str, OsString)],
    ) -> Result<Self> {
        let process = Command::new(SELF)
            .arg0("fencelock")
            .arg(launch::ARG)
            .arg(getpid().as_raw_nonzero().to_string())
            .arg(command)
            .args(args)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .process_group(0)
            .spawn()
            .map_err(|e| match e.kind() {
                // What execve(2) would have said of the command itself.
                io::ErrorKind::ArgumentListTooLong => Failure::new(
                    exit_codes::NOT_EXECUTABLE,
                    format!("{}: cannot be executed: {e}", command.to_string_lossy()),
                ),
                _ => Failure::system("the command cannot be started", e),
            })?;
        let id = i32::try_from(process.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| {
                Failure::new(exit_codes::INDETERMINATE, "the command has no process id")
            })?;
        let child = Self {
            process,
            id,
            events: None,
        };
        match child.wait_at_gate() {
            Ok(true) => Ok(child),
            Ok(false) => Err(Failure::new(
                exit_codes::INDETERMINATE,
                "the command ended before it was started",
            )),
            Err(error) => {
                child.abandon();
                Err(Failure::system("the command cannot be watched", error))
            }
        }
    }

    /// The group that the command leads.
    pub(super) fn group(&self) -> Result<Group> {
        Group::led_by(self.id).map_err(|e| Failure::system("the session is not known", e))
    }

    /// Opens the gate: from here on the command runs.
    pub(super) fn go(&mut self) -> Result<()> {
        self.events = Some(watch(self.id)?);
        kill_process(self.id, Signal::CONT)
            .map_err(|e| Failure::system("the command cannot be started", e))
    }

    /// The next event. Cancel safe.
    pub(super) async fn event(&mut self) -> Event {
        match &mut self.events {
            // The watching thread ends only after `Ended`.
            Some(events) => events.recv().await.unwrap_or(Event::Ended),
            None => std::future::pending().await,
        }
    }

    /// True where it has ended, also where the event is still on its way.
    pub(super) fn has_ended(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        matches!(waitid(WaitId::Pid(self.id), look), Ok(Some(_)))
    }

    /// Reaps the command, which has ended, and so gives its number free.
    pub(super) fn reap(mut self) -> Result<ExitStatus> {
        self.process
            .wait()
            .map_err(|e| Failure::system("the command's status is not known", e))
    }

    /// Ends a command that has not passed the gate.
    pub(super) fn abandon(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// True once it is stopped at the gate; false where it ended before.
    fn wait_at_gate(&self) -> io::Result<bool> {
        let status = wait(self.id, WaitIdOptions::STOPPED | WaitIdOptions::EXITED)?;
        if status.stopped() {
            consume_stop(self.id)?;
        }
        Ok(status.stopped())
    }
}

/// The exit code of `run` for a command that ended so.
pub(super) fn exit_code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt as _;
    let code = status.code().or_else(|| {
        status
            .signal()
            .map(|signal| i32::from(exit_codes::SIGNAL_BASE) + signal)
    });
    code.and_then(|c| u8::try_from(c).ok())
        .unwrap_or(exit_codes::INDETERMINATE)
}

/// True where KILL ended it, as it does what the warden kills.
pub(super) fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt as _;
    status.signal() == Some(Signal::KILL.as_raw())
}

/// Watches from a thread of its own, which only looks: the status stays for whoever reaps.
fn watch(id: Pid) -> Result<mpsc::UnboundedReceiver<Event>> {
    let (events, receiver) = mpsc::unbounded_channel();
    std::thread::Builder::new()
        .name("command".to_owned())
        .spawn(move || {
            loop {
                let event = match wait(id, WaitIdOptions::STOPPED | WaitIdOptions::EXITED) {
                    Ok(status) if status.stopped() => Event::Stopped,
                    Ok(_) | Err(_) => Event::Ended,
                };
                // `run` may have ended first; then nobody is left to tell.
                if events.send(event).is_err() || event == Event::Ended {
                    return;
                }
                if consume_stop(id).is_err() {
                    let _ = events.send(Event::Ended);
                    return;
                }
            }
        })
        .map_err(|e| Failure::system("the command cannot be watched", e))?;
    Ok(receiver)
}

/// Waits for a change of state without consuming it.
fn wait(id: Pid, states: WaitIdOptions) -> io::Result<WaitIdStatus> {
    loop {
        match waitid(WaitId::Pid(id), states | WaitIdOptions::NOWAIT) {
            Ok(Some(status)) => return Ok(status),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes note of a stop, so that the next wait does not report it again.
fn consume_stop(id: Pid) -> io::Result<()> {
    waitid(
        WaitId::Pid(id),
        WaitIdOptions::STOPPED | WaitIdOptions::NOHANG,
    )?;
    Ok(())
}
