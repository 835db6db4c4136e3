//! The one error type: an opaque struct whose [`ErrorKind`] says what the caller does next.

use std::error::Error as StdError;
use std::fmt;

use crate::token::FencingToken;

/// A result with fencelock's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, named by what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A stale token was refused. This attempt had and will have no effect. Stop: somebody newer
    /// holds the lock.
    Fenced,
    /// The lock is not held any more. Stop the work that it protected.
    Lost,
    /// The bounded wait ended while somebody else held the lock. Try later.
    Timeout,
    /// The store cannot serve the request, and nothing was applied. Retry.
    Unavailable,
    /// The request may or may not have been applied. Find out before you go on.
    Indeterminate,
    /// An argument is wrong. Correct the call.
    Invalid,
    /// This backend, or this configuration of it, cannot do that soundly. Choose another.
    Unsupported,
    /// Stored state is damaged. An operator has to repair it; nothing is guessed.
    Corrupt,
    /// The resource is bound to another lock. Use that lock, or rebind the resource.
    DomainMismatch,
    /// The token space of this name is used up. Choose another name.
    Exhausted,
}

impl ErrorKind {
    /// The kind as one lowercase word, for logs, metrics and JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fenced => "fenced",
            Self::Lost => "lost",
            Self::Timeout => "timeout",
            Self::Unavailable => "unavailable",
            Self::Indeterminate => "indeterminate",
            Self::Invalid => "invalid",
            Self::Unsupported => "unsupported",
            Self::Corrupt => "corrupt",
            Self::DomainMismatch => "domain_mismatch",
            Self::Exhausted => "exhausted",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error of a lock or of a fenced storage.
///
/// Match on [`kind`](Self::kind). The message is for people: lowercase, the values last as
/// `key=value`. The cause, where there is one, is in [`source`](StdError::source) and is not
/// repeated in the message.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    token: Option<FencingToken>,
    watermark: Option<FencingToken>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind` with a message for people.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            token: None,
            watermark: None,
            source: None,
        }))
    }

    /// A refusal of `token` by a resource whose watermark is `watermark`.
    #[must_use]
    pub fn fenced(
        token: FencingToken,
        watermark: FencingToken,
        message: impl Into<String>,
    ) -> Self {
        let mut error = Self::new(ErrorKind::Fenced, message);
        error.0.token = Some(token);
        error.0.watermark = Some(watermark);
        error
    }

    /// A wrong argument.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Nothing was applied, and the store cannot serve the request now.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// The request may have been applied.
    #[must_use]
    pub fn indeterminate(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Indeterminate, message)
    }

    /// Stored state is damaged.
    #[must_use]
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Corrupt, message)
    }

    /// The lock is not held any more.
    #[must_use]
    pub fn lost(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Lost, message)
    }

    /// Not supported by this backend or configuration.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Attaches the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Adds `key=value` to the end of the message.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        use fmt::Write as _;
        // Writing into a String cannot fail.
        let _ = write!(self.0.message, " {key}={value}");
        self
    }

    /// Changes the kind, for a layer that knows better what the caller does next.
    #[must_use]
    pub fn into_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// What the caller does next.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The token that was refused, where the kind is [`ErrorKind::Fenced`].
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.0.token
    }

    /// The watermark that the token met, where the kind is [`ErrorKind::Fenced`].
    #[must_use]
    pub fn watermark(&self) -> Option<FencingToken> {
        self.0.watermark
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("Error");
        s.field("kind", &self.0.kind)
            .field("message", &self.0.message);
        if let Some(source) = &self.0.source {
            s.field("source", source);
        }
        s.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}
