//! What torture says of itself: what it refuses, what it proves, and that it finds what is broken.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Yard, ended};

#[test]
fn what_cannot_be_is_refused_with_the_value_and_what_was_expected() {
    let yard = Yard::new();
    for (args, code, said) in [
        (&["--ttl", "1ms"][..], 64, "expected 200ms to 30s"),
        (&["--duration", "25h"], 64, "at most 24 hours"),
        (&["--clients", "1"], 64, "1"),
        (&["--locks", "0"], 64, "0"),
        (&["--store", "gopher://h"], 78, "knows no such store"),
        (&["--faults", "gremlins"], 64, "gremlins"),
        (&["--workloads", "chess"], 64, "chess"),
        (&["--faults", "drop"], 64, "--faults drop needs a server"),
        (&["--faults", "server-kill"], 64, "add --own ENGINE"),
        (
            &["--dest", "a", "--dest", "b", "--dest", "c"],
            64,
            "at most two storages",
        ),
        (&["--dest", "file:///a?key=b"], 64, "leave ?key= away"),
        (&["--store", "memory:"], 78, "one process's own"),
        (&["--dest", "missing/deep"], 78, "missing/deep"),
        (
            &["--report", "missing/report.html"],
            64,
            "missing/report.html",
        ),
        (&["--own", "sheep"], 64, "sheep"),
        (
            &["--own", "redis", "--store", "/tmp/locks"],
            64,
            "leave --store away",
        ),
    ] {
        let mut command = yard.bench.command(["torture", "--duration", "1s"]);
        if args[0] == "--duration" {
            command = yard.bench.command(["torture"]);
        }
        let refused = ended(command.args(args).env("TMPDIR", yard.tmp()));
        assert_eq!(refused.code, code, "{args:?}: {refused:?}");
        assert!(refused.err.contains(said), "{args:?}: {}", refused.err);
        assert_eq!(refused.out, "", "{args:?}");
    }
    yard.expect_empty();
}

#[test]
fn a_run_in_which_nobody_was_overtaken_proves_nothing() {
    let yard = Yard::new();
    let told = yard.run(70, &["--duration", "3s", "--faults", "duplicate"]);
    assert_eq!(told["held"], false);
    assert!(told["proved_nothing"].is_string(), "{told}");
    assert_eq!(told["violations_total"], 0, "{told}");
    assert_eq!(told["faults"].as_object().unwrap().len(), 1);
}

#[test]
fn one_arm_and_one_workload_can_be_chosen_and_the_work_is_bounded() {
    let yard = Yard::new();
    let mut command = yard.torture(&["--arm", "raise", "--workloads", "list"]);
    command.args([
        "--faults",
        "duplicate",
        "--sections",
        "20",
        "--seed",
        "9",
        "--json",
    ]);
    let told = ended(command.args(["--duration", "5m"]))
        .expect_code(70)
        .json();
    let arms: Vec<&String> = told["arms"].as_object().unwrap().keys().collect();
    assert_eq!(arms, ["raise"]);
    let why = told["proved_nothing"].as_str().unwrap();
    assert!(why.contains("the unfenced arm did not run"), "{why}");
    let grants = told["grants"].as_u64().unwrap();
    assert!((20..=24).contains(&grants), "{told}");
    assert_eq!(told["seed"], 9);
    let command = told["command"].as_str().unwrap();
    assert!(command.contains("--arm raise"), "{command}");
}

/// However much it loses: that nothing is lost with raise is not said of what did not run.
#[test]
fn without_the_raise_arm_nothing_holds() {
    let yard = Yard::new();
    let args = ["--arm", "unfenced", "--sections", "40"];
    let told = yard.run(70, &args);
    assert_eq!(told["held"], false, "{told}");
    let why = told["proved_nothing"].as_str().unwrap();
    assert!(why.contains("the raise arm did not run"), "{why}");
}

#[test]
fn what_was_found_is_told_where_its_report_cannot_be_written() {
    let yard = Yard::new();
    let args = ["--sections", "20", "--faults", "duplicate", "--json"];
    let mut command = yard.torture(&args);
    let ended = ended(command.args(["--report", "/dev/full"]));
    assert_eq!(ended.code, 70, "{ended:?}");
    assert!(ended.err.contains("/dev/full"), "{}", ended.err);
    assert_eq!(ended.json()["violations_total"], 0);
}

#[test]
fn a_run_that_cannot_begin_leaves_the_former_report() {
    let yard = Yard::new();
    let report = yard.bench.path("report.html");
    std::fs::write(&report, "former").unwrap();
    let mut command = yard.torture(&["--store", "memory:"]);
    ended(command.arg("--report").arg(&report)).expect_code(78);
    assert_eq!(std::fs::read_to_string(&report).unwrap(), "former");
}

#[test]
fn a_value_that_is_set_back_past_the_tokens_is_found_and_reported() {
    let yard = Yard::new();
    let dest = yard.bench.path("values");
    std::fs::create_dir(&dest).unwrap();
    let over = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        // What no fencing can help: somebody writes the file itself, and takes back what was there.
        scope.spawn(|| {
            let list = loop {
                let run = std::fs::read_dir(&dest).unwrap().flatten().next();
                let list = run.map(|run| run.path().join("values/raise-list-0"));
                if let Some(list) = list.filter(|list| list.exists()) {
                    break list;
                }
                if over.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            };
            let old = std::fs::read(&list).unwrap();
            // Until two more updates were acknowledged.
            let lines = |value: &[u8]| value.iter().filter(|byte| **byte == b'\n').count();
            while std::fs::read(&list).is_ok_and(|now| lines(&now) < lines(&old) + 2) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            if list.exists() {
                std::fs::write(&list, old).unwrap();
            }
        });
        let dest = dest.display().to_string();
        let args = [
            "--duration",
            "8s",
            "--workloads",
            "list",
            "--locks",
            "1",
            "--dest",
            &dest,
        ];
        let told = yard.run(1, &[&args[..], &["--report", "report.html"]].concat());
        over.store(true, Ordering::Relaxed);
        told
    });
    assert_eq!(told["held"], false);
    let violations = told["violations"].as_array().unwrap();
    assert!(!violations.is_empty());
    assert!(violations.iter().all(|v| v["arm"] == "raise"), "{told}");
    assert!(violations.iter().any(|v| v["promise"] == "S6"), "{told}");
    assert!(
        told["arms"]["raise"]["lost"].as_u64().unwrap() > 0,
        "{told}"
    );
    let report = std::fs::read_to_string(yard.bench.path("report.html")).unwrap();
    for said in [
        "<!doctype html>",
        "Violated.",
        "S6",
        "Who believed when",
        "</html>",
    ] {
        assert!(report.contains(said), "{said}");
    }
}

#[test]
fn text_for_people_has_the_figures_and_the_command_that_repeats_it() {
    let yard = Yard::new();
    let ended = ended(&mut yard.torture(&["--duration", "2s", "--seed", "5", "--faults", "pause"]));
    assert!(ended.code == 0 || ended.code == 70, "{ended:?}");
    for said in [
        "seed 5",
        "ARM",
        "unfenced",
        "naive",
        "raise",
        "--seed 5 --duration 2s --ttl 500ms --clients 6 --locks 4",
    ] {
        assert!(ended.out.contains(said), "{said} in {}", ended.out);
    }
}
