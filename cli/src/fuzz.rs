//! The parsers of the command line, each over its corpus in `fuzz/corpus` and over some thousand changed
//! inputs: those of the library are in `fencelock::fuzzing`. cargo-fuzz cannot reach into a program, so
//! these are hunted by the test alone; `FENCELOCK_FUZZ_SEED` and `FENCELOCK_FUZZ_RUNS` say which and how
//! many.

#[path = "../../tests/fuzz/mutate.rs"]
mod mutate;

use std::panic::catch_unwind;
use std::path::Path;
use std::time::Duration;

use self::mutate::{Dice, dictionary, mutated};
use crate::{duration, env};

type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 3] = [
    ("cli_durations", durations),
    ("cli_history", crate::torture::fuzz_history),
    ("cli_trace", trace),
];

fn durations(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    // A message names the value, so that a script's log says which of its flags was wrong.
    let names = |message: String| assert!(message.contains(&format!("{text:?}")), "{message}");
    let parsed = duration::parse(text);
    if let Ok(parsed) = parsed {
        assert!(parsed <= Duration::from_secs(100 * 365 * 86_400));
        let again = duration::parse(&humantime::format_duration(parsed).to_string());
        assert_eq!(again, Ok(parsed));
    }
    match duration::parse_positive(text) {
        Ok(positive) => assert!(positive > Duration::ZERO && parsed == Ok(positive)),
        Err(message) => {
            assert!(parsed.is_err() || parsed == Ok(Duration::ZERO));
            names(message);
        }
    }
    match duration::parse_ttl(text) {
        Ok(ttl) => match ttl.duration() {
            Some(ttl) => assert_eq!(parsed, Ok(ttl)),
            None => assert_eq!(text, "none"),
        },
        Err(message) => names(message),
    }
}

fn trace(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Some(id) = env::trace_id_of(text) else {
        return;
    };
    // By places instead of fields.
    assert_eq!(text.get(3..35), Some(id.as_str()));
    assert!(id.parse::<u128>().is_ok() || u128::from_str_radix(&id, 16).is_ok_and(|id| id > 0));
    assert!(
        text.len() == 55 || (text.len() > 55 && !text.starts_with("00")),
        "{text:?}"
    );
    for at in [2, 35, 52] {
        assert_eq!(text.as_bytes().get(at), Some(&b'-'), "{text:?}");
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// The first input that a target does not hold for.
fn first_fault((name, run): Target, fuzz: &Path, words: &[Vec<u8>]) -> Option<String> {
    let (seed, runs) = (
        number("FENCELOCK_FUZZ_SEED", 1),
        number("FENCELOCK_FUZZ_RUNS", 4_000),
    );
    let entries = std::fs::read_dir(fuzz.join("corpus").join(name)).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let corpus: Vec<Vec<u8>> = paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    assert!(corpus.len() >= 3, "{name}");
    let mut dice = Dice::new(seed);
    let changed = (0..runs).map(|_| mutated(&mut dice, &corpus, words));
    let mut inputs = corpus.iter().cloned().chain(changed);
    let wrong = inputs.find(|input| catch_unwind(|| run(input)).is_err())?;
    Some(format!(
        "{name} does not hold for b\"{}\"",
        wrong.escape_ascii()
    ))
}

#[test]
fn every_parser_holds_for_its_corpus_and_for_changes_of_it() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let words = dictionary(&std::fs::read_to_string(fuzz.join("dictionary")).unwrap());
    let faults: Vec<String> = TARGETS
        .into_iter()
        .filter_map(|target| first_fault(target, &fuzz, &words))
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
