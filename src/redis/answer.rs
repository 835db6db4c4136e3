//! What a server's answers and failures mean: applied, certainly not applied, or unknown.

use std::fmt;
use std::time::Duration;

use redis::{FromRedisValue, RedisError, ServerError, Value};

use crate::error::{Error, ErrorKind};

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// Nothing was sent.
    NotSent(Error),
    /// The server refused, and had done nothing.
    Refused(Box<RedisError>),
    /// The server answered with an error that says nothing of what it had done.
    Odd(Box<RedisError>),
    /// The connection failed with the request on its way.
    Cut(Box<RedisError>),
    /// No answer came in time. It may still be applied.
    Silent(Duration),
}

/// An error of the client's without the cause of its own, whose text it repeats.
#[derive(Debug)]
struct Said(RedisError);

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Said {}

/// Codes of refusals that come before a script's first write.
const REFUSALS: &[&str] = &[
    "OOM",
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MOVED",
    "ASK",
    "CROSSSLOT",
    "MISCONF",
    "BUSY",
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "NOSCRIPT",
    "NOPROTO",
    "DENIED",
];

/// What a server that was stripped of a command says without a code.
const UNKNOWN_COMMAND: &str = "unknown command";

impl Failure {
    /// A failure to connect or to greet.
    pub(super) fn connecting(error: RedisError) -> Self {
        use redis::ErrorKind as Kind;
        let code = code(&error);
        let message = match (error.kind(), code) {
            (Kind::AuthenticationFailed, _) | (_, Some("NOAUTH" | "WRONGPASS")) => {
                return Self::NotSent(
                    Error::unsupported(
                        "the redis server refused the user or the password; check both in the URL",
                    )
                    .with_source(Said(error)),
                );
            }
            (Kind::RESP3NotSupported, _) => {
                return Self::NotSent(
                    Error::unsupported("the redis server is too old; expected 6.0 or later")
                        .with_source(Said(error)),
                );
            }
            (_, Some("NOPERM")) => return Self::NotSent(refusal(error)),
            _ if error.to_string().contains("invalid peer certificate") => {
                return Self::NotSent(
                    Error::unsupported("the redis server's certificate is not accepted; name its authority as ca=/path/to/ca.pem")
                        .with_source(Said(error)),
                );
            }
            _ => "the redis server cannot be reached",
        };
        Self::NotSent(Error::unavailable(message).with_source(Said(error)))
    }

    /// A failure of a request that was sent.
    pub(super) fn answering(error: RedisError) -> Self {
        if error.code().is_none() {
            return Self::Cut(Box::new(error));
        }
        match code(&error) {
            Some(_) => Self::Refused(Box::new(error)),
            None => Self::Odd(Box::new(error)),
        }
    }

    /// True where the connection has to be made anew: it is broken, or its server is not a master
    /// any more.
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::Cut(_) | Self::Silent(_) => true,
            Self::Refused(error) => matches!(code(error), Some("READONLY" | "MASTERDOWN")),
            Self::NotSent(_) | Self::Odd(_) => false,
        }
    }

    /// The same failure for another request of the same pipeline.
    pub(super) fn repeat(&self) -> Self {
        match self {
            Self::NotSent(error) => Self::NotSent(Error::new(error.kind(), error.to_string())),
            Self::Refused(error) => Self::Refused(error.clone()),
            Self::Odd(error) => Self::Odd(error.clone()),
            Self::Cut(error) => Self::Cut(error.clone()),
            Self::Silent(limit) => Self::Silent(*limit),
        }
    }

    /// True where the server does not know the script by its hash.
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, Self::Refused(error) if code(error) == Some("NOSCRIPT"))
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotSent(error) => error,
            Failure::Refused(error) => refusal(*error),
            Failure::Odd(error) => {
                Self::indeterminate("the redis server answered with an error that was not expected")
                    .with_source(Said(*error))
            }
            Failure::Cut(error) => {
                Self::indeterminate("the connection to the redis server failed before its answer")
                    .with_source(Said(*error))
            }
            Failure::Silent(limit) => {
                Self::indeterminate("the redis server did not answer in time")
                    .with("limit", format_args!("{limit:?}"))
            }
        }
    }
}

