//! Every example is run as a program, against private servers, and every page on a storage names one.
//!
//! `cargo test` builds the examples before it runs any test. Where only this test is asked for, they
//! have to be built first: `cargo build --workspace --all-features --examples`.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};

#[path = "examples/cases.rs"]
mod cases;
#[path = "examples/program.rs"]
mod program;

/// The list of the examples, each with its case.
macro_rules! examples {
    ($($name:ident,)+) => {
        const LISTED: &[&str] = &[$(stringify!($name)),+];

        $(
            #[test]
            fn $name() {
                cases::$name();
            }
        )+
    };
}

examples!(
    axum_postgres,
    etcd_own_client,
    export,
    mysql_admit,
    mysql_own_pool,
    nats_own_client,
    object_store_export,
    object_store_own_client,
    observability,
    own_backend,
    postgres_admit,
    postgres_own_pool,
    postgres_sqlx,
    redis_own_client,
    sqlite_admit,
    two_values,
);

/// The files of a directory of the repository that end like this.
fn files(dir: &str, ending: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
    let entries = dir.read_dir().unwrap();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == ending))
        .collect();
    files.sort();
    files
}

#[test]
fn no_example_is_left_out() {
    let files = files("examples", "rs");
    let names: Vec<_> = files
        .iter()
        .map(|file| file.file_stem().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, LISTED, "each example has an entry in this list");
}

/// A page shows extracts; the whole is a program that is run here.
#[test]
fn every_page_on_a_storage_names_a_program_that_is_run() {
    let pages = files("docs/storages", "md");
    assert!(!pages.is_empty());
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let named: Vec<&str> = text
            .split("](../../examples/")
            .skip(1)
            .map(|rest| rest.split(".rs)").next().unwrap())
            .collect();
        assert!(!named.is_empty(), "{} names no program", page.display());
        for name in named {
            assert!(LISTED.contains(&name), "{}: {name}", page.display());
        }
    }
}
