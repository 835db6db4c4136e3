//! The warden: a small process that kills the command's group when `run` cannot.
//!
//! `run` may be killed, or stopped for longer than its lease. The death signal of the command
//! covers the first, for the command itself, but neither a pipeline's other processes nor a `run`
//! that is merely stopped. So the warden, in a session of its own where no terminal and no
//! `kill -STOP` of a session reaches it, reads from a pipe until when `run` may believe in its
//! lease, and kills the group at that time, or as soon as the pipe closes without a farewell.
//!
//! It holds its three standard descriptors and no other: the pipe, a pipe for its answers, and in
//! the place of standard error the liveness file of the store, where that has one. So the store
//! does not see a killed `run` as dead before the warden has seen the group dead and ends, and
//! grants the lock to nobody until then. Nothing is ever written there. The deadline is a reading of the suspend-aware clock of one host, which both share.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use fencelock::clock::{Clock, Tick};
use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, setsid};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::group::Group;
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The hidden first argument that makes the executable be a warden.
pub(crate) const ARG: &str = "__warden";

/// The warden's answer once it is in its own session.
const READY: u8 = b'R';

/// The warden's answer before it kills the group at the deadline: `run` may be continued later, and
/// has to know that the end of its command was not the command's own.
const KILLING: u8 = b'K';

/// How long a warden may take to get ready. One that a signal stopped never does.
pub(super) const READY_LIMIT: Duration = Duration::from_secs(5);

/// How long a warden may take to go home, before it is killed: whoever stopped it must not stop
/// `run` with it.
const FAREWELL_LIMIT: Duration = Duration::from_secs(1);

/// How long the members of a killed group may take to be gone between two looks.
const DEATH_POLL: Duration = Duration::from_millis(5);

/// How many looks; a process in an uninterruptible sleep can take any time to die.
const DEATH_POLLS: u32 = 2_000;

/// The side of `run`.
#[derive(Debug)]
pub(super) struct Warden {
    process: Child,
    orders: ChildStdin,
    answers: ChildStdout,
}

impl Warden {
    /// Starts a warden that guards nothing yet, and that shares in `liveness`.
    pub(super) fn start(liveness: Option<&OwnedFd>) -> Result<Self> {
        let third = match liveness.map(OwnedFd::try_clone).transpose() {
            Ok(liveness) => liveness.map_or_else(Stdio::null, Stdio::from),
            Err(error) => return Err(Failure::system("the warden cannot be started", error)),
        };
        let mut process = Command::new(super::child::SELF)
            .arg0("fencelock")
            .arg(ARG)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(third)
            .spawn()
            .map_err(|e| Failure::system("the warden cannot be started", e))?;
        let (Some(orders), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Failure::new(
                exit_codes::INDETERMINATE,
                "the warden has no pipe",
            ));
        };
        let warden = Self {
            process,
            orders,
            answers,
        };
        // A warden that a signal stopped reads nothing, and its pipe fills up in the end.
        rustix::io::ioctl_fionbio(&warden.orders, true)
            .map_err(|e| Failure::system("the warden cannot be told", e))?;
        Ok(warden)
    }

    /// Waits until the warden is out of reach of what stops this session.
    pub(super) fn ready(&mut self, limit: Duration) -> Result<()> {
        let answer = self.answer(limit);
        let error = match answer {
            Ok(Some(READY)) => return Ok(()),
            Ok(_) => io::ErrorKind::BrokenPipe.into(),
            Err(error) => error,
        };
        Err(Failure::system("the warden does not answer", error))
    }

    /// Has the warden guard `group`, to be killed at `until`. The order waits in the pipe for a
    /// warden that is not ready yet.
    pub(super) fn guard(&mut self, group: Group, until: Tick) -> Result<()> {
        let (id, session) = (group.id.as_raw_nonzero(), group.session);
        self.order(&format!(
            "until {}\ngroup {id} {session}\n",
            until.as_nanos()
        ))
        .map_err(|e| Failure::system("the warden cannot be told", e))
    }

    /// Moves the time at which the group is killed.
    pub(super) fn until(&mut self, until: Tick) -> io::Result<()> {
        self.order(&format!("until {}\n", until.as_nanos()))
    }

    /// Sends the warden home, and waits until it is gone: from then on the group's number may be
    /// given free. True where it had killed the group.
    pub(super) fn dismiss(mut self) -> bool {
        // A warden that cannot be told is dead, or about to be.
        let _ = self.order("dismiss\n");
        let mut has_killed = false;
        // Its answers end when it does.
        while let Ok(Some(answer)) = self.answer(FAREWELL_LIMIT) {
            has_killed |= answer == KILLING;
        }
        self.end();
        has_killed
    }

    /// Ends a warden whose orders must not be carried out. It kills nobody: it has no time to.
    pub(super) fn end(mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// The next answer; `None` where no more can come.
    fn answer(&mut self, limit: Duration) -> io::Result<Option<u8>> {
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.answers, PollFlags::IN)];
        // A signal begins the wait anew; it has to come every second to make it last.
        let found = loop {
            match poll(&mut fds, Some(&limit)) {
                Err(rustix::io::Errno::INTR) => {}
                found => break found?,
            }
        };
        if found == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut answer = [0];
        let count = self.answers.read(&mut answer)?;
        Ok(answer.first().copied().filter(|_| count > 0))
    }

    fn order(&mut self, line: &str) -> io::Result<()> {
        self.orders.write_all(line.as_bytes())
    }
}

