//! docs/cli.md holds true: its examples are run, and it names every exit code and command.

use crate::bench::{Bench, ended};

const PAGE: &str = include_str!("../../../docs/cli.md");

/// A line of an example and what it prints, the exit code included where it is not 0.
struct Step {
    command: String,
    prints: String,
}

/// All examples in order, as a reader follows them.
fn steps() -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for block in PAGE.split("```\n").skip(1).step_by(2) {
        assert!(block.starts_with("$ "), "begins with a command: {block}");
        for line in block.lines() {
            if let Some(command) = line.strip_prefix("$ ") {
                steps.push(Step {
                    command: command.to_owned(),
                    prints: String::new(),
                });
            } else {
                let step = steps.last_mut().expect("a command before its output");
                step.prints.push_str(line);
                step.prints.push('\n');
            }
        }
    }
    steps
}

#[test]
fn the_page_followed_from_top_to_bottom_prints_what_it_says() {
    let steps = steps();
    assert!(steps.len() >= 20, "{}", steps.len());
    let bench = Bench::new();
    // One store, and one shell; marks divide the output.
    let script: String = steps
        .iter()
        .map(|step| {
            format!(
                "{}\ncode=$?; [ $code = 0 ] || echo \"exit code $code\"; printf '%s\\n' '--- {}'\n",
                step.command,
                step.command.replace('\'', "'\\''")
            )
        })
        .collect();
    let mut shell = std::process::Command::new("sh");
    let environment = bench.command(["list"]);
    let variables = environment.get_envs();
    shell.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    shell
        .args(["-c", &format!("exec 2>&1\n{script}")])
        .current_dir(bench.path("."));
    let printed = ended(&mut shell).out;
    let expected: String = steps
        .iter()
        .map(|step| format!("{}--- {}\n", step.prints, step.command))
        .collect();
    assert_eq!(printed, expected);
}

#[test]
fn the_page_names_every_command_and_exit_code() {
    let bench = Bench::new();
    let help = bench.fencelock(["--help"]).expect_code(0).out;
    let (_, codes) = help.split_once("Exit codes:").unwrap();
    for line in codes.lines().filter(|line| !line.trim().is_empty()) {
        let code = line.split_whitespace().next().unwrap();
        assert!(PAGE.contains(&format!("\n| {code} | ")), "exit code {code}");
    }
    let (_, commands) = help.split_once("Commands:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    for line in commands.lines() {
        let command = line.split_whitespace().next().unwrap();
        assert!(
            command == "help" || PAGE.contains(&format!("`{command}")),
            "{command}"
        );
    }
}
