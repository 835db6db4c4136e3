//! Words for damage: what is damaged, and the whole command that mends it.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

use crate::error::Error;
use crate::file::safe::shown;
use crate::name::{LockName, push_hex};

/// What is escaped in the path of a store's URL: all that a URL or a shell could take otherwise.
const URL_PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// The error of a record that is damaged. The name is `None` where nothing tells it any more.
pub(crate) fn damaged_record(name: Option<&LockName>, path: &Path, what: &str) -> Error {
    let mend = match name {
        Some(name) => repair(name),
        None => {
            "`fencelock repair NAME --min-token N`, where NAME is the lock's whole name, which \
                 cannot be read"
                .to_owned()
        }
    };
    let error = Error::corrupt(format!(
        "{what}; nothing is granted until its holders are stopped and it is mended with {mend}, N \
         being above every token that a storage has seen"
    ));
    match name {
        Some(name) => error.with("lock", format_args!("{name:?}")),
        None => error,
    }
    .with("path", shown(path))
}

/// The error of a store whose identity, the file `path`, is damaged or gone.
pub(crate) fn damaged_identity(path: &Path, what: &str) -> Error {
    let dir = path.parent().unwrap_or(path);
    let url = percent_encode(dir.as_os_str().as_bytes(), URL_PATH);
    Error::corrupt(format!(
        "{what}; stop all that use the store, and run \
         `fencelock --store 'file://{url}?mend=N' doctor` once, N being above every token that a \
         storage has seen"
    ))
    .with("path", shown(path))
}

fn repair(name: &LockName) -> String {
    let name = name.as_str();
    if name.contains('\0') {
        // No argument of a command can hold one.
        return "`Locks::raise_floor` of a program, as the name has a NUL".to_owned();
    }
    let quoted = quoted(name);
    if name.starts_with('-') {
        format!("`fencelock repair --min-token N -- {quoted}`")
    } else {
        format!("`fencelock repair {quoted} --min-token N`")
    }
}

/// A word for a shell, in one line whatever it holds.
fn quoted(word: &str) -> String {
    if word.chars().any(char::is_control) {
        let plain = |c: char| !c.is_control() && c != '\'' && c != '\\';
        let mut shell = String::with_capacity(word.len() * 2);
        for c in word.chars() {
            if plain(c) {
                shell.push(c);
            } else {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    shell.push_str("\\x");
                    push_hex(&mut shell, byte);
                }
            }
        }
        return format!("$'{shell}'");
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> String {
        repair(&name.parse().unwrap())
    }

    #[test]
    fn the_command_names_the_lock_whatever_its_name_is() {
        assert_eq!(of("a/b"), "`fencelock repair 'a/b' --min-token N`");
        assert_eq!(of("it's"), r"`fencelock repair 'it'\''s' --min-token N`");
        assert_eq!(
            of("$(x) `y`"),
            "`fencelock repair '$(x) `y`' --min-token N`"
        );
        assert_eq!(of("-rf"), "`fencelock repair --min-token N -- '-rf'`");
        assert_eq!(
            of("a\n'\u{85}"),
            r"`fencelock repair $'a\x0a\x27\xc2\x85' --min-token N`"
        );
        assert!(of("a\0").contains("raise_floor"));
    }

    #[test]
    fn a_url_for_any_directory_is_shown() {
        let error = damaged_identity(Path::new("/srv/a b'?#%/store"), "gone").to_string();
        assert!(
            error.contains("'file:///srv/a%20b%27%3F%23%25?mend=N'"),
            "{error}"
        );
    }
}
