//! Prepares the core's sources for shuttle: as they are, and with one defect each.
//!
//! Nothing is copied by hand, so what is explored is what is shipped. A defect that no longer finds
//! its place in the source ends the build.

use std::path::{Path, PathBuf};
use std::{env, fs};

const SOURCES: [&str; 3] = ["queue", "held", "keeper"];

/// What is replaced by what.
type Edits = &'static [(&'static str, &'static str)];

/// The variant, the source, and what is done to it.
const DEFECTS: [(&str, &str, Edits); 5] = [
    (
        "uncounted_place",
        "queue",
        &[
            (
                "                line.places.fetch_add(1, Ordering::AcqRel);\n",
                "",
            ),
            (
                "        Place {\n            queues: self,",
                "        line.places.fetch_add(1, Ordering::AcqRel);\n        Place {\n            queues: self,",
            ),
        ],
    ),
    (
        "unkept_hint",
        "queue",
        &[("line.freed.notify_one()", "line.freed.notify_waiters()")],
    ),
    (
        "unheard_loss",
        "held",
        &[("if self.lost_reason().is_some() {", "if false {")],
    ),
    (
        "early_news",
        "keeper",
        &[(
            "        if self.0.background.fetch_sub(1, Ordering::AcqRel) == 1 {\n            self.0.idle.notify_waiters();\n        }\n",
            "        if self.0.background.load(Ordering::Acquire) == 1 {\n            self.0.idle.notify_waiters();\n        }\n        self.0.background.fetch_sub(1, Ordering::AcqRel);\n",
        )],
    ),
    (
        "stale_alarm",
        "keeper",
        &[(
            "            self.wakes_at\n                .store(Tick::NEVER.as_nanos(), Ordering::Release);\n",
            "",
        )],
    ),
];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let core = Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../src");
    println!("cargo::rerun-if-changed=build.rs");
    for source in SOURCES {
        let path = core.join(source).with_extension("rs");
        println!("cargo::rerun-if-changed={}", path.display());
        let sound = prepared(&fs::read_to_string(path).unwrap());
        write(&out, "sound", source, &sound);
        for (variant, of, replaced) in DEFECTS {
            let text = if of == source {
                replaced.iter().fold(sound.clone(), |text, (from, to)| {
                    let found = text.matches(from).count();
                    assert_eq!(found, 1, "{variant} does not find its place: {from}");
                    text.replace(from, to)
                })
            } else {
                sound.clone()
            };
            write(&out, variant, source, &text);
        }
    }
}

/// Over shuttle's primitives, as a part of a module, and without its unit tests.
fn prepared(text: &str) -> String {
    let end = text.find("\n#[cfg(test)]\nmod tests {");
    let code = &text[..end.unwrap_or(text.len())];
    code.lines()
        .filter(|line| !line.starts_with("//!"))
        .flat_map(|line| [line, "\n"])
        .collect::<String>()
        .replace("use std::sync::", "use crate::sync::")
        .replace("use crate::held::", "use super::held::")
}

fn write(out: &Path, variant: &str, source: &str, text: &str) {
    let folder = out.join(variant);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(source).with_extension("rs"), text).unwrap();
}
