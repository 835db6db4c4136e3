//! The command lives no longer than the lock: kills, pauses, losses, and commands that do not want
//! to end.

use std::io::BufRead as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::bench::{Bench, Running, ended, eventually, is_alive, within};
use rustix::process::{Pid, Signal, kill_process};

/// A command that heeds no TERM, in a pipeline whose other end does not either.
const STUBBORN: &str = "trap '' TERM HUP INT; (trap '' TERM HUP INT; echo $(exec sh -c 'echo $PPID'); while :; do sleep 0.05; done) | while read -r p; do echo $p; done & echo $$; while :; do sleep 0.05; done";

/// Prints its own pid and that of a second process of its group, and goes on.
const PIPELINE: &str = "sleep 1000 & echo $!; echo $$; wait";

#[test]
fn a_killed_holder_is_replaced_at_once_and_its_command_is_dead() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "120s"], PIPELINE));
    let (grandchild, child) = (holder.line_pid(), holder.line_pid());
    holder.signal(Signal::KILL);
    let started = crate::bench::now();
    ended(&mut bench.run_sh("job", &["--wait", "20s"], "true")).expect_code(0);
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
    within(Duration::from_secs(1), "the command is dead", || {
        !is_alive(child)
    });
    within(Duration::from_secs(1), "its group is dead", || {
        !is_alive(grandchild)
    });
}

#[test]
fn a_killed_holders_stubborn_pipeline_dies_too() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &[], STUBBORN));
    let pids = (holder.line_pid(), holder.line_pid());
    holder.signal(Signal::KILL);
    within(Duration::from_secs(2), "all are dead", || {
        !is_alive(pids.0) && !is_alive(pids.1)
    });
}

#[test]
fn a_killed_holder_is_not_replaced_before_its_group_is_dead() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "120s"], PIPELINE));
    let (grandchild, child) = (holder.line_pid(), holder.line_pid());
    let warden = KilledAtTheEnd(warden_of(holder.pid()).unwrap());
    kill_process(warden.0, Signal::STOP).unwrap();
    holder.signal(Signal::KILL);
    within(Duration::from_secs(1), "the command is dead", || {
        !is_alive(child)
    });
    // The rest of its group lives as long as the warden is held up.
    ended(&mut bench.run_sh("job", &["--wait", "1s"], "true")).expect_code(75);
    assert!(is_alive(grandchild));
    kill_process(warden.0, Signal::CONT).unwrap();
    // The next holder looks, as its very first act.
    let stat = format!("/proc/{}/stat", grandchild.as_raw_nonzero());
    let look = format!("awk '{{print $3}}' {stat} 2>/dev/null || echo gone");
    let next = ended(&mut bench.run_sh("job", &["--wait", "20s"], &look)).expect_code(0);
    assert!(matches!(next.out.trim(), "gone" | "Z"), "{}", next.out);
}

#[test]
fn a_stopped_holder_is_replaced_after_its_ttl_and_its_group_was_killed_before() {
    let bench = Bench::new();
    // The next holder looks whether the former one's processes live, as its very first act.
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "2s"], PIPELINE));
    let (grandchild, child) = (holder.line_pid(), holder.line_pid());
    let (g, c) = (grandchild.as_raw_nonzero(), child.as_raw_nonzero());
    // The holder alone: its command goes on meanwhile.
    holder.signal(Signal::STOP);
    let started = crate::bench::now();
    let look = format!(
        "for p in {g} {c}; do awk '{{print $3}}' /proc/$p/stat 2>/dev/null || echo gone; done"
    );
    let next = ended(&mut bench.run_sh("job", &["--wait", "20s"], &look)).expect_code(0);
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    for state in next.out.lines() {
        assert!(
            matches!(state, "gone" | "Z"),
            "alive under the next holder: {}",
            next.out
        );
    }
    holder.signal(Signal::CONT);
    let woken = holder.end().expect_code(76);
    assert!(woken.err.contains("lock lost"), "{}", woken.err);
    assert_eq!(bench.show("job")["last_token"], 2);
}

