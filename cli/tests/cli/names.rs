//! Names are exact bytes: some that have confused other tools, each a lock of its own.

use crate::bench::{Bench, ended};

/// As long as a name may be.
const LONG: &str = match str::from_utf8(&[b'x'; 512]) {
    Ok(name) => name,
    Err(_) => panic!(),
};

const NAMES: [&str; 26] = [
    "a",
    "A",
    "a/b",
    "a_b",
    "a%2Fb",
    "a:b",
    "a:0",
    "a:fence",
    "{a}",
    ".",
    "..",
    "../a",
    "/",
    "a\\b",
    "-x",
    "--",
    " a",
    "a ",
    "a\nb",
    "a\tb",
    LONG,
    "\u{1b}[31m",
    "é",
    "e\u{301}",
    "=61",
    "锁🔒",
];

#[test]
fn odd_names_are_locks_of_their_own() {
    let bench = Bench::new();
    // All are held at the same time, so no two can be one.
    for name in NAMES {
        let acquired = bench
            .fencelock(["acquire", "--json", "--", name])
            .expect_code(0)
            .json();
        assert_eq!(acquired["name"], name);
    }
    for name in NAMES {
        bench.fencelock(["acquire", "--", name]).expect_code(75);
        assert_eq!(bench.show(name)["name"], name);
    }
    let listed = bench.fencelock(["list", "--json"]).expect_code(0);
    let mut names: Vec<String> = listed
        .out
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|state| state["name"].as_str().unwrap().to_owned())
        .collect();
    let mut expected = NAMES.map(str::to_owned).to_vec();
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
    // What `list` prints can be given to `break`.
    for name in &names {
        bench.fencelock(["break", "--", name]).expect_code(0);
        assert!(!bench.is_held(name), "{name:?}");
    }
}

#[test]
fn a_list_shows_odd_names_as_a_shell_reads_them_and_long_ones_cut() {
    let bench = Bench::new();
    for name in NAMES {
        bench.fencelock(["acquire", "--", name]).expect_code(0);
    }
    let listed = bench.fencelock(["list"]).expect_code(0).out;
    let row = |start: &str| listed.lines().find(|row| row.starts_with(start));
    for shown in [
        "$'a\\nb'  ",
        "$'a\\tb'  ",
        "$' a'  ",
        "$'a '  ",
        "$'\\033[31m'  ",
        "a\\b  ",
    ] {
        assert!(row(shown).is_some(), "{shown} in {listed}");
    }
    assert!(row(&format!("{}…  ", "x".repeat(39))).is_some(), "{listed}");
    assert_eq!(
        listed.lines().count(),
        NAMES.len() + 1,
        "a head and a row each: {listed}"
    );
    let shown = bench.fencelock(["show", LONG]).expect_code(0).out;
    assert!(shown.contains(LONG), "the whole name: {shown}");
    // A row's name, pasted, is the name.
    let script = "fencelock show --json $'a\\nb'";
    let mut shell = bench.command(["run", "shell", "--", "bash", "-c", script]);
    assert_eq!(ended(&mut shell).expect_code(0).json()["name"], "a\nb");
}

#[test]
fn the_command_gets_an_odd_name_exactly() {
    let bench = Bench::new();
    for name in NAMES {
        // Only after the dashes can a name begin with one.
        let line: &[&str] = if name.starts_with('-') {
            &["run", "--", name, "--", "printenv", "FENCELOCK_NAME"]
        } else {
            &["run", name, "--", "printenv", "FENCELOCK_NAME"]
        };
        let ran = ended(&mut bench.command(line)).expect_code(0);
        assert_eq!(ran.out.strip_suffix('\n'), Some(name));
    }
}

#[test]
fn a_name_after_a_wait_is_a_name_though_it_begins_with_a_digit() {
    let bench = Bench::new();
    for name in ["job", "2024-report", "7/8"] {
        let mut command =
            bench.command(["run", "--wait", name, "--", "printenv", "FENCELOCK_NAME"]);
        let ran = ended(&mut command).expect_code(0);
        assert_eq!(ran.out.strip_suffix('\n'), Some(name));
    }
}

#[test]
fn long_names_differ_in_their_last_byte() {
    let bench = Bench::new();
    let (one, two) = (
        format!("{}1", "x".repeat(511)),
        format!("{}2", "x".repeat(511)),
    );
    bench.fencelock(["acquire", &one]).expect_code(0);
    bench.fencelock(["acquire", &two]).expect_code(0);
    bench.fencelock(["acquire", &one]).expect_code(75);
    assert_eq!(bench.show(&two)["name"], two);
}
