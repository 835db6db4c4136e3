//! Why a command ends without success: an exit code, and a message for standard error.

use std::error::Error as StdError;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};

use fencelock::ErrorKind;

use crate::exit_codes;
use crate::output::clean;

/// A result of a command or of a part of one.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command ends without success.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    /// `None` ends quietly.
    message: Option<String>,
}

impl Failure {
    /// Ends with `code` and a message, lowercase and without a full stop.
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self {
            code,
            message: Some(message.into()),
        }
    }

    /// Wrong usage.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(exit_codes::USAGE, message)
    }

    /// Something that fencelock needs of the system failed.
    pub(crate) fn system(what: &str, error: impl Into<io::Error>) -> Self {
        let error = error.into();
        Self::new(exit_codes::INDETERMINATE, format!("{what}: {error}"))
    }

    /// Ends with `code` and says nothing.
    pub(crate) fn quiet(code: u8) -> Self {
        Self {
            code,
            message: None,
        }
    }

    /// An error of a store while it is opened: what would be wrong usage of a call is wrong
    /// configuration here.
    pub(crate) fn opening(error: &fencelock::Error, in_files: bool) -> Self {
        match error.kind() {
            ErrorKind::Invalid => Self::new(exit_codes::CONFIG, with_causes(error)),
            _ => Self::working(error, in_files),
        }
    }

    /// An error of a store at work. What trying again does not mend in files is wrong configuration;
    /// for a server it may be: its missing socket is there once it runs.
    pub(crate) fn working(error: &fencelock::Error, in_files: bool) -> Self {
        let code = match error.kind() {
            ErrorKind::Unavailable if in_files && is_permanent(error) => exit_codes::CONFIG,
            kind => exit_codes::of_kind(kind),
        };
        Self::new(code, with_causes(error))
    }

    /// Puts `context: ` before the message.
    pub(crate) fn within(mut self, context: &str) -> Self {
        self.message = self.message.map(|m| format!("{context}: {m}"));
        self
    }

    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// Writes the message to standard error.
    pub(crate) fn report(&self) {
        if let Some(message) = &self.message {
            say(message);
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message.as_deref().unwrap_or_default())
    }
}

impl From<fencelock::Error> for Failure {
    fn from(error: fencelock::Error) -> Self {
        Self::working(&error, false)
    }
}

/// For writing to standard output, the one place where a bare I/O error comes from: a reader that
/// has gone away wanted no more, and is no failure.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self::quiet(exit_codes::OK);
        }
        Self::system("standard output", error)
    }
}

/// One line on standard error.
pub(crate) fn say(message: &str) {
    // There is nowhere left to report that this failed.
    let _ = writeln!(io::stderr(), "fencelock: {}", clean(message));
}

/// Several lines on standard error, the first with the prefix.
pub(crate) fn say_block(text: &str) {
    let lines: Vec<_> = text.lines().map(clean).collect();
    // There is nowhere left to report that this failed.
    let _ = writeln!(io::stderr(), "fencelock: {}", lines.join("\n"));
}

/// True where the cause is how the files are set up, and not how the disk or a server is today.
fn is_permanent(error: &fencelock::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::ReadOnlyFilesystem
                    | io::ErrorKind::NotADirectory
            );
        }
        cause = error.source();
    }
    false
}

fn with_causes(error: &fencelock::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Some clients' errors say what their own causes say.
        if !text.contains(&said) {
            // Writing into a String cannot fail.
            let _ = write!(text, ": {said}");
        }
        cause = error.source();
    }
    text
}
