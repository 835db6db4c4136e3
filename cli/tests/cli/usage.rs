//! Wrong usage: always 64, nothing done, and a message that says what was expected. Help, version,
//! completions and manual pages.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use crate::bench::{Bench, ended};

/// One row, one test: the arguments, and what the message has to contain.
macro_rules! wrong {
    ($($test:ident: [$($arg:expr),* $(,)?] => $said:expr;)*) => {$(
        #[test]
        fn $test() {
            let bench = Bench::new();
            let args: &[&str] = &[$($arg),*];
            let refused = bench.fencelock(args).expect_code(64);
            assert_eq!(refused.out, "", "nothing on standard output");
            assert!(refused.err.starts_with("fencelock: "), "{}", refused.err);
            assert!(refused.err.contains($said), "{:?} in {}", $said, refused.err);
            assert!(!bench.path("locks").exists(), "nothing is created");
            assert!(!bench.path("ran").exists(), "nothing is run");
        }
    )*};
}

wrong! {
    run_without_anything: ["run"] => "NAME is missing";
    run_without_a_command: ["run", "job"] => "command is missing";
    run_with_nothing_after_the_dashes: ["run", "job", "--"] => "command is missing";
    run_with_only_a_command: ["run", "--", "touch"] => "command is missing";
    run_without_dashes: ["run", "job", "touch", "ran"] => "touch";
    run_with_an_empty_name: ["run", "", "--", "touch", "ran"] => "lock name is empty; expected 1 to 512 bytes";
    run_with_a_long_name: ["run", &"x".repeat(513), "--", "touch", "ran"] => "bytes=513";
    run_with_an_unknown_flag: ["run", "job", "--tll", "5s", "--", "touch", "ran"] => "--tll";
    ttl_of_zero: ["run", "job", "--ttl", "0", "--", "touch", "ran"] => "\"0\" is out of range; expected 100ms to 365days";
    ttl_of_zero_seconds: ["run", "job", "--ttl", "0s", "--", "touch", "ran"] => "\"0s\" is out of range";
    ttl_below_zero: ["run", "job", "--ttl", "-5s", "--", "touch", "ran"] => "\"-5s\"";
    ttl_too_short: ["run", "job", "--ttl", "99ms", "--", "touch", "ran"] => "\"99ms\" is out of range";
    ttl_too_long: ["run", "job", "--ttl", "366days", "--", "touch", "ran"] => "\"366days\" is out of range";
    ttl_that_overflows: ["run", "job", "--ttl", "99999999999999999999s", "--", "touch", "ran"] => "99999999999999999999s";
    ttl_in_scientific_notation: ["run", "job", "--ttl", "9e18s", "--", "touch", "ran"] => "9e18s";
    ttl_without_a_unit: ["run", "job", "--ttl", "30", "--", "touch", "ran"] => "\"30\" is not a TTL";
    ttl_of_garbage: ["run", "job", "--ttl", "soon", "--", "touch", "ran"] => "\"soon\" is not a TTL";
    ttl_that_is_empty: ["run", "job", "--ttl", "", "--", "touch", "ran"] => "\"\" is not a TTL";
    ttl_without_a_value: ["run", "job", "--ttl"] => "--ttl";
    wait_of_garbage: ["run", "job", "--wait", "soon", "--", "touch", "ran"] => "\"soon\" is not a duration";
    wait_below_zero: ["run", "job", "--wait=-1s", "--", "touch", "ran"] => "\"-1s\" is not a duration (below zero)";
    wait_below_zero_as_a_word: ["run", "job", "--wait", "-1s", "--", "touch", "ran"] => "--wait \"-1s\" is not a duration (below zero)";
    wait_before_an_unknown_flag: ["run", "job", "--wait", "-x", "--", "touch", "ran"] => "unexpected argument '-x'";
    kill_after_of_garbage: ["run", "job", "--kill-after", "x", "--", "touch", "ran"] => "\"x\" is not a duration";
    max_hold_shorter_than_min_hold: ["run", "job", "--max-hold", "1s", "--min-hold", "5s", "--", "touch", "ran"] => "--max-hold is shorter than --min-hold";
    max_hold_of_zero: ["run", "job", "--max-hold", "0s", "--", "touch", "ran"] => "\"0s\" is zero";
    min_hold_of_garbage: ["run", "job", "--min-hold", "x", "--", "touch", "ran"] => "\"x\" is not a duration";
    conflict_code_of_600: ["run", "job", "--conflict-exit-code", "600", "--", "touch", "ran"] => "0..=255";
    conflict_code_below_zero: ["run", "job", "--conflict-exit-code", "-1", "--", "touch", "ran"] => "0..=255";
    conflict_code_of_256: ["run", "job", "--conflict-exit-code", "256", "--", "touch", "ran"] => "0..=255";
    conflict_code_of_garbage: ["run", "job", "--conflict-exit-code", "abc", "--", "touch", "ran"] => "abc";
    no_permits: ["run", "job", "--permits", "0", "--", "touch", "ran"] => "1..=1000";
    too_many_permits: ["run", "job", "--permits", "1001", "--", "touch", "ran"] => "1..=1000";
    permits_below_zero: ["run", "job", "--permits", "-1", "--", "touch", "ran"] => "1..=1000";
    acquire_without_a_name: ["acquire"] => "NAME is missing";
    acquire_without_expiry: ["acquire", "job", "--ttl", "none"] => "--ttl none is for run";
    acquire_with_a_wrong_ttl: ["acquire", "job", "--ttl", "1ns"] => "\"1ns\" is out of range";
    renew_without_a_holder: ["renew", "job", "--token", "1"] => "--holder";
    renew_with_a_wrong_holder: ["renew", "job", "--token", "1", "--holder", "me"] => "32 hexadecimal digits";
    release_with_a_token_of_zero: ["release", "job", "--holder", "00000000000000000000000000000000", "--token", "0"] => "from 1 to";
    release_with_a_token_below_zero: ["release", "job", "--holder", "00000000000000000000000000000000", "--token", "-1"] => "from 1 to";
    repair_with_a_token_of_zero: ["repair", "job", "--min-token", "0"] => "from 1 to";
    repair_with_a_token_too_large: ["repair", "job", "--min-token", "9223372036854775808"] => "from 1 to 9223372036854775807";
    prune_without_a_time: ["prune"] => "--idle";
    prune_of_garbage: ["prune", "--idle", "long"] => "\"long\" is not a duration";
    put_without_a_token: ["put", "value"] => "fencelock run NAME";
    put_without_a_destination: ["put", "--token", "1"] => "DEST";
    put_with_a_token_of_zero: ["put", "value", "--token", "0"] => "from 1 to";
    put_with_a_wrong_fence: ["put", "value", "--fence", "34"] => "not a fence";
    put_with_both: ["put", "value", "--fence", "v1:34:-:-", "--token", "34"] => "cannot be used with";
    put_of_a_missing_file: ["put", "value", "--token", "1", "no-such-file"] => "no-such-file cannot be read";
    raise_without_a_token: ["raise", "value"] => "no fencing token";
    rebind_with_a_bare_token: ["rebind", "value", "--token", "5"] => "rebind needs a whole fence";
    rebind_with_a_fence_of_no_lock: ["rebind", "value", "--fence", "v1:5:-:-"] => "rebind needs a whole fence";
    the_demo_as_json: ["demo", "--json"] => "no JSON";
    show_without_a_name: ["show"] => "NAME";
    an_unknown_command: ["lock"] => "lock";
    an_unknown_shell: ["completions", "csh"] => "csh";
    busy_ok_against_a_code: ["run", "job", "--busy-ok", "--conflict-exit-code", "3", "--", "touch", "ran"] => "cannot be used with";
}

