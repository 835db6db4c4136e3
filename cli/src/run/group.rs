//! The process group of the command.
//!
//! The number of a group stays taken while any process is in it, a zombie included. `run` reaps
//! the command only after it has dismissed the warden, so for both of them the number means this
//! group and no later one.

use rustix::process::{Pid, Signal, getsid, kill_process_group};

/// A process group, and the session that its members belong to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) id: Pid,
    pub(super) session: Pid,
}

impl Group {
    /// The group that the process `leader`, a child of ours, leads.
    pub(super) fn led_by(leader: Pid) -> rustix::io::Result<Self> {
        Ok(Self {
            id: leader,
            session: getsid(None)?,
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
        let Ok(processes) = std::fs::read_dir("/proc") else {
            return unknown;
        };
        processes
            .flatten()
            .filter(|entry| {
                entry
                    .file_name()
                    .to_str()
                    .is_some_and(|n| n.parse::<u32>().is_ok())
            })
            .filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok())
            .any(|stat| self.is_live_member(&stat))
    }

    /// Judges one line of /proc/PID/stat, as proc(5) describes it.
    fn is_live_member(self, stat: &str) -> bool {
        // The second field is the name in brackets, which may hold brackets and blanks itself.
        let Some((_, fields)) = stat.rsplit_once(')') else {
            return false;
        };
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next();
        let _parent = fields.next();
        let group = fields.next().and_then(|f| f.parse().ok());
        let session = fields.next().and_then(|f| f.parse().ok());
        group == Some(self.id.as_raw_nonzero().get())
            && session == Some(self.session.as_raw_nonzero().get())
            && !matches!(state, Some("Z" | "X"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_told_by_group_session_and_state() {
        let pid = |n| Pid::from_raw(n).unwrap();
        let group = Group {
            id: pid(42),
            session: pid(7),
        };
        assert!(group.is_live_member("43 (a) b) c) S 1 42 7 0 -1"));
        assert!(!group.is_live_member("43 (a) Z 1 42 7 0 -1"));
        assert!(!group.is_live_member("43 (a) S 1 42 8 0 -1"));
        assert!(!group.is_live_member("43 (a) S 1 41 7 0 -1"));
        assert!(!group.is_live_member(""));
    }
}
