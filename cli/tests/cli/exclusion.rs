//! Mutual exclusion between processes.

use crate::bench::{Bench, Running, ended, eventually};

#[test]
fn sixteen_processes_lose_no_update_of_an_unfenced_counter() {
    const PROCESSES: usize = 16;
    const ROUNDS: usize = 5;
    let bench = Bench::new();
    std::fs::write(bench.path("counter"), "0\n").unwrap();
    std::fs::write(bench.path("tokens"), "").unwrap();
    let count = "read n < counter; echo $((n + 1)) > counter; echo $FENCELOCK_TOKEN >> tokens";
    let script = format!(
        "i=0; while [ $i -lt {ROUNDS} ]; do fencelock run counter --wait 60s -- sh -c '{count}' || exit $?; i=$((i+1)); done"
    );
    let contenders: Vec<Running> = (0..PROCESSES)
        .map(|number| {
            let mut command = bench.run_sh(&format!("unshared-{number}"), &[], &script);
            Running::start(&mut command)
        })
        .collect();
    for contender in contenders {
        contender.end().expect_code(0);
    }
    let expected = PROCESSES * ROUNDS;
    let counter = std::fs::read_to_string(bench.path("counter")).unwrap();
    assert_eq!(counter.trim(), expected.to_string());
    let tokens = std::fs::read_to_string(bench.path("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|t| t.parse().unwrap()).collect();
    assert_eq!(tokens.len(), expected);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn fifty_processes_overlap_nowhere_while_the_record_is_pruned() {
    const PROCESSES: usize = 50;
    let bench = Bench::new();
    let prune = "until [ -e stop ]; do fencelock prune --idle 0s --json || exit $?; done";
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", prune]).current_dir(bench.path("."));
    let environment = bench.command(["list"]);
    shell.envs(
        environment
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    let pruner = Running::start(&mut shell);
    // A marker that only one can make (O_EXCL), while the lock is held.
    let script = "set -C; : > marker || exit 99; echo $FENCELOCK_TOKEN >> tokens; rm marker";
    for round in 1..=2 {
        let contenders: Vec<Running> = (0..PROCESSES)
            .map(|_| Running::start(&mut bench.run_sh("contended", &["--wait", "60s"], script)))
            .collect();
        for contender in contenders {
            contender.end().expect_code(0);
        }
        let tokens = std::fs::read_to_string(bench.path("tokens")).unwrap();
        let tokens: Vec<u64> = tokens.lines().map(|t| t.parse().unwrap()).collect();
        assert_eq!(tokens.len(), PROCESSES * round);
        assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
        // The next round begins without a record.
        eventually("the record is removed", || {
            bench
                .fencelock(["list", "--json"])
                .expect_code(0)
                .out
                .is_empty()
        });
    }
    std::fs::write(bench.path("stop"), "").unwrap();
    let pruned = pruner.end().expect_code(0).out;
    let removed = pruned
        .lines()
        .filter(|line| !line.contains("\"removed\":0"))
        .count();
    assert!(removed >= 2, "{pruned}");
}

#[test]
fn without_the_lock_the_same_counter_loses_updates() {
    // The control of the test above: what it counts can be lost.
    let bench = Bench::new();
    std::fs::write(bench.path("counter"), "0\n").unwrap();
    let script = "for i in 1 2 3 4 5 6 7 8; do (read n < counter; sleep 0.05; echo $((n + 1)) > counter) & done; wait; cat counter";
    let ran = ended(&mut bench.run_sh("other", &[], script)).expect_code(0);
    assert!(ran.out.trim().parse::<u32>().unwrap() < 8, "{}", ran.out);
}