#[test]
fn a_name_that_is_not_utf8_is_wrong_usage() {
    let bench = Bench::new();
    let name = OsStr::from_bytes(b"\xff");
    for args in [
        [
            OsStr::new("run"),
            name,
            OsStr::new("--"),
            OsStr::new("true"),
        ]
        .as_slice(),
        &[OsStr::new("show"), name],
    ] {
        bench.fencelock(args).expect_code(64);
    }
}

#[test]
fn a_wrong_fence_in_the_environment_is_wrong_usage() {
    let bench = Bench::new();
    let mut command = bench.command(["raise", "value"]);
    let refused = ended(command.env("FENCELOCK_FENCE", "nonsense")).expect_code(64);
    assert!(refused.err.contains("FENCELOCK_FENCE"), "{}", refused.err);
}

/// One row, one test: a store that cannot be opened, the code, and what the message contains.
macro_rules! wrong_store {
    ($($test:ident: $store:expr => $code:expr, $said:expr;)*) => {$(
        #[test]
        fn $test() {
            let bench = Bench::new();
            let refused = bench.fencelock(["--store", $store, "list"]).expect_code($code);
            assert!(refused.err.contains($said), "{:?} in {}", $said, refused.err);
            assert!(!refused.err.contains("canary"), "a secret is shown: {}", refused.err);
        }
    )*};
}

