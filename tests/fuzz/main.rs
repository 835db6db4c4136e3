//! The fuzz targets on stable: each over its corpus, and over some thousand changed inputs.
//!
//! `FENCELOCK_FUZZ_SEED` and `FENCELOCK_FUZZ_RUNS` say which and how many. What fails is printed with its
//! seed and its bytes: add it to the corpus. For longer hunts there is `scripts/fuzz`.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "what the tests share may stop them"
)]

mod mutate;

use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use fencelock::fuzzing::{TARGETS, Target};
use mutate::{Dice, dictionary, mutated};

/// Changed inputs for each target, unless the environment says otherwise.
const RUNS: u64 = 4_000;

/// Every corpus is small: what is in it, somebody thought of.
const CORPUS_MAX_FILES: usize = 60;
const INPUT_MAX_BYTES: usize = 2_048;

fn fuzz_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is not a number: {text}")),
    )
}

/// The inputs of a target, in the order of their names.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let dir = fuzz_dir().join("corpus").join(name);
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect()
}

/// What a target does not hold for, if it does not.
fn fault(target: &Target, input: &[u8], origin: &str) -> Option<String> {
    let run = target.run;
    let bytes = input.escape_ascii();
    let name = target.name;
    catch_unwind(|| run(input))
        .is_err()
        .then(|| format!("target {name} does not hold for {origin}: b\"{bytes}\""))
}

/// The first fault of a target.
fn first_fault(target: &Target, words: &[Vec<u8>], seed: u64, runs: u64) -> Option<String> {
    let corpus = corpus(target.name);
    for (at, input) in corpus.iter().enumerate() {
        if let Some(fault) = fault(target, input, &format!("input {at} of its corpus")) {
            return Some(fault);
        }
    }
    let mut dice = Dice::new(seed);
    (0..runs).find_map(|run| {
        let input = mutated(&mut dice, &corpus, words);
        fault(target, &input, &format!("seed {seed}, run {run}"))
    })
}

#[test]
fn every_target_holds_for_its_corpus_and_for_changes_of_it() {
    let words = dictionary(&std::fs::read_to_string(fuzz_dir().join("dictionary")).unwrap());
    assert!(words.len() > 50, "the dictionary is not read");
    let seed = number("FENCELOCK_FUZZ_SEED").unwrap_or(1);
    let runs = number("FENCELOCK_FUZZ_RUNS").unwrap_or(RUNS);
    let faults: Vec<String> = TARGETS
        .iter()
        .filter_map(|target| first_fault(target, &words, seed, runs))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_target_has_a_file_a_line_in_the_manifest_and_a_small_corpus() {
    let named: BTreeSet<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(named.len(), TARGETS.len(), "two targets have one name");
    let manifest = std::fs::read_to_string(fuzz_dir().join("Cargo.toml")).unwrap();
    for name in &named {
        let file = fuzz_dir().join(format!("fuzz_targets/{name}.rs"));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(
            text.contains(&format!("run(\"{name}\"")),
            "{name} runs another target"
        );
        assert!(
            manifest.contains(&format!("name = \"{name}\"\n")),
            "{name} is not built"
        );
        let corpus = corpus(name);
        assert!(
            (3..=CORPUS_MAX_FILES).contains(&corpus.len()),
            "{name}: {}",
            corpus.len()
        );
        assert!(
            corpus.iter().all(|input| input.len() <= INPUT_MAX_BYTES),
            "{name}"
        );
    }
    for entry in std::fs::read_dir(fuzz_dir().join("fuzz_targets")).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        let name = file.strip_suffix(".rs").unwrap();
        assert!(named.contains(name), "{name} is the file of no target");
    }
}

/// Changes that cannot find what is planted would make the first test worth nothing.
#[test]
fn changes_reach_far_from_their_corpus_and_repeat_with_their_seed() {
    let corpus = [b"v1:34:-:-".to_vec(), b"{\"token\":34}".to_vec()];
    let words = dictionary("# a comment\n\"\\x00\\x01\"\n\"a\\\\b\"\n");
    assert_eq!(words, [vec![0, 1], b"a\\b".to_vec()]);
    let made = |seed| -> Vec<Vec<u8>> {
        let mut dice = Dice::new(seed);
        (0..2_000)
            .map(|_| mutated(&mut dice, &corpus, &words))
            .collect()
    };
    let some = made(1);
    assert_eq!(some, made(1));
    assert_ne!(some, made(2));
    assert!(some.iter().collect::<BTreeSet<_>>().len() > 1_500);
    assert!(
        some.iter()
            .any(|input| input.windows(2).any(|two| two == [0, 1]))
    );
    assert!(
        some.iter()
            .any(|input| input.starts_with(b"v1:") && input.ends_with(b"34}"))
    );
    assert!(some.iter().any(Vec::is_empty));
}