/// The error of a server that refused and did nothing.
fn refusal(error: RedisError) -> Error {
    let (kind, message) = match code(&error) {
        Some("OOM") => (
            ErrorKind::Unavailable,
            "the redis server has reached its memory limit",
        ),
        Some("READONLY") => (ErrorKind::Unavailable, "the redis server is a replica"),
        Some("LOADING") => (
            ErrorKind::Unavailable,
            "the redis server is loading its data",
        ),
        Some("NOREPLICAS") => (
            ErrorKind::Unavailable,
            "the redis server has fewer replicas than it was told to need",
        ),
        Some("MISCONF") => (
            ErrorKind::Unavailable,
            "the redis server cannot save its data and takes no writes",
        ),
        Some("BUSY") => (
            ErrorKind::Unavailable,
            "the redis server is busy with a script",
        ),
        Some("NOAUTH" | "WRONGPASS") => (
            ErrorKind::Unavailable,
            "the redis server refused the user or the password",
        ),
        Some("NOPERM") => (
            ErrorKind::Unsupported,
            "the redis user may not do this; see the rights in docs/backends/redis.md",
        ),
        Some(UNKNOWN_COMMAND) => (
            ErrorKind::Unsupported,
            "the redis server does not know a command that is needed",
        ),
        Some("CROSSSLOT") => (
            ErrorKind::Unsupported,
            "the keys of one operation are in different slots",
        ),
        _ => (
            ErrorKind::Unavailable,
            "the redis server cannot serve the request now",
        ),
    };
    Error::new(kind, message).with_source(Said(error))
}

/// The code of a refusal. Before 7.0 a script's error holds the code of the command in its text.
fn code(error: &RedisError) -> Option<&'static str> {
    let shown = error.code()?;
    let detail = error.detail().unwrap_or_default();
    if shown == "ERR" && detail.starts_with("unknown command") {
        return Some(UNKNOWN_COMMAND);
    }
    REFUSALS.iter().copied().find(|known| {
        shown == *known || (shown == "ERR" && detail.contains(&format!(": -{known} ")))
    })
}

/// True where a server's refusal says that another server is to be asked.
pub(super) fn leads_elsewhere(error: &ServerError) -> bool {
    matches!(error.code(), "READONLY" | "MASTERDOWN")
}

/// An answer as the type that was expected; an error in its place is a failure.
pub(super) fn parse<T: FromRedisValue>(value: Value) -> Result<T, Failure> {
    let value = value.extract_error().map_err(Failure::answering)?;
    T::from_redis_value(value).map_err(|e| Failure::Odd(Box::new(e.into())))
}

/// The same for what was only asked to make a connection.
pub(super) fn parse_unsent<T: FromRedisValue>(value: Value) -> Result<T, Failure> {
    let value = value.extract_error().map_err(Failure::connecting)?;
    T::from_redis_value(value).map_err(|e| Failure::connecting(e.into()))
}

/// The answer of a script: words, of which the first says what it means.
pub(super) struct Words(std::vec::IntoIter<Value>);

impl Words {
    pub(super) fn of(value: Value) -> Result<Self, Failure> {
        Ok(Self(parse::<Vec<Value>>(value)?.into_iter()))
    }

    /// All that is left, as it came.
    pub(super) fn into_values(self) -> Vec<Value> {
        self.0.collect()
    }

    /// The next word; `None` at the end.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        match self.0.next()? {
            Value::BulkString(bytes) => Some(bytes),
            Value::SimpleString(text) => Some(text.into_bytes()),
            _ => None,
        }
    }

    /// The next word as text; empty at the end.
    pub(super) fn text(&mut self) -> String {
        let bytes = self.next().unwrap_or_default();
        String::from_utf8(bytes).unwrap_or_default()
    }

    /// The next word as a number.
    pub(super) fn number(&mut self) -> Result<u64, Error> {
        let text = self.text();
        text.parse().map_err(|_| {
            Error::corrupt("the redis script answered with something that is not a number")
                .with("answer", format_args!("{text:?}"))
        })
    }
}
