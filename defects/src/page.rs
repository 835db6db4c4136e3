//! The published table, and the figures of the last whole run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Failure;
use crate::list::Defect;

const BEGIN: &str = "<!-- the list begins -->\n";
const END: &str = "<!-- the list ends -->\n";

/// How many seconds the catching run of a defect took, with the defect.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Measured {
    seconds: BTreeMap<String, f64>,
}

impl Measured {
    fn path(root: &Path) -> PathBuf {
        root.join("defects/measured.toml")
    }

    pub(crate) fn read(root: &Path) -> Result<Self, Failure> {
        let path = Self::path(root);
        let text = fs::read_to_string(&path).map_err(|e| Failure::at(&path, e))?;
        toml::from_str(&text).map_err(|e| Failure::at(&path, e))
    }

    pub(crate) fn note(&mut self, id: &str, seconds: f64) {
        self.seconds.insert(id.to_owned(), seconds);
    }

    /// Keeps what is in the list, and writes it.
    pub(crate) fn write(&mut self, root: &Path, defects: &[Defect]) -> Result<(), Failure> {
        self.seconds
            .retain(|id, _| defects.iter().any(|defect| defect.id == *id));
        let mut text = String::from(
            "# Written by `scripts/defects --bless`: how long each run took to catch its defect.\n\
             [seconds]\n",
        );
        for (id, seconds) in &self.seconds {
            text += &format!("{id} = {seconds:.1}\n");
        }
        let path = Self::path(root);
        fs::write(&path, text).map_err(|e| Failure::at(&path, e))
    }
}

/// The table of all defects.
pub(crate) fn table(defects: &[Defect], measured: &Measured) -> String {
    let mut text = String::from(
        "| Defect | What is wrong | Breaks | Caught by | Budget | Took |\n|---|---|---|---|---|---|\n",
    );
    for defect in defects {
        let took = match measured.seconds.get(&defect.id) {
            Some(seconds) => format!("{seconds:.1} s"),
            None => "-".to_owned(),
        };
        text += &format!(
            "| `{}` | {} | {} | {} | {} s | {took} |\n",
            defect.id,
            defect.wrong.replace('|', "\\|"),
            defect.promise,
            shown(&defect.caught_by.to_string()),
            defect.budget_s,
        );
    }
    format!("{} defects.\n\n{text}", defects.len())
}

/// Names of tests and commands are code, the words before them are not.
fn shown(catcher: &str) -> String {
    match catcher.split_once(": ") {
        Some((place, names)) => format!("{place}: `{names}`"),
        None => format!("`{catcher}`"),
    }
}

pub(crate) fn path(root: &Path) -> PathBuf {
    root.join("docs/defects.md")
}

/// The page with the table of these defects, and what is written around it.
pub(crate) fn page(root: &Path, table: &str) -> Result<String, Failure> {
    let path = path(root);
    let text = fs::read_to_string(&path).map_err(|e| Failure::at(&path, e))?;
    let around = text.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some(format!("{before}{BEGIN}\n{table}\n{END}{after}"))
    });
    around.ok_or_else(|| Failure::at(&path, "the marks around the list are gone"))
}

pub(crate) fn write(root: &Path, defects: &[Defect], measured: &Measured) -> Result<(), Failure> {
    let page = page(root, &table(defects, measured))?;
    let path = path(root);
    fs::write(&path, page).map_err(|e| Failure::at(&path, e))
}