#[test]
fn a_stopped_session_is_replaced_and_its_command_is_dead_before_it_wakes() {
    let bench = Bench::new();
    // setsid forks, as we start it as a group's leader, and passes the exit code on.
    let run = bench.run_sh("job", &["--ttl", "2s"], &format!("echo $PPID; {PIPELINE}"));
    let mut command = Command::new("setsid");
    command
        .arg("--wait")
        .arg(run.get_program())
        .args(run.get_args());
    command.envs(
        run.get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let mut holder = Running::start(command.stdin(Stdio::null()));
    let (run, grandchild, child) = (holder.line_pid(), holder.line_pid(), holder.line_pid());
    let session = rustix::process::getsid(Some(run)).unwrap();
    assert_eq!(session, run);
    let members = processes_of(session);
    assert!(members.len() >= 3, "{members:?}");
    for pid in &members {
        kill_process(*pid, Signal::STOP).unwrap();
    }
    let started = crate::bench::now();
    ended(&mut bench.run_sh("job", &["--wait", "20s"], "true")).expect_code(0);
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    assert!(!is_alive(child) && !is_alive(grandchild));
    for pid in members {
        // KILL has ended some of them while they were stopped.
        let _ = kill_process(pid, Signal::CONT);
    }
    holder.end().expect_code(76);
}

#[test]
fn the_death_signal_works_without_the_warden() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &[], "echo $$; exec sleep 1000"));
    let child = holder.line_pid();
    let warden = KilledAtTheEnd(warden_of(holder.pid()).unwrap());
    kill_process(warden.0, Signal::STOP).unwrap();
    holder.signal(Signal::KILL);
    within(Duration::from_secs(1), "the command is dead", || {
        !is_alive(child)
    });
}

/// A process that would outlive a test that fails.
struct KilledAtTheEnd(Pid);

impl Drop for KilledAtTheEnd {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_short_pause_costs_nothing() {
    let bench = Bench::new();
    let mut holder = bench.run_sh("job", &["--ttl", "3s"], "echo ready; cat; exit 4");
    let mut holder = Running::start(holder.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    holder.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(1500));
    holder.signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(2500));
    assert!(!holder.has_ended());
    drop(holder.process.stdin.take());
    holder.end().expect_code(4);
}

#[test]
fn a_broken_lock_ends_the_command_and_kills_what_does_not_heed() {
    let bench = Bench::new();
    let flags = ["--ttl", "3s", "--kill-after", "200ms"];
    let mut holder = Running::start(&mut bench.run_sh("job", &flags, STUBBORN));
    let pids = (holder.line_pid(), holder.line_pid());
    let started = crate::bench::now();
    let broken = bench.fencelock(["break", "job"]).expect_code(0);
    assert!(broken.out.contains("evicted token=1"), "{}", broken.out);
    // It hears of it with its next renewal.
    let lost = holder.end().expect_code(76);
    let took = started.elapsed();
    assert!(
        took < Duration::from_secs(2),
        "not left to the warden: {took:?}"
    );
    assert!(lost.err.contains("no longer ours"), "{}", lost.err);
    assert!(!is_alive(pids.0) && !is_alive(pids.1));
    assert_eq!(
        bench.fencelock(["acquire", "job", "--json"]).json()["token"],
        2
    );
}

#[test]
fn a_command_that_heeds_term_may_clean_up_when_the_lock_is_lost() {
    let bench = Bench::new();
    let script = "trap 'echo cleaned; exit 0' TERM; echo ready; while :; do sleep 0.02; done";
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "3s"], script));
    assert_eq!(holder.line(), "ready");
    bench.fencelock(["break", "job"]).expect_code(0);
    assert_eq!(holder.line(), "cleaned");
    holder.end().expect_code(76);
}

#[test]
fn a_store_that_does_not_answer_ends_the_command_before_the_lease_lapses() {
    let bench = Bench::new();
    let flags = ["--ttl", "2s"];
    let mut holder = Running::start(&mut bench.run_sh("job", &flags, STUBBORN));
    let pids = (holder.line_pid(), holder.line_pid());
    // From here on every request waits for this lock, and none is answered.
    let record = std::fs::File::open(bench.path("locks/locks/job")).unwrap();
    record.lock().unwrap();
    let started = crate::bench::now();
    within(Duration::from_secs(2), "all are dead", || {
        !is_alive(pids.0) && !is_alive(pids.1)
    });
    let took = started.elapsed();
    assert!(
        took > Duration::from_millis(1200),
        "not before it has to be: {took:?}"
    );
    let lost = holder.end().expect_code(76);
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "it does not wait for the store"
    );
    assert!(lost.err.contains("about to lapse"), "{}", lost.err);
}

