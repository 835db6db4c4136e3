//! A process and all below it.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};

/// Signals a process and all below it, the parents first, so that none starts another.
pub(crate) fn signal_tree(root: u32, signal: Signal) {
    let mut tree = vec![root];
    if let Some(pid) = pid_of(root) {
        // It may be gone.
        let _ = kill_process(pid, Signal::STOP);
    }
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        for child in children(parent) {
            if let Some(pid) = pid_of(child) {
                let _ = kill_process(pid, Signal::STOP);
            }
            parents.push(child);
            tree.push(child);
        }
    }
    if signal == Signal::STOP {
        return;
    }
    for member in tree {
        if let Some(pid) = pid_of(member) {
            let _ = kill_process(pid, signal);
        }
    }
}

fn pid_of(raw: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(raw).ok()?)
}

fn children(parent: u32) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // After the name, which may hold anything, come the state and the parent.
            let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
            let found = after.split_whitespace().nth(1);
            found.and_then(|found| found.parse::<u32>().ok()) == Some(parent)
        })
        .collect()
}