wrong_store! {
    a_store_of_no_scheme: "nonsense" => 78, "not a store URL";
    a_store_of_an_unknown_scheme: "carrier-pigeon://user:canary@coop/1?password=canary" => 78, "carrier-pigeon";
    a_store_with_an_unknown_option: "file:///tmp/x?colour=red" => 78, "colour";
    a_store_of_a_bare_directory: "some/dir" => 78, "\"./some/dir\"";
    a_store_below_proc: "/proc/foo" => 78, "/proc/foo";
    a_store_below_proc_as_a_url: "file:///proc/foo" => 78, "/proc/foo";
    a_store_with_a_wrong_ttl: "memory:?ttl=0s" => 78, "TTL";
}

#[test]
fn what_trying_again_does_not_mend_is_configuration_and_changes_nothing() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("closed")).unwrap();
    std::fs::write(bench.path("file"), "as it was").unwrap();
    std::fs::set_permissions(
        bench.path("closed"),
        std::os::unix::fs::PermissionsExt::from_mode(0o555),
    )
    .unwrap();
    let [closed, below_closed, below_file, file] = ["closed", "closed/locks", "file/locks", "file"]
        .map(|path| bench.path(path).display().to_string());
    let refused: [&[&str]; 9] = [
        &["--store", &closed, "list"],
        &["--store", &below_closed, "list"],
        &["--store", &below_closed, "run", "job", "--", "echo", "ran"],
        &["--store", &below_closed, "acquire", "job"],
        &["--store", &file, "acquire", "job"],
        &["--store", &below_file, "acquire", "job"],
        &["put", "closed/value", "--token", "1", "/dev/null"],
        &["put", "missing/value", "--token", "1", "/dev/null"],
        &["get", "file/value"],
    ];
    for args in refused {
        let refused = ended(&mut bench.command_without_rights(args)).expect_code(78);
        assert_eq!(refused.out, "", "{args:?}");
        assert!(
            refused.err.contains(bench.path("").to_str().unwrap()) || refused.err.contains(args[1]),
            "{}",
            refused.err
        );
    }
    assert_eq!(std::fs::read_dir(bench.path("closed")).unwrap().count(), 0);
    assert_eq!(std::fs::read(bench.path("file")).unwrap(), b"as it was");
    assert!(!bench.path("missing").exists());
}

#[test]
fn a_memory_store_says_once_that_it_excludes_nobody() {
    let bench = Bench::new();
    let commands: [&[&str]; 4] = [
        &[
            "run",
            "job",
            "--",
            "sh",
            "-c",
            "fencelock --store ./other list; exit 3",
        ],
        &["acquire", "job"],
        &["list"],
        &["doctor"],
    ];
    for (args, code) in commands.into_iter().zip([3, 0, 0, 0]) {
        let ran = ended(bench.command(args).env("FENCELOCK_STORE", "memory:")).expect_code(code);
        assert_eq!(
            ran.err.matches("excludes no other process").count(),
            1,
            "{ran:?}"
        );
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    }
    let quiet = bench.fencelock(["list"]).expect_code(0);
    assert_eq!(quiet.err, "");
}

#[test]
fn help_fits_its_columns_and_wraps_no_example() {
    let bench = Bench::new();
    for command in ["", "run", "acquire", "put", "raise", "rebind"] {
        let mut help = bench.command(command.split_terminator(' ').chain(["--help"]));
        let help = ended(help.env("COLUMNS", "100")).expect_code(0).out;
        let (_, examples) = help.split_once("\nExamples:\n").unwrap();
        for line in examples.lines() {
            assert!(line.chars().count() <= 78, "{line:?}");
        }
        assert!(examples.starts_with("  "), "{examples}");
    }
}

#[test]
fn without_a_home_there_is_no_default_store() {
    let bench = Bench::new();
    let mut command = bench.command(["list"]);
    command
        .env_remove("FENCELOCK_STORE")
        .env_remove("HOME")
        .env_remove("XDG_STATE_HOME");
    let refused = ended(&mut command).expect_code(78);
    assert!(refused.err.contains("--store"), "{}", refused.err);
}

#[test]
fn the_default_store_is_private_and_in_the_state_directory() {
    use std::os::unix::fs::PermissionsExt as _;
    let bench = Bench::new();
    for (variable, dir) in [
        ("XDG_STATE_HOME", "state/fencelock"),
        ("HOME", "home/.local/state/fencelock"),
    ] {
        let mut command = bench.command(["acquire", "job"]);
        command
            .env_remove("FENCELOCK_STORE")
            .env_remove("HOME")
            .env_remove("XDG_STATE_HOME");
        let base = dir.split('/').next().unwrap();
        ended(command.env(variable, bench.path(base))).expect_code(0);
        let mode = std::fs::metadata(bench.path(dir))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700, "{dir}");
    }
}

