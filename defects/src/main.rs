//! Plants each defect of a list in a copy of the sources, and shows what catches it.
//!
//! A test suite that is green says that it found nothing. Whether it would find anything is another
//! question, and this answers it: every defect is a change that compiles and breaks a promise, and
//! the test, model or torture run that the list names for it has to fail by itself, within its
//! budget, after it passed without the defect.

mod copy;
mod list;
mod page;
mod run;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use self::copy::Copy;
use self::list::Defect;
use self::page::Measured;
use self::run::{Outcome, Runner};

const USAGE: &str = "\
Plants each defect of defects/list in a copy of the sources, and shows what catches it.

    scripts/defects [--bless] [ID | PREFIX*]...     all, or these
    scripts/defects --list

    --bless   writes how long each took, and the table of docs/defects.md
    --list    prints the defects and plants none

Exits with 0 where all were caught. What the tests said is in target/defects/logs; with
FENCELOCK_DEFECTS_DIR, the copy, the build and the logs are in that directory.
";

/// Why nothing can be said about the defects.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    pub(crate) fn at(path: &Path, error: impl fmt::Display) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

#[derive(Default)]
struct Asked {
    ids: Vec<String>,
    bless: bool,
    list: bool,
    help: bool,
}

impl Asked {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut asked = Self::default();
        for argument in arguments {
            match argument.as_str() {
                "--bless" => asked.bless = true,
                "--list" => asked.list = true,
                "--help" | "-h" => asked.help = true,
                flag if flag.starts_with('-') => {
                    return Err(Failure::new(format!("unknown option {flag}\n\n{USAGE}")));
                }
                _ => asked.ids.push(argument),
            }
        }
        Ok(asked)
    }

    fn names(&self, defect: &Defect) -> bool {
        self.ids.is_empty() || self.ids.iter().any(|id| matches(id, &defect.id))
    }
}

fn matches(asked: &str, id: &str) -> bool {
    match asked.strip_suffix('*') {
        Some(prefix) => id.starts_with(prefix),
        None => asked == id,
    }
}

fn main() -> ExitCode {
    match Asked::parse(std::env::args().skip(1)).and_then(|asked| carry_out(&asked)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Failure(message)) => {
            let _ = writeln!(io::stderr(), "defects: {message}");
            ExitCode::from(2)
        }
    }
}

/// Whether all that were asked for were caught.
fn carry_out(asked: &Asked) -> Result<bool, Failure> {
    if asked.help {
        return say(USAGE).map(|()| true);
    }
    let root = root();
    let all = list::read(&root)?;
    if let Some(unknown) = asked
        .ids
        .iter()
        .find(|id| !all.iter().any(|defect| matches(id, &defect.id)))
    {
        return Err(Failure::new(format!(
            "no defect is called {unknown}; see --list"
        )));
    }
    let mut chosen: Vec<&Defect> = all.iter().filter(|defect| asked.names(defect)).collect();
    if asked.list {
        for defect in chosen {
            say(&format!(
                "{:<44} {:<8} {}; {}\n",
                defect.id, defect.promise, defect.wrong, defect.caught_by
            ))?;
        }
        return Ok(true);
    }
    // Those that one binary catches come together, so that less is built.
    chosen.sort_by_key(|defect| (&defect.caught_by.package, &defect.caught_by.test));
    let place = place(&root);
    let copy = Copy::refresh(&root, &place)?;
    let mut runner = Runner::new(&place, &copy)?;
    let mut sound = Vec::new();
    for defect in &chosen {
        sound.push(runner.check_sound(defect)?);
    }
    let mut measured = Measured::read(&root)?;
    let (mut caught, mut others) = (0_u32, 0_u32);
    for (defect, sound) in chosen.iter().zip(sound) {
        let (outcome, took) = match sound {
            true => runner.try_defect(defect)?,
            false => (Outcome::NoProof, std::time::Duration::ZERO),
        };
        let seconds = took.as_secs_f64();
        if outcome == Outcome::Caught {
            caught += 1;
            measured.note(&defect.id, seconds);
        } else {
            others += 1;
        }
        say(&format!(
            "{:<16} {:<44} {:>6.1} s of {:>3} s  {}\n",
            outcome.as_str(),
            defect.id,
            seconds,
            defect.budget_s,
            defect.caught_by
        ))?;
    }
    if asked.bless {
        measured.write(&root, &all)?;
        page::write(&root, &all, &measured)?;
    }
    say(&format!("{caught} caught, {others} not\n"))?;
    Ok(others == 0)
}

/// The workspace that this program was built in.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_owned()
}

/// Where the copy and what is built of it are; two that run at once need two.
fn place(root: &Path) -> PathBuf {
    let named = std::env::var_os("FENCELOCK_DEFECTS_DIR").map(PathBuf::from);
    named.unwrap_or_else(|| root.join("target/defects"))
}

fn say(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Failure::new(format!("standard output: {e}")))
}
