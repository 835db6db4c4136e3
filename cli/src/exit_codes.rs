//! Every exit code of `fencelock`, and nothing else. Scripts rely on them.
//!
//! `fencelock run` passes the command's own code through, and 128 + n where a signal ended it; the
//! codes below 126 follow sysexits(3) where it has a fitting one. A code that is not in this list
//! came from the command that was run.

use fencelock::ErrorKind;

/// Done.
pub(crate) const OK: u8 = 0;
/// `torture`: a promise was broken.
pub(crate) const VIOLATED: u8 = 1;
/// Wrong usage: an unknown flag, a missing or unusable argument (`EX_USAGE`).
pub(crate) const USAGE: u8 = 64;
/// Stored state is damaged, or the tokens of the name are used up; an operator has to act
/// (`EX_DATAERR`).
pub(crate) const DAMAGED: u8 = 65;
/// `get` of a resource that holds no value, told apart from an empty one (`EX_NOINPUT`).
pub(crate) const NO_VALUE: u8 = 66;
/// The store cannot be reached, and nothing was applied; try again (`EX_UNAVAILABLE`).
pub(crate) const UNAVAILABLE: u8 = 69;
/// The outcome is not known, or fencelock itself is at fault (`EX_SOFTWARE`); `torture`: nothing was
/// proved.
pub(crate) const INDETERMINATE: u8 = 70;
/// Somebody else holds the lock (`EX_TEMPFAIL`).
pub(crate) const HELD: u8 = 75;
/// The lock was lost while the command ran, or is not ours to renew or release.
pub(crate) const LOST: u8 = 76;
/// A stale token was refused.
pub(crate) const FENCED: u8 = 77;
/// The configuration is wrong: the store's URL, its options, its directory, or what it can do
/// (`EX_CONFIG`). Trying again does not help.
pub(crate) const CONFIG: u8 = 78;
/// The command was found but cannot be executed, as in a shell.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found, as in a shell.
pub(crate) const NOT_FOUND: u8 = 127;
/// The base to which the number of a signal is added, as in a shell.
pub(crate) const SIGNAL_BASE: u8 = 128;

/// The code of an error of the library.
pub(crate) fn of_kind(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Fenced => FENCED,
        ErrorKind::Lost => LOST,
        ErrorKind::Timeout => HELD,
        ErrorKind::Unavailable => UNAVAILABLE,
        ErrorKind::Invalid => USAGE,
        ErrorKind::Unsupported | ErrorKind::DomainMismatch => CONFIG,
        ErrorKind::Corrupt | ErrorKind::Exhausted => DAMAGED,
        // ErrorKind grows; what is not known here is not known to be harmless.
        _ => INDETERMINATE,
    }
}

/// The end of `fencelock --help`.
pub(crate) const HELP: &str = "\
Exit codes:
    0  done; with `run`, the command's own code (128 + n if signal n ended it)
    1  `torture`: a promise was broken
   64  wrong usage
   65  stored state is damaged, or the tokens of a name are used up
   66  `get`: the resource holds no value
   69  the store cannot be reached; nothing was applied, try again
   70  the outcome is unknown, or an internal error; torture proved nothing
   75  somebody else holds the lock
   76  the lock was lost while the command ran, or is not ours
   77  fenced: a stale token was refused
   78  configuration: the store's URL, options or directory, or what it can do
  126  the command cannot be executed
  127  the command was not found
";
