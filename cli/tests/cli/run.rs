//! `fencelock run`: what the command gets, and what comes back from it.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Stdio;
use std::time::Duration;

use crate::bench::{Bench, Running, ended, eventually};
use rustix::process::Signal;

#[test]
fn the_command_gets_name_token_fence_and_store() {
    let bench = Bench::new();
    let script = "printf '%s\\n' \"$FENCELOCK_NAME\" \"$FENCELOCK_TOKEN\" \"$FENCELOCK_FENCE\" \"$FENCELOCK_STORE\"";
    let ran = ended(&mut bench.run_sh("payment-export", &[], script)).expect_code(0);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!(lines[0], "payment-export");
    assert_eq!(lines[1], "1");
    let fence: fencelock::Fence = lines[2].parse().unwrap();
    assert_eq!(fence.token().get(), 1);
    assert_eq!(fence.seq(), None);
    assert!(fence.holder().is_some());
    assert!(fence.domain().is_some());
    assert_eq!(lines[3], bench.store());
}

#[test]
fn a_relative_store_is_absolute_for_the_command() {
    let bench = Bench::new();
    for store in ["./other", "../bench/other", "file:other"] {
        std::fs::create_dir_all(bench.path("bench")).unwrap();
        let script = "cd /; fencelock show job --json; echo $FENCELOCK_STORE";
        let mut command = bench.run_sh("job", &["--store", store], script);
        let ran = ended(command.current_dir(bench.path("bench"))).expect_code(0);
        let lines: Vec<&str> = ran.out.lines().collect();
        assert!(lines[0].contains("\"pid\""), "held there, too: {}", ran.out);
        let url = lines[1].strip_prefix("file://").unwrap();
        assert!(url.starts_with('/') && url.ends_with("/other"), "{url}");
    }
}

#[cfg(feature = "sqlite")]
#[test]
fn a_relative_database_is_the_same_one_for_the_command() {
    let bench = Bench::new();
    let script = "mkdir sub && cd sub && fencelock run job -- true";
    let store = ["--store", "sqlite:locks.db"];
    ended(&mut bench.run_sh("job", &store, script)).expect_code(75);
}