#[test]
fn a_path_is_a_file_store() {
    let bench = Bench::new();
    bench
        .fencelock(["--store", "./here", "acquire", "job"])
        .expect_code(0);
    let path = bench.path("here").display().to_string();
    let listed = bench
        .fencelock(["--store", &path, "list", "--json"])
        .expect_code(0);
    assert_eq!(listed.json()["name"], "job");
}

#[test]
fn help_goes_to_standard_output_and_lists_the_exit_codes() {
    let bench = Bench::new();
    let help = bench.fencelock(["--help"]).expect_code(0);
    assert_eq!(help.err, "");
    for said in [
        "75  somebody else holds the lock",
        "77  fenced",
        "fencelock demo",
        "FENCELOCK_STORE",
    ] {
        assert!(help.out.contains(said), "{said} in {}", help.out);
    }
    for command in [
        "run",
        "acquire",
        "renew",
        "release",
        "list",
        "show",
        "watch",
        "break",
        "prune",
        "repair",
        "doctor",
        "put",
        "get",
        "raise",
        "delete",
        "rebind",
        "demo",
        "completions",
        "man",
    ] {
        assert!(
            help.out.contains(&format!("\n  {command} ")),
            "{command} in {}",
            help.out
        );
        let own = bench.fencelock([command, "--help"]).expect_code(0);
        assert!(own.out.contains("Usage: fencelock"), "{}", own.out);
    }
    assert!(!help.out.contains("__"), "{}", help.out);
    let version = bench.fencelock(["--version"]).expect_code(0);
    assert_eq!(
        version.out,
        format!("fencelock {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn the_usage_asks_for_no_store_that_the_environment_gives() {
    let bench = Bench::new();
    let refused = bench
        .fencelock(["renew", "job", "--token", "1"])
        .expect_code(64);
    let usage = "\nUsage: fencelock renew --holder <H> --token <N> <NAME>\n";
    assert!(refused.err.contains(usage), "{}", refused.err);
}

#[test]
fn help_does_not_show_what_the_environment_holds() {
    let bench = Bench::new();
    for args in [["run", "--help"], ["renew", "--help"]] {
        let mut command = bench.command(args);
        command
            .env("FENCELOCK_STORE", "redis://:canary@host")
            .env("FENCELOCK_HOLDER", "canary");
        let help = ended(&mut command).expect_code(0);
        assert!(!help.out.contains("canary"), "{}", help.out);
    }
}

#[test]
fn nothing_at_all_shows_the_help_and_is_wrong_usage() {
    let bench = Bench::new();
    let none: [&str; 0] = [];
    let help = bench.fencelock(none).expect_code(64);
    assert!(help.err.contains("Usage: fencelock"), "{}", help.err);
}

#[test]
fn completions_and_manual_pages_are_made() {
    let bench = Bench::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = bench.fencelock(["completions", shell]).expect_code(0);
        assert!(script.out.contains("min-hold"), "{shell}");
    }
    let page = bench.fencelock(["man"]).expect_code(0);
    assert!(page.out.contains(".TH fencelock 1"), "{}", page.out);
    bench.fencelock(["man", "--dir", "pages"]).expect_code(0);
    let page = |name: &str| std::fs::read_to_string(bench.path("pages").join(name)).unwrap();
    for name in [
        "fencelock.1",
        "fencelock-run.1",
        "fencelock-put.1",
        "fencelock-man.1",
    ] {
        assert!(page(name).contains(".SH SYNOPSIS"), "{name}");
    }
    // Laid out by lines, in no-fill mode.
    let run = page("fencelock-run.1");
    assert!(
        run.contains(".SH \"EXAMPLES\"\n.nf\n  fencelock run nightly\\-report"),
        "{run}"
    );
    assert!(
        run.contains(".SH \"EXIT STATUS\"\n.nf\n   75  held"),
        "{run}"
    );
    assert!(page("fencelock.1").contains(".SH \"EXIT STATUS\"\n.nf\n    0  done"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let bench = Bench::new();
    let script = "fencelock completions bash | head -c 1 >/dev/null; fencelock man | true; exec 3>&1; \
                  { fencelock completions zsh; echo $? >&3; } | true";
    let mut command = bench.run_sh("job", &[], script);
    let ran = ended(&mut command).expect_code(0);
    assert_eq!((ran.out.trim(), ran.err.as_str()), ("0", ""));
}
