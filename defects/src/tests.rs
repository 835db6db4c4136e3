//! What can be said of the list without building anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::list::{self, Defect, Edit};
use crate::page::{self, Measured};

/// As many as were set out to be seeded at the least.
const LEAST: usize = 40;

fn defects() -> Vec<Defect> {
    list::read(&crate::root()).unwrap()
}

#[test]
fn there_are_enough_and_no_two_have_one_id() {
    let defects = defects();
    assert!(defects.len() >= LEAST, "{}", defects.len());
    let ids: BTreeSet<_> = defects.iter().map(|defect| &defect.id).collect();
    assert_eq!(ids.len(), defects.len());
    for id in ids {
        let plain = id.split('-').all(|word| {
            !word.is_empty()
                && word
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        });
        assert!(plain, "{id}");
    }
}

#[test]
fn each_changes_text_that_is_in_its_file_once() {
    let mut broken = Vec::new();
    for defect in defects() {
        let mut texts = BTreeMap::new();
        assert!(!defect.edits.is_empty(), "{}", defect.id);
        for edit in &defect.edits {
            let text = texts.entry(edit.file.clone()).or_insert_with(|| {
                let path = crate::root().join(&edit.file);
                fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
            });
            match edit.apply(text) {
                Some(changed) if changed != *text => *text = changed,
                Some(_) => broken.push(format!("{}: changes nothing in {}", defect.id, edit.file)),
                None => broken.push(format!("{}: not once in {}", defect.id, edit.file)),
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn each_names_a_promise_and_something_that_may_take_its_budget() {
    let guarantees = fs::read_to_string(crate::root().join("src/docs/guarantees.md")).unwrap();
    for defect in defects() {
        for promise in defect.promise.split(' ') {
            assert!(
                guarantees.contains(&format!("**{promise}**")),
                "{}: {promise}",
                defect.id
            );
        }
        assert!((1..=300).contains(&defect.budget_s), "{}", defect.id);
        let catcher = &defect.caught_by;
        assert_ne!(
            catcher.is_torture(),
            !catcher.test.is_empty(),
            "{}",
            defect.id
        );
        assert_eq!(
            catcher.is_torture(),
            catcher.filter.is_empty(),
            "{}",
            defect.id
        );
    }
}

/// Conformance cases are made into tests by a macro, so that only their own name is in a file.
#[test]
fn each_names_a_test_that_there_is() {
    let root = crate::root();
    for defect in defects() {
        let catcher = &defect.caught_by;
        if catcher.is_torture() {
            continue;
        }
        let package = match catcher.package.as_str() {
            "fencelock" => root.clone(),
            name => root.join(name.trim_start_matches("fencelock-")),
        };
        let mut text = String::new();
        match catcher.test.as_str() {
            "lib" | "bin" => gather(&package.join("src"), &mut text),
            test => {
                let (file, dir) = (
                    package.join(format!("tests/{test}.rs")),
                    package.join("tests").join(test),
                );
                assert!(
                    file.exists() || dir.join("main.rs").exists(),
                    "{}",
                    defect.id
                );
                text += &fs::read_to_string(file).unwrap_or_default();
                if dir.exists() {
                    gather(&dir, &mut text);
                }
                // What the tests of several engines have in common.
                for shared in ["src/conformance", "tests/sql", "tests/shared"] {
                    gather(&root.join(shared), &mut text);
                }
            }
        }
        let name = catcher.filter.rsplit("::").next().unwrap();
        assert!(
            text.contains(&format!("fn {name}")),
            "{}: {name}",
            defect.id
        );
    }
}

fn gather(dir: &Path, text: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            gather(&path, text);
        } else if path.extension().is_some_and(|end| end == "rs") {
            *text += &fs::read_to_string(path).unwrap();
        }
    }
}

/// Write the new table with `FENCELOCK_BLESS=1`.
#[test]
fn the_table_in_the_docs_is_the_list() {
    let root = crate::root();
    let measured = Measured::read(&root).unwrap();
    let defects = defects();
    if std::env::var_os("FENCELOCK_BLESS").is_some() {
        page::write(&root, &defects, &measured).unwrap();
    }
    let expected = page::page(&root, &page::table(&defects, &measured)).unwrap();
    assert_eq!(fs::read_to_string(page::path(&root)).unwrap(), expected);
}

#[test]
fn an_edit_needs_its_text_exactly_once() {
    let edit = Edit {
        file: String::new(),
        find: "a < b".to_owned(),
        replace: "a <= b".to_owned(),
    };
    assert_eq!(edit.apply("if a < b {").as_deref(), Some("if a <= b {"));
    assert_eq!(edit.apply("if a > b {"), None);
    assert_eq!(edit.apply("a < b && a < b"), None);
}