#[test]
fn arguments_pass_byte_for_byte_and_without_a_shell() {
    let bench = Bench::new();
    let script = "import sys,os; [print(os.fsencode(a).hex()) for a in sys.argv[1:]]";
    let args: [&[u8]; 9] = [
        b"",
        b" ",
        b"--",
        b"-x",
        b"$HOME",
        b"*",
        b"a'b\"c\\",
        b"\xff\xfe",
        b"--wait",
    ];
    let mut command = bench.command(["run", "job", "--", "python3", "-c", script]);
    command.args(args.map(OsStr::from_bytes));
    let ran = ended(&mut command).expect_code(0);
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let expected: Vec<String> = args.iter().map(|a| hex(a)).collect();
    assert_eq!(ran.out.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn a_name_that_begins_with_a_dash_goes_after_two_dashes() {
    let bench = Bench::new();
    let ran = bench.fencelock(["run", "--", "-x", "sh", "-c", "echo \"$FENCELOCK_NAME\""]);
    assert_eq!(ran.expect_code(0).out, "-x\n");
    let ran = bench.fencelock([
        "run",
        "--",
        "--",
        "--",
        "sh",
        "-c",
        "echo \"$FENCELOCK_NAME\"",
    ]);
    assert_eq!(ran.expect_code(0).out, "--\n");
}

#[test]
fn exit_codes_pass_through() {
    let bench = Bench::new();
    for code in [0, 1, 2, 75, 76, 77, 126, 127, 255] {
        let script = format!("exit {code}");
        ended(&mut bench.run_sh("job", &[], &script)).expect_code(code);
    }
}

#[test]
fn a_signal_becomes_128_plus_its_number() {
    let bench = Bench::new();
    for (signal, code) in [("TERM", 143), ("KILL", 137), ("INT", 130), ("ABRT", 134)] {
        let script = format!("ulimit -c 0; kill -{signal} $$");
        ended(&mut bench.run_sh("job", &[], &script)).expect_code(code);
    }
}

#[test]
fn a_missing_command_is_127_and_one_that_cannot_be_executed_126() {
    let bench = Bench::new();
    let missing = bench
        .fencelock(["run", "job", "--", "no-such-command"])
        .expect_code(127);
    assert_eq!(
        missing.err,
        "fencelock: no-such-command: command not found\n"
    );
    bench
        .fencelock(["run", "job", "--", "/no/such/command"])
        .expect_code(127);
    std::fs::write(bench.path("plain"), "text").unwrap();
    bench
        .fencelock(["run", "job", "--", "./plain"])
        .expect_code(126);
    bench.fencelock(["run", "job", "--", "/"]).expect_code(126);
    assert!(!bench.is_held("job"));
}

#[test]
fn standard_input_is_the_commands() {
    let bench = Bench::new();
    let mut command = bench.command(["run", "job", "--", "cat"]);
    let mut running = Running::start(command.stdin(Stdio::piped()));
    let mut stdin = running.process.stdin.take().unwrap();
    stdin.write_all(b"one\n").unwrap();
    assert_eq!(running.line(), "one");
    drop(stdin);
    running.end().expect_code(0);
}

#[test]
fn no_descriptor_leaks_into_the_command() {
    let bench = Bench::new();
    let list = "for f in /proc/self/fd/*; do readlink $f || :; done";
    let plain = std::process::Command::new("sh")
        .args(["-c", list])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let ran = ended(&mut bench.run_sh("job", &["--raise", "value"], list)).expect_code(0);
    let count = |text: &str| text.lines().count();
    assert_eq!(
        count(&ran.out),
        count(&String::from_utf8_lossy(&plain.stdout)),
        "{}",
        ran.out
    );
    let store = bench.path("locks");
    assert!(!ran.out.contains(store.to_str().unwrap()), "{}", ran.out);
}

#[test]
fn a_daemon_that_the_command_leaves_behind_holds_nothing() {
    let bench = Bench::new();
    let mut command = bench.run_sh("job", &[], "sleep 60 >/dev/null 2>&1 & echo $!");
    let mut running = Running::start(&mut command);
    let daemon = running.line_pid();
    running.end().expect_code(0);
    assert!(crate::bench::is_alive(daemon));
    ended(&mut bench.run_sh("job", &[], "true")).expect_code(0);
    rustix::process::kill_process(daemon, Signal::KILL).unwrap();
}

#[test]
fn a_held_lock_is_75_at_once_and_says_who_holds_it() {
    let bench = Bench::new();
    let mut holder = bench.run_sh("job", &["--label", "export"], "echo ready; cat");
    let mut holder = Running::start(holder.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    let refused = ended(&mut bench.run_sh("job", &[], "echo not run")).expect_code(75);
    assert_eq!(refused.out, "");
    let pid = format!("pid={}", holder.process.id());
    for said in [
        "held by somebody else",
        &pid,
        "label=\"export\"",
        "name=\"job\"",
        "token=1",
    ] {
        assert!(refused.err.contains(said), "{said}: {}", refused.err);
    }
    let silent = ended(&mut bench.run_sh("job", &["--busy-ok"], "exit 9")).expect_code(0);
    assert_eq!(silent.err, "", "cron mails whatever is said");
    ended(&mut bench.run_sh("job", &["--conflict-exit-code", "9"], "exit 8")).expect_code(9);
    ended(&mut bench.run_sh("job", &["--conflict-exit-code", "0"], "exit 8")).expect_code(0);
    let late = ended(&mut bench.run_sh("job", &["--wait", "300ms"], "exit 8")).expect_code(75);
    let said = "not free within 300ms: somebody else holds it";
    assert!(
        late.err.contains(said) && late.err.contains(&pid),
        "{}",
        late.err
    );
    assert!(!late.err.contains("--wait"), "{}", late.err);
}

#[test]
fn a_wait_for_a_store_that_does_not_answer_ends_near_its_bound() {
    let bench = Bench::new();
    ended(&mut bench.run_sh("job", &[], "true")).expect_code(0);
    let record = std::fs::read_dir(bench.path("locks/locks")).unwrap().next();
    let record = std::fs::File::open(record.unwrap().unwrap().path()).unwrap();
    // Whoever was stopped inside of a critical section looks just so.
    record.lock().unwrap();
    let started = crate::bench::now();
    let late = ended(&mut bench.run_sh("job", &["--wait", "1s"], "echo run"));
    let took = started.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert!(
        [69, 70, 75].contains(&late.code) && late.out.is_empty(),
        "{late:?}"
    );
    // Without a bound of its own, it ends with the store's.
    let late = bench.fencelock(["acquire", "job"]);
    assert!(
        [69, 70].contains(&late.code) && late.out.is_empty(),
        "{late:?}"
    );
    record.unlock().unwrap();
    let path = bench.path("locks/store");
    let identity = std::fs::File::open(&path).unwrap();
    identity.lock().unwrap();
    // Whoever was stopped while it made a name holds no other name up.
    ended(&mut bench.run_sh("job", &["--wait", "1s"], "true")).expect_code(0);
    // Only an identity that cannot be read is waited for.
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, "half").unwrap();
    let started = crate::bench::now();
    let late = ended(&mut bench.run_sh("job", &["--wait", "1s"], "echo run")).expect_code(69);
    let took = started.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert!(late.err.contains("did not open within 1s"), "{}", late.err);
    std::fs::write(&path, whole).unwrap();
    identity.unlock().unwrap();
    ended(&mut bench.run_sh("job", &["--wait", "10s"], "true")).expect_code(0);
}

#[test]
fn a_wait_ends_with_the_lock() {
    let bench = Bench::new();
    let mut holder = bench.run_sh("job", &[], "echo ready; cat");
    let mut holder = Running::start(holder.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    let mut waiter = Running::start(&mut bench.run_sh("job", &["--wait"], "echo $FENCELOCK_TOKEN"));
    assert!(!waiter.has_ended());
    drop(holder.process.stdin.take());
    assert_eq!(waiter.line(), "2");
    waiter.end().expect_code(0);
    holder.end().expect_code(0);
}

#[test]
fn a_wait_is_ended_by_a_signal_and_leaves_nothing_held() {
    let bench = Bench::new();
    let mut holder = bench.run_sh("job", &[], "echo ready; cat");
    let mut holder = Running::start(holder.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    let waiter = Running::start(&mut bench.run_sh("job", &["--wait"], "echo ran"));
    // Its handlers are in place once it has opened the store, and later it waits.
    eventually("the waiter catches TERM", || waiter.catches_term());
    waiter.signal(Signal::TERM);
    let waited = waiter.end().expect_code(143);
    assert_eq!(waited.out, "");
    drop(holder.process.stdin.take());
    holder.end().expect_code(0);
    eventually("the lock is free", || !bench.is_held("job"));
}

#[test]
fn permits_let_so_many_in() {
    let bench = Bench::new();
    let start = || {
        let mut command = bench.run_sh("pool", &["--permits", "2"], "echo ready; cat");
        let mut running = Running::start(command.stdin(Stdio::piped()));
        assert_eq!(running.line(), "ready");
        running
    };
    let (_one, _two) = (start(), start());
    let full = ended(&mut bench.run_sh("pool", &["--permits", "2"], "true")).expect_code(75);
    assert!(
        full.err.contains("all 2 permits are taken; --wait"),
        "{}",
        full.err
    );
    let flags = ["--permits", "2", "--wait", "100ms"];
    let late = ended(&mut bench.run_sh("pool", &flags, "true")).expect_code(75);
    let said = "no permit was free within 100ms: all 2 permits are taken";
    assert!(late.err.contains(said), "{}", late.err);
    ended(&mut bench.run_sh("pool", &["--permits", "3"], "true")).expect_code(64);
}

#[test]
fn a_minimum_hold_outlives_a_short_command() {
    let bench = Bench::new();
    let started = crate::bench::now();
    ended(&mut bench.run_sh("tick", &["--min-hold", "2s"], "exit 3")).expect_code(3);
    assert!(
        started.elapsed() < Duration::from_millis(1900),
        "it ends with the command"
    );
    ended(&mut bench.run_sh("tick", &[], "true")).expect_code(75);
    ended(&mut bench.run_sh("tick", &["--wait", "20s"], "true")).expect_code(0);
    assert!(started.elapsed() >= Duration::from_secs(2));
}

macro_rules! signals_are_passed_on {
    ($($test:ident: $signal:ident;)*) => {$(
        #[test]
        fn $test() {
            let bench = Bench::new();
            let name = stringify!($signal);
            let script = format!("trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.02; done");
            let mut running = Running::start(&mut bench.run_sh("job", &[], &script));
            assert_eq!(running.line(), "ready");
            running.signal(Signal::$signal);
            assert_eq!(running.line(), concat!("got ", stringify!($signal)));
            running.end().expect_code(5);
            assert!(!bench.is_held("job"));
        }
    )*};
}

signals_are_passed_on! {
    hup_is_passed_on: HUP;
    int_is_passed_on: INT;
    quit_is_passed_on: QUIT;
    term_is_passed_on: TERM;
    usr1_is_passed_on: USR1;
    usr2_is_passed_on: USR2;
}

#[test]
fn a_signal_that_our_caller_ignores_stays_ignored() {
    let bench = Bench::new();
    let binary = env!("CARGO_BIN_EXE_fencelock");
    let script =
        format!("trap '' HUP; exec {binary} run job -- sh -c 'kill -HUP $$; echo survived'");
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", &script])
        .env("FENCELOCK_STORE", bench.store());
    assert_eq!(ended(&mut command).expect_code(0).out, "survived\n");
}

#[test]
fn a_signal_that_our_caller_blocks_is_passed_on_all_the_same() {
    let bench = Bench::new();
    let inner = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.02; done";
    let mut command = bench.run_sh("job", &[], inner);
    let (program, args) = (command.get_program().to_owned(), command.get_args());
    let args: Vec<_> = args.map(ToOwned::to_owned).collect();
    let mut blocked = std::process::Command::new("env");
    blocked.arg("--block-signal=TERM").arg(program).args(args);
    blocked.env("FENCELOCK_STORE", bench.store());
    command = blocked;
    let mut running = Running::start(&mut command);
    assert_eq!(running.line(), "ready");
    running.signal(Signal::TERM);
    running.end().expect_code(5);
}

#[test]
fn a_caller_that_does_not_wait_for_children_costs_no_exit_code() {
    let bench = Bench::new();
    let script = "env --ignore-signal=CHLD fencelock run job -- sh -c 'exit 3'";
    ended(&mut bench.run_sh("other", &[], script)).expect_code(3);
}

#[test]
fn raise_shuts_out_older_tokens_before_the_command_starts() {
    let bench = Bench::new();
    let old = bench.fencelock(["acquire", "job", "--json"]).json();
    let fence = old["fence"].as_str().unwrap();
    bench.fencelock(["break", "job"]).expect_code(0);
    let script = format!("fencelock put value --fence {fence} /etc/hostname");
    let ran = ended(&mut bench.run_sh("job", &["--raise", "value"], &script));
    assert_eq!(ran.code, 77, "{ran:?}");
}

#[test]
fn a_raise_that_is_refused_starts_nothing() {
    let bench = Bench::new();
    bench
        .fencelock(["raise", "value", "--token", "99"])
        .expect_code(0);
    let ran = ended(&mut bench.run_sh("job", &["--raise", "value"], "echo ran")).expect_code(77);
    assert_eq!(ran.out, "");
    assert!(ran.err.contains("not started"), "{}", ran.err);
    eventually("the lock is free", || !bench.is_held("job"));
    let ran = ended(&mut bench.run_sh("job", &["--raise", "no-such-dir/x/"], "echo ran"));
    assert_eq!((ran.code, ran.out.as_str()), (78, ""), "{}", ran.err);
}

#[test]
fn no_expiry_holds_for_as_long_as_the_command_runs() {
    let bench = Bench::new();
    let mut holder = bench.run_sh("job", &["--ttl", "none"], "echo ready; cat");
    let mut holder = Running::start(holder.stdin(Stdio::piped()));
    assert_eq!(holder.line(), "ready");
    assert_eq!(
        bench.show("job")["holders"][0]["expires_in_ms"],
        serde_json::Value::Null
    );
    holder.signal(Signal::KILL);
    ended(&mut bench.run_sh("job", &["--wait", "10s"], "true")).expect_code(0);
}

#[test]
fn the_trace_of_the_caller_is_shown() {
    let bench = Bench::new();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let script = "fencelock show job --json";
    let mut command = bench.run_sh("job", &[], script);
    command.env("TRACEPARENT", format!("00-{trace}-b7ad6b7169203331-01"));
    let ran = ended(&mut command).expect_code(0);
    assert_eq!(ran.json()["holders"][0]["trace_id"], trace);
}
