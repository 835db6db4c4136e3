//! What a cluster's failures mean: applied, certainly not applied, or unknown.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use etcd_client::Error as ClientError;

use crate::error::{Error, ErrorKind};

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) effect: Effect,
    /// The connection is of no use any more: the next request goes to another member.
    pub(super) ends_connection: bool,
    error: Error,
}

/// What is known of a request without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It never reached a server: another one may be asked.
    NotSent,
    /// A server refused it, and nothing was applied.
    Refused,
    /// It names an etcd lease that has lapsed; nothing was applied.
    LeaseGone,
    /// It may have been applied, or may still be.
    Unknown,
}

/// A connection that was lost is not made anew behind our back: whoever makes the next one looks
/// first whether the cluster is still the same.
#[derive(Debug)]
pub(super) struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection was lost")
    }
}

impl StdError for Gone {}

impl Failure {
    fn new(effect: Effect, ends_connection: bool, error: Error) -> Self {
        Self {
            effect,
            ends_connection,
            error,
        }
    }

    /// Nothing was sent.
    pub(super) fn not_sent(error: Error) -> Self {
        Self::new(Effect::NotSent, true, error)
    }

    /// No answer came in time.
    pub(super) fn silent(limit: Duration) -> Self {
        let error = Error::indeterminate("the etcd server did not answer in time")
            .with("limit", format_args!("{limit:?}"));
        Self::new(Effect::Unknown, true, error)
    }

    /// A failure to connect, to log in or to greet.
    pub(super) fn connecting(error: ClientError) -> Self {
        let failure = Self::answering(error);
        let error = match failure.effect {
            Effect::Refused => failure.error,
            _ => Error::unavailable("the etcd server cannot be reached").with_source(failure.error),
        };
        Self::not_sent(error)
    }

    /// A failure of a request that was sent.
    pub(super) fn answering(error: ClientError) -> Self {
        match error {
            ClientError::GRpcStatus(status) => Self::of_status(status),
            ClientError::LeaseKeepAliveError(text) if text == "lease not found" => {
                Self::lease_gone()
            }
            ClientError::TransportError(error) => Self::not_sent(
                Error::unavailable("the etcd server cannot be reached").with_source(error),
            ),
            other => Self::new(
                Effect::Unknown,
                true,
                Error::indeterminate("the connection to the etcd server failed before its answer")
                    .with_source(other),
            ),
        }
    }

    fn lease_gone() -> Self {
        Self::new(
            Effect::LeaseGone,
            false,
            Error::unavailable("the etcd lease lapsed before it could be used"),
        )
    }

    fn of_status(status: tonic::Status) -> Self {
        if caused_by_gone(&status) {
            return Self::not_sent(
                Error::unavailable("the connection to the etcd server was lost").with_source(Gone),
            );
        }
        if status.message().contains("requested lease not found") {
            return Self::lease_gone();
        }
        if let Some((kind, message)) = refusal(status.message()) {
            // A login that is not accepted any more is made anew.
            let ends = message == LOGIN_REFUSED;
            return Self::new(
                Effect::Refused,
                ends,
                Error::new(kind, message).with_source(cause(&status)),
            );
        }
        Self::new(
            Effect::Unknown,
            true,
            Error::indeterminate("the etcd server gave no answer to the request")
                .with_source(cause(&status)),
        )
    }

    /// The error for a caller whose request changes nothing: certainly not applied.
    pub(super) fn of_read(self) -> Self {
        match self.effect {
            Effect::Unknown => Self {
                effect: Effect::Refused,
                error: self.error.into_kind(ErrorKind::Unavailable),
                ..self
            },
            _ => self,
        }
    }

    /// What another error of the same cause says.
    pub(super) fn described(&self) -> (ErrorKind, String) {
        (self.error.kind(), self.error.to_string())
    }

    /// True where the same request may be sent to another server.
    pub(super) fn leads_elsewhere(&self) -> bool {
        self.effect == Effect::NotSent
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

const LOGIN_REFUSED: &str =
    "the etcd server refused the user or the password; check both in the URL";

/// Refusals that come before anything is applied. Timeouts, a change of leader and a server that
/// stops are not among them: the request may be in the cluster's log.
fn refusal(message: &str) -> Option<(ErrorKind, &'static str)> {
    const TABLE: &[(&str, ErrorKind, &str)] = &[
        (
            "etcdserver: no leader",
            ErrorKind::Unavailable,
            "the etcd cluster has no leader",
        ),
        (
            "etcdserver: too many requests",
            ErrorKind::Unavailable,
            "the etcd cluster is overloaded",
        ),
        (
            "database space exceeded",
            ErrorKind::Unavailable,
            "the etcd database is full; compact and defragment it, then disarm the alarm",
        ),
        (
            "etcdserver: permission denied",
            ErrorKind::Unsupported,
            "the etcd user may not do this; see the rights in docs/backends/etcd.md",
        ),
        (
            "etcdserver: request is too large",
            ErrorKind::Invalid,
            "the request is larger than the etcd server takes; see its --max-request-bytes",
        ),
        ("invalid auth token", ErrorKind::Unavailable, LOGIN_REFUSED),
        (
            "authentication failed",
            ErrorKind::Unsupported,
            LOGIN_REFUSED,
        ),
        ("user name is empty", ErrorKind::Unsupported, LOGIN_REFUSED),
        ("user name not found", ErrorKind::Unsupported, LOGIN_REFUSED),
        (
            "authentication is not enabled",
            ErrorKind::Unsupported,
            "the etcd server has no users, but the URL names one",
        ),
    ];
    TABLE
        .iter()
        .find(|(text, ..)| message.contains(text))
        .map(|(_, kind, message)| (*kind, *message))
}

/// The text of a status, which holds no secret, without the addresses of its metadata.
fn cause(status: &tonic::Status) -> String {
    format!("{:?}: {}", status.code(), status.message())
}

fn caused_by_gone(error: &(dyn StdError + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<Gone>() {
            return true;
        }
        // An I/O error does not show what it wraps as its source.
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && io.get_ref().is_some_and(|inner| inner.is::<Gone>())
        {
            return true;
        }
        cause = error.source();
    }
    false
}
