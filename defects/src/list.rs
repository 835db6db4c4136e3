//! The list: what is seeded where, what it breaks, and what has to catch it.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::Failure;

/// One defect: a change that compiles, and breaks a promise.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Defect {
    pub(crate) id: String,
    /// What is wrong, as one sentence without its full stop.
    pub(crate) wrong: String,
    /// The promise that it breaks, by its number in the guarantees.
    pub(crate) promise: String,
    pub(crate) caught_by: Catcher,
    /// How long the catching run may take. A run that is not over then has caught nothing.
    pub(crate) budget_s: u64,
    #[serde(rename = "edit")]
    pub(crate) edits: Vec<Edit>,
}

/// A piece of text that is in its file once, so that the list outlives changes around it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Edit {
    pub(crate) file: String,
    pub(crate) find: String,
    pub(crate) replace: String,
}

/// Tests of one binary, or a run of `fencelock torture`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(deny_unknown_fields)]
pub(crate) struct Catcher {
    #[serde(default = "library")]
    pub(crate) package: String,
    /// The name of a test binary, or `lib` for the unit tests.
    #[serde(default)]
    pub(crate) test: String,
    /// What the names of the tests contain; as `cargo test` takes it.
    #[serde(default)]
    pub(crate) filter: String,
    /// The arguments of `fencelock torture`, in the place of a test.
    #[serde(default)]
    pub(crate) torture: Vec<String>,
}

fn library() -> String {
    "fencelock".to_owned()
}

impl Catcher {
    /// What `cargo` builds for it.
    pub(crate) fn target(&self) -> Vec<String> {
        let mut target: Vec<String> = match self.features() {
            Some(features) => vec![
                "--package".to_owned(),
                self.package.clone(),
                "--no-default-features".to_owned(),
                features,
            ],
            // As everything else is built, so that the dependencies of the library and of the
            // command line are the same ones.
            None => vec!["--workspace".to_owned(), "--all-features".to_owned()],
        };
        match self.test.as_str() {
            // Torture: cargo builds the command line along with its tests, out of what they share.
            "" => target.extend(["--test".to_owned(), "torture".to_owned()]),
            // The command line is a binary only, and so are its unit tests.
            "bin" => target.extend(["--bin".to_owned(), "fencelock".to_owned()]),
            "lib" => target.push("--lib".to_owned()),
            test => target.extend(["--test".to_owned(), test.to_owned()]),
        }
        target
    }

    /// No more than is needed where many defects share it: they are built in a third of the time.
    /// Where there are few, building dependencies for them alone would take longer than it saves.
    fn features(&self) -> Option<String> {
        if self.package != library() {
            return None;
        }
        let least = "--features=conformance,file,memory";
        match self.test.as_str() {
            "" | "etcd" | "http" | "mysql" | "nats" | "object_store" | "object_store_lease"
            | "postgres" | "sqlite" => None,
            "redis" => Some(format!("{least},redis")),
            _ => Some(least.to_owned()),
        }
    }

    pub(crate) fn is_torture(&self) -> bool {
        !self.torture.is_empty()
    }
}

impl fmt::Display for Catcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_torture() {
            return write!(f, "fencelock torture {}", self.torture.join(" "));
        }
        let binary = match (self.package.as_str(), self.test.as_str()) {
            ("fencelock", "lib") => "unit tests".to_owned(),
            (package, "lib" | "bin") => format!("unit tests of {package}"),
            ("fencelock", test) => format!("tests/{test}"),
            (_, test) => format!("cli/tests/{test}"),
        };
        write!(f, "{binary}: {}", self.filter)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    defect: Vec<Defect>,
}

/// All defects of `defects/list/*.toml`, by file and in the order of each.
pub(crate) fn read(root: &Path) -> Result<Vec<Defect>, Failure> {
    let dir = root.join("defects/list");
    let mut paths = Vec::new();
    for entry in fs::read_dir(&dir).map_err(|e| Failure::at(&dir, e))? {
        paths.push(entry.map_err(|e| Failure::at(&dir, e))?.path());
    }
    paths.sort_unstable();
    let mut defects = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).map_err(|e| Failure::at(&path, e))?;
        let file: File = toml::from_str(&text).map_err(|e| Failure::at(&path, e))?;
        defects.extend(file.defect);
    }
    Ok(defects)
}

impl Edit {
    /// The text with this change, or nothing where `find` is not in it exactly once.
    pub(crate) fn apply(&self, text: &str) -> Option<String> {
        let mut places = text.match_indices(&self.find);
        let (at, found) = places.next()?;
        if places.next().is_some() {
            return None;
        }
        let (before, rest) = text.split_at_checked(at)?;
        let after = rest.strip_prefix(found)?;
        Some([before, &self.replace, after].concat())
    }
}
