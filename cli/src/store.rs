//! Which store, and opening it.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use fencelock::Locks;
use fencelock::open::without_secrets;

use crate::exit_codes;
use crate::failure::{Failure, Result, say};

/// The URL of a lock store, absolute. `Display` hides what may be secret.
#[derive(Clone)]
pub(crate) struct StoreUrl(String);

impl StoreUrl {
    /// The store that `--store` or `FENCELOCK_STORE` names, or the default one of this user, which
    /// is created where it is missing.
    ///
    /// A path that begins with `/`, `./` or `../` is taken as a file store.
    pub(crate) fn resolve(given: Option<&str>) -> Result<Self> {
        let Some(given) = given.filter(|g| !g.is_empty()) else {
            return default_store();
        };
        if given.starts_with('/') {
            return Ok(Self::of_path(Path::new(given)));
        }
        if given.starts_with("./") || given.starts_with("../") {
            let path = std::path::absolute(given)
                .map_err(|e| Failure::system("the working directory", e))?;
            return Ok(Self::of_path(&path));
        }
        absolute_url(given).map(Self)
    }

    /// The file store in the directory `path`.
    pub(crate) fn of_path(path: &Path) -> Self {
        Self(format!("file://{}", percent_encoded(path.as_os_str())))
    }

    /// The URL with all that it holds: for the store, and for the environment of a command.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// True for a store that no other process sees.
    pub(crate) fn is_of_one_process(&self) -> bool {
        self.0.starts_with("memory:")
    }

    /// Opens the store.
    pub(crate) async fn open(&self) -> Result<Locks> {
        if !self.0.contains(':') {
            return Err(Failure::new(
                exit_codes::CONFIG,
                format!(
                    "not a store URL: {:?}; for a directory say \"./{}\"",
                    self.0, self.0
                ),
            ));
        }
        if self.is_of_one_process() {
            // A command is one process, so such a lock keeps nobody out: never in silence.
            say(
                "warning: a memory: store is this process's own: it excludes no other process, and is gone when this one ends; for the locks of a host use file:///dir",
            );
        }
        Locks::open(&self.0).await.map_err(|error| {
            let in_files = ["file:", "sqlite:"]
                .iter()
                .any(|scheme| self.0.starts_with(scheme));
            Failure::opening(&error, in_files).within(&format!("store {self}"))
        })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_secrets(&self.0))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The command of `run` may work in another directory, so a relative path would name another store
/// there. Other URLs pass as they are.
fn absolute_url(url: &str) -> Result<String> {
    let Some((scheme @ ("file" | "sqlite"), rest)) = url.split_once(':') else {
        return Ok(url.to_owned());
    };
    let path_len = rest.find('?').unwrap_or(rest.len());
    let (path, options) = rest.split_at(path_len);
    // With `//` it is absolute, or refused by whoever opens it.
    if path.is_empty() || path.starts_with('/') {
        return Ok(url.to_owned());
    }
    let here = std::env::current_dir().map_err(|e| Failure::system("the working directory", e))?;
    Ok(format!(
        "{scheme}://{}/{path}{options}",
        percent_encoded(here.as_os_str())
    ))
}

fn default_store() -> Result<StoreUrl> {
    let absolute = |variable: &str| {
        std::env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let dir = absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("fencelock"))
        .ok_or_else(|| {
            Failure::new(
                exit_codes::CONFIG,
                "no store: neither XDG_STATE_HOME nor HOME is an absolute path; give --store URL or set FENCELOCK_STORE",
            )
        })?;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(|error| {
            Failure::new(
                exit_codes::CONFIG,
                format!(
                    "the default store {} cannot be created: {error}; give --store URL or set FENCELOCK_STORE",
                    dir.display()
                ),
            )
        })?;
    Ok(StoreUrl::of_path(&dir))
}

fn percent_encoded(path: &OsStr) -> String {
    let mut text = String::new();
    for byte in path.as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                text.push(char::from(*byte));
            }
            other => text.push_str(&format!("%{other:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_a_url_that_may_be_secret_is_shown() {
        for url in [
            "redis://:canary@h:1/0?password=canary#canary",
            "redis://u:ca@nary:canary@h:1/0",
        ] {
            assert_eq!(without_secrets(url), "redis://h:1/0");
        }
        assert_eq!(without_secrets("memory:"), "memory:");
    }

    #[test]
    fn a_relative_file_url_is_made_absolute_and_one_with_a_host_stays() {
        let url = |given| StoreUrl::resolve(Some(given)).unwrap().0;
        let here = percent_encoded(std::env::current_dir().unwrap().as_os_str());
        assert_eq!(url("file:a/b?ttl=1s"), format!("file://{here}/a/b?ttl=1s"));
        for given in ["file:///a", "file:/a", "file://localhost/a", "file://a/b"] {
            assert_eq!(url(given), given);
        }
    }

    #[test]
    fn a_path_is_a_file_store() {
        let url = StoreUrl::resolve(Some("/var/lib/my locks")).unwrap();
        assert_eq!(url.reveal(), "file:///var/lib/my%20locks");
    }
}