/// What the warden knows.
#[derive(Debug)]
struct Watch {
    group: Option<Group>,
    until: Tick,
}

/// Is the warden.
pub(crate) fn main(_: impl Iterator<Item = OsString>) -> Failure {
    match watch() {
        Ok(()) => Failure::quiet(exit_codes::OK),
        // Nobody would hear of it.
        Err(_) => Failure::quiet(exit_codes::INDETERMINATE),
    }
}

fn watch() -> io::Result<()> {
    // Whoever signals a whole control group or process tree means the command, which `run` sees
    // to. All threads of this process are this one.
    SigSet::all().thread_block()?;
    setsid()?;
    // A working directory would keep its file system busy.
    std::env::set_current_dir("/")?;
    close_inherited();
    io::stdout().write_all(&[READY])?;
    io::stdout().flush()?;

    let clock = Clock::system();
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC)?;
    let mut watch = Watch {
        group: None,
        until: Tick::NEVER,
    };
    let mut pending = String::new();
    loop {
        arm(&timer, watch.until)?;
        if orders_waiting(&timer)? {
            let mut chunk = [0; 4096];
            // Past the standard library's buffer, which poll(2) does not see.
            let count = rustix::io::read(io::stdin(), &mut chunk)?;
            let Some(chunk) = chunk.get(..count).filter(|c| !c.is_empty()) else {
                // `run` is gone, and its command with it, but for what the death signal spares.
                return kill(watch.group, false);
            };
            pending.push_str(&String::from_utf8_lossy(chunk));
            while let Some((line, rest)) = pending.split_once('\n') {
                if !watch.obey(line) {
                    return Ok(());
                }
                pending = rest.to_owned();
            }
            continue;
        }
        if clock.now() >= watch.until {
            if watch.group.is_some() {
                // Nobody may be left to hear it.
                let _ = rustix::io::write(io::stdout(), &[KILLING]);
            }
            return kill(watch.group, true);
        }
    }
}

impl Watch {
    /// Takes one line of orders. False where it was the farewell.
    fn obey(&mut self, line: &str) -> bool {
        let mut words = line.split(' ');
        match words.next() {
            Some("until") => {
                let until = words.next().and_then(|word| word.parse().ok());
                self.until = until.map_or(self.until, Tick::from_nanos);
            }
            Some("group") => {
                let mut number = || words.next().and_then(|word| word.parse::<i32>().ok());
                if let (Some(id), Some(session)) = (number().and_then(Pid::from_raw), number()) {
                    self.group = Some(Group { id, session });
                }
            }
            Some("dismiss") => return false,
            _ => {}
        }
        true
    }
}

/// Waits for orders or the deadline. True where there are orders, or no more can come.
fn orders_waiting(timer: &OwnedFd) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut fds = [
        PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(timer.as_fd(), PollFlags::IN),
    ];
    match poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(fds.first().is_some_and(|fd| !fd.revents().is_empty()))
}

fn arm(timer: &OwnedFd, until: Tick) -> io::Result<()> {
    // Zero would disarm the timer; so does a deadline that never comes.
    let nanos = if until == Tick::NEVER {
        0
    } else {
        until.as_nanos().max(1)
    };
    let value = Timespec {
        tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(nanos % 1_000_000_000).unwrap_or(0),
    };
    let zero = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let spec = Itimerspec {
        it_interval: zero,
        it_value: value,
    };
    timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &spec)?;
    Ok(())
}

/// Kills the group, and everything that its members fork meanwhile.
///
/// Where `run` is stopped, it cannot have reaped the command, so the number is the group's. Where
/// it is dead, the command may be reaped by whoever adopted it, and the number is the group's only
/// while a member lives: so each kill follows a look that found one in the right session.
fn kill(group: Option<Group>, run_lives: bool) -> io::Result<()> {
    let Some(group) = group else {
        return Ok(());
    };
    if run_lives {
        // At the deadline there is no time to look around first.
        group.signal(Signal::KILL);
    }
    for look in 0..DEATH_POLLS {
        // Without /proc we have to trust the number once, a moment after `run` died.
        if !group.has_live_members(look == 0) {
            return Ok(());
        }
        group.signal(Signal::KILL);
        std::thread::sleep(DEATH_POLL);
    }
    Err(io::Error::new(
        io::ErrorKind::TimedOut,
        "the group does not die",
    ))
}

/// Closes what the caller of `fencelock` had open: a pipe of theirs must not stay open for as long
/// as the warden lives.
fn close_inherited() {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let numbers: Vec<i32> = open
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2)
        .collect();
    for number in numbers {
        // One of them was the directory's own, and is closed already.
        let _ = nix::unistd::close(number);
    }
}
