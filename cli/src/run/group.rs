//! The process group of the command.
//!
//! The number of a group stays taken while any process is in it, a zombie included. `run` reaps
//! the command only after it has dismissed the warden, so for both of them the number means this
//! group and no later one.

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, kill_process_group};

/// A process group, and the session that its members belong to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) id: Pid,
    /// 0 where the session was made outside of our process id namespace.
    pub(super) session: i32,
}

impl Group {
    /// The group that the process `leader`, a child of ours, leads.
    pub(super) fn led_by(leader: Pid) -> io::Result<Self> {
        Ok(Self {
            id: leader,
            session: Stat::of_self()?.session,
        })
    }

    /// Sends `signal` to all members. That there is none left is no error.
    pub(super) fn signal(self, signal: Signal) {
        // The other errors are EPERM, where every member runs as another user (a set-user-ID
        // command): there is nothing that we may do about those.
        let _ = kill_process_group(self.id, signal);
    }

    /// True where a member is alive, zombies not counted. Where /proc cannot be read, `unknown`.
    pub(super) fn has_live_members(self, unknown: bool) -> bool {
        let Ok(processes) = fs::read_dir("/proc") else {
            return unknown;
        };
        processes
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|n| n.parse::<u32>().is_ok())
            })
            .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
            .filter_map(|stat| Stat::parse(&stat))
            .any(|stat| stat.is_alive && self.includes(&stat))
    }

    fn includes(self, stat: &Stat) -> bool {
        stat.group == self.id.as_raw_nonzero().get() && stat.session == self.session
    }
}

/// What /proc/PID/stat says of a process, as proc(5) describes it.
///
/// getsid(2) and getpgrp(2) would tell our own as well, but a session or group of another process
/// id namespace is 0 there, which rustix's types cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    is_alive: bool,
    pub(super) group: i32,
    pub(super) session: i32,
}

impl Stat {
    /// Of this process.
    pub(super) fn of_self() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/self/stat")?)
            .ok_or_else(|| io::Error::other("/proc/self/stat cannot be understood"))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The second field is the name in brackets, which may hold brackets and blanks itself.
        let (_, fields) = stat.rsplit_once(')')?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?;
        let _parent = fields.next()?;
        Some(Self {
            is_alive: !matches!(state, "Z" | "X"),
            group: fields.next()?.parse().ok()?,
            session: fields.next()?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_told_by_group_session_and_state() {
        let group = Group {
            id: Pid::from_raw(42).unwrap(),
            session: 7,
        };
        let is_live_member = |stat: &str| {
            let stat = Stat::parse(stat).unwrap();
            stat.is_alive && group.includes(&stat)
        };
        assert!(is_live_member("43 (a) b) c) S 1 42 7 0 -1"));
        assert!(!is_live_member("43 (a) Z 1 42 7 0 -1"));
        assert!(!is_live_member("43 (a) S 1 42 8 0 -1"));
        assert!(!is_live_member("43 (a) S 1 41 7 0 -1"));
        assert_eq!(Stat::parse(""), None);
    }
}
