//! Mutual exclusion between processes.

use crate::bench::{Bench, Running, ended};

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
fn without_the_lock_the_same_counter_loses_updates() {
    // The control of the test above: what it counts can be lost.
    let bench = Bench::new();
    std::fs::write(bench.path("counter"), "0\n").unwrap();
    let script = "for i in 1 2 3 4 5 6 7 8; do (read n < counter; sleep 0.05; echo $((n + 1)) > counter) & done; wait; cat counter";
    let ran = ended(&mut bench.run_sh("other", &[], script)).expect_code(0);
    assert!(ran.out.trim().parse::<u32>().unwrap() < 8, "{}", ran.out);
}