#[test]
fn a_store_that_answers_again_in_time_costs_nothing() {
    let bench = Bench::new();
    let mut command = bench.run_sh("job", &["--ttl", "3s"], "echo ready; cat; exit 4");
    let mut holder = Running::start(command.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    let record = std::fs::File::open(bench.path("locks/locks/job")).unwrap();
    for _ in 0..3 {
        record.lock().unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        record.unlock().unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
    assert!(!holder.has_ended());
    drop(holder.process.stdin.take());
    holder.end().expect_code(4);
}

#[test]
fn a_longest_hold_ends_the_command() {
    let bench = Bench::new();
    let flags = ["--max-hold", "300ms", "--kill-after", "200ms"];
    let mut holder = Running::start(&mut bench.run_sh("job", &flags, STUBBORN));
    let pids = (holder.line_pid(), holder.line_pid());
    let started = crate::bench::now();
    let ended = holder.end().expect_code(76);
    let took = started.elapsed();
    assert!(
        took < Duration::from_secs(5),
        "not left to the warden: {took:?}"
    );
    assert!(ended.err.contains("--max-hold"), "{}", ended.err);
    assert!(!is_alive(pids.0) && !is_alive(pids.1));
    assert!(!bench.is_held("job"), "it is given back");
}

#[test]
fn term_waits_for_the_command_and_then_releases() {
    let bench = Bench::new();
    let script =
        "trap 'fencelock show job --json; exit 6' TERM; echo ready; while :; do sleep 0.02; done";
    let mut holder = Running::start(&mut bench.run_sh("job", &[], script));
    assert_eq!(holder.line(), "ready");
    holder.signal(Signal::TERM);
    let during: serde_json::Value = serde_json::from_str(&holder.line()).unwrap();
    assert_eq!(
        during["holders"][0]["token"], 1,
        "held while the command cleans up"
    );
    holder.end().expect_code(6);
    assert!(!bench.is_held("job"));
}

#[test]
fn a_terminated_holder_hands_over_twenty_times() {
    let bench = Bench::new();
    let script = "echo $FENCELOCK_TOKEN; exec sleep 1000";
    let flags = ["--ttl", "60s", "--wait", "20s"];
    let mut holder = Running::start(&mut bench.run_sh("job", &flags, script));
    let mut token: u64 = holder.line().parse().unwrap();
    for round in 0..20 {
        let mut next = Running::start(&mut bench.run_sh("job", &flags, script));
        let started = crate::bench::now();
        holder.signal(Signal::TERM);
        let new: u64 = next.line().parse().unwrap();
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "round {round}: {:?}",
            started.elapsed()
        );
        assert!(new > token, "round {round}: {new} after {token}");
        token = new;
        std::mem::replace(&mut holder, next).end().expect_code(143);
    }
}

#[test]
fn a_killed_warden_is_replaced() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "2s"], PIPELINE));
    let (grandchild, child) = (holder.line_pid(), holder.line_pid());
    let first = warden_of(holder.pid()).unwrap();
    kill_process(first, Signal::KILL).unwrap();
    eventually("another stands guard", || {
        warden_of(holder.pid()).is_some_and(|pid| pid != first && has_a_deadline(pid))
    });
    holder.signal(Signal::STOP);
    within(Duration::from_secs(4), "the group is dead", || {
        !is_alive(child) && !is_alive(grandchild)
    });
    holder.signal(Signal::CONT);
    holder.end().expect_code(76);
}

#[test]
fn a_command_that_the_warden_killed_is_76_though_the_lease_is_good() {
    let bench = Bench::new();
    let mut holder = Running::start(&mut bench.run_sh("job", &["--ttl", "1s"], PIPELINE));
    let (grandchild, child) = (holder.line_pid(), holder.line_pid());
    let warden = KilledAtTheEnd(warden_of(holder.pid()).unwrap());
    eventually("it knows its deadline", || has_a_deadline(warden.0));
    kill_process(warden.0, Signal::STOP).unwrap();
    // The renewals go on, and the warden hears of none.
    let pid = warden.0.as_raw_nonzero();
    let orders = std::fs::File::open(format!("/proc/{pid}/fd/0")).unwrap();
    let missed = std::io::BufReader::new(orders).lines().take(4);
    assert!(missed.map(Result::unwrap).all(|o| o.starts_with("until ")));
    kill_process(warden.0, Signal::CONT).unwrap();
    let killed = holder.end().expect_code(76);
    assert!(killed.err.contains("its warden knew of"), "{}", killed.err);
    assert!(killed.err.contains("was ended"), "{}", killed.err);
    assert!(!is_alive(child) && !is_alive(grandchild));
    assert!(!bench.is_held("job"), "it is given back");
}

