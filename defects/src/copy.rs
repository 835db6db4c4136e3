//! The copy of the sources in which the defects are planted: the user's own tree is only read.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;
use crate::list::Defect;

pub(crate) struct Copy {
    root: PathBuf,
    pub(crate) dir: PathBuf,
}

/// What a defect changed, put back by [`Copy::restore`].
pub(crate) struct Planted(Vec<PathBuf>);

impl Copy {
    /// Brings the copy in `place` up to date, with whatever is not committed yet. What
    /// did not change keeps its time, so that little is built anew; what an interrupted run left
    /// planted is overwritten.
    pub(crate) fn refresh(root: &Path, place: &Path) -> Result<Self, Failure> {
        let dir = place.join("tree");
        fs::create_dir_all(&dir).map_err(|e| Failure::at(&dir, e))?;
        let copy = Self {
            root: root.to_owned(),
            dir,
        };
        let wanted = sources(root)?;
        for relative in &wanted {
            copy.refresh_one(relative)?;
        }
        copy.remove_others(&copy.dir, &wanted)?;
        // Where `scripts/setup` puts servers, which tests look for in their own tree.
        let (target, servers) = (copy.dir.join("target"), copy.dir.join("target/servers"));
        fs::create_dir_all(&target).map_err(|e| Failure::at(&target, e))?;
        if fs::symlink_metadata(&servers).is_err() {
            symlink(root.join("target/servers"), &servers).map_err(|e| Failure::at(&servers, e))?;
        }
        Ok(copy)
    }

    fn refresh_one(&self, relative: &Path) -> Result<(), Failure> {
        let (from, to) = (self.root.join(relative), self.dir.join(relative));
        let wanted = fs::read(&from).map_err(|e| Failure::at(&from, e))?;
        if fs::read(&to).is_ok_and(|present| present == wanted) {
            return Ok(());
        }
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(|e| Failure::at(parent, e))?;
        }
        // With its permissions: scripts are sources too. The time is that of the copy.
        fs::copy(&from, &to).map_err(|e| Failure::at(&to, e))?;
        Ok(())
    }

    /// Removes files that the user's tree no longer has: cargo finds tests by their place.
    fn remove_others(&self, dir: &Path, wanted: &BTreeSet<PathBuf>) -> Result<(), Failure> {
        for entry in fs::read_dir(dir).map_err(|e| Failure::at(dir, e))? {
            let path = entry.map_err(|e| Failure::at(dir, e))?.path();
            let Ok(relative) = path.strip_prefix(&self.dir) else {
                continue;
            };
            if relative == Path::new("target") {
                continue;
            }
            if path.is_dir() {
                self.remove_others(&path, wanted)?;
            } else if !wanted.contains(relative) {
                fs::remove_file(&path).map_err(|e| Failure::at(&path, e))?;
            }
        }
        Ok(())
    }

    /// Nothing where an edit does not apply; then nothing is changed.
    pub(crate) fn plant(&self, defect: &Defect) -> Result<Option<Planted>, Failure> {
        let mut texts: Vec<(PathBuf, String)> = Vec::new();
        for edit in &defect.edits {
            let relative = PathBuf::from(&edit.file);
            let found = texts.iter().position(|(file, _)| *file == relative);
            let before = match found {
                Some(at) => texts.swap_remove(at).1,
                None => {
                    let path = self.root.join(&relative);
                    fs::read_to_string(&path).map_err(|e| Failure::at(&path, e))?
                }
            };
            let Some(after) = edit.apply(&before) else {
                return Ok(None);
            };
            texts.push((relative, after));
        }
        for (relative, text) in &texts {
            let path = self.dir.join(relative);
            fs::write(&path, text).map_err(|e| Failure::at(&path, e))?;
        }
        let files = texts.into_iter().map(|(file, _)| file);
        Ok(Some(Planted(files.collect())))
    }

    pub(crate) fn restore(&self, planted: &Planted) -> Result<(), Failure> {
        let mut files = planted.0.iter();
        files.try_for_each(|relative| self.refresh_one(relative))
    }
}

/// What git tracks, and what it would if it were added.
fn sources(root: &Path) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut command = Command::new("git");
    command.args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]);
    let listed = command
        .current_dir(root)
        .output()
        .map_err(|e| Failure::new(format!("git cannot be run: {e}")))?;
    if !listed.status.success() {
        return Err(Failure::new(
            "git cannot list the sources; run it in a clone",
        ));
    }
    let text = String::from_utf8_lossy(&listed.stdout);
    let files = text.split('\0').filter(|file| !file.is_empty());
    // A file that was removed and not yet committed as such is listed all the same.
    let there = files.filter(|file| root.join(file).is_file());
    Ok(there.map(PathBuf::from).collect())
}