#[test]
fn a_stopped_warden_holds_up_nobody() {
    let bench = Bench::new();
    let mut command = bench.run_sh("job", &["--ttl", "1s"], "echo ready; cat; exit 4");
    let mut holder = Running::start(command.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    let warden = KilledAtTheEnd(warden_of(holder.pid()).unwrap());
    kill_process(warden.0, Signal::STOP).unwrap();
    drop(holder.process.stdin.take());
    within(Duration::from_secs(10), "run ends", || holder.has_ended());
    holder.end().expect_code(4);
    assert!(!bench.is_held("job"), "it is given back");
    assert!(!is_alive(warden.0));
}

#[test]
fn a_command_that_ended_by_itself_during_a_pause_is_said_to_have() {
    let bench = Bench::new();
    let mut command = bench.run_sh("job", &["--ttl", "1s"], "echo ready; cat; exit 0");
    let mut holder = Running::start(command.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    holder.signal(Signal::STOP);
    drop(holder.process.stdin.take());
    ended(&mut bench.run_sh("job", &["--wait", "20s"], "true")).expect_code(0);
    holder.signal(Signal::CONT);
    let woken = holder.end().expect_code(76);
    let said = "ended by itself (exit status: 0)";
    assert!(woken.err.contains(said), "{}", woken.err);
    assert!(!woken.err.contains("command was ended"), "{}", woken.err);
    assert!(!woken.err.contains("ending the command"), "{}", woken.err);
}

#[test]
fn the_warden_is_out_of_reach_and_holds_nothing_of_ours() {
    let bench = Bench::new();
    let mut command = bench.run_sh("job", &[], "echo ready; exec sleep 1000");
    let mut holder = Running::start(&mut command);
    assert_eq!(holder.line(), "ready");
    let warden = warden_of(holder.pid()).unwrap();
    assert!(is_session_leader(warden));
    eventually("it knows its deadline", || has_a_deadline(warden));
    let links = std::fs::read_dir(format!("/proc/{}/fd", warden.as_raw_nonzero())).unwrap();
    let mut open: Vec<String> = links
        .map(|link| {
            std::fs::read_link(link.unwrap().path())
                .unwrap()
                .display()
                .to_string()
        })
        .map(|target| target.split(':').next().unwrap_or_default().to_owned())
        .collect();
    open.sort();
    let liveness = bench.path("locks/live").display().to_string();
    assert!(open.remove(0).starts_with(&liveness), "{open:?}");
    assert_eq!(open, ["anon_inode", "pipe", "pipe"]);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::USR1] {
        kill_process(warden, signal).unwrap();
    }
    holder.signal(Signal::TERM);
    holder.end().expect_code(143);
    within(Duration::from_secs(1), "the warden is gone", || {
        !is_alive(warden)
    });
}

/// All processes of a session, by /proc/PID/stat.
fn processes_of(session: Pid) -> Vec<Pid> {
    let session = session.as_raw_nonzero().to_string();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let pid = path.file_name()?.to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(path.join("stat")).ok()?;
            let of = stat
                .rsplit_once(')')?
                .1
                .split_whitespace()
                .nth(3)?
                .to_owned();
            (of == session).then(|| Pid::from_raw(pid))?
        })
        .collect()
}

/// The warden of a `run`: the child of it that is in another session.
fn warden_of(run: Pid) -> Option<Pid> {
    let run = run.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{run}/task/{run}/children")).ok()?;
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok().and_then(Pid::from_raw))
        .find(|pid| {
            let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
            std::fs::read_to_string(path).is_ok_and(|line| line.contains("__warden"))
        })
}

/// True once the warden's timer is set, as proc(5) shows it.
fn has_a_deadline(warden: Pid) -> bool {
    let Ok(infos) = std::fs::read_dir(format!("/proc/{}/fdinfo", warden.as_raw_nonzero())) else {
        return false;
    };
    infos
        .filter_map(|info| std::fs::read_to_string(info.ok()?.path()).ok())
        .any(|info| info.contains("it_value: (") && !info.contains("it_value: (0, 0)"))
}

fn is_session_leader(pid: Pid) -> bool {
    rustix::process::getsid(Some(pid)).is_ok_and(|session| session == pid)
}
