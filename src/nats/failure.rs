//! What the failures of NATS mean: applied, certainly not applied, or unknown.

use std::time::Duration;

use async_nats::client::{RequestError, RequestErrorKind};
use async_nats::{ConnectError, ConnectErrorKind};
use serde::Deserialize;

use crate::error::{Error, ErrorKind};

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) effect: Effect,
    /// The connection is of no use any more.
    pub(super) ends_connection: bool,
    /// What JetStream said, as a number.
    pub(super) code: Option<u64>,
    error: Error,
}

/// What is known of a request without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// It never reached a server: another one may be asked.
    NotSent,
    /// A server refused it, and nothing was applied.
    Refused,
    /// It may have been applied, or may still be.
    Unknown,
}

/// An error of the JetStream API.
#[derive(Debug, Deserialize)]
pub(super) struct ApiError {
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

/// A subject has another last sequence than the request expected.
const WRONG_LAST_SEQUENCE: [u64; 2] = [10_071, 10_164];
/// There is no such stream.
pub(super) const NO_STREAM: u64 = 10_059;
/// There is no such message.
pub(super) const NO_MESSAGE: u64 = 10_037;
/// The stream is there with other settings.
pub(super) const OTHER_SETTINGS: u64 = 10_058;

impl Failure {
    fn new(effect: Effect, ends_connection: bool, error: Error) -> Self {
        Self {
            effect,
            ends_connection,
            code: None,
            error,
        }
    }

    /// Nothing was sent.
    pub(super) fn not_sent(error: Error) -> Self {
        Self::new(Effect::NotSent, true, error)
    }

    /// Nothing was applied, and the connection is good.
    pub(super) fn refused(error: Error) -> Self {
        Self::new(Effect::Refused, false, error)
    }

    /// No answer came in time.
    pub(super) fn silent(limit: Duration) -> Self {
        let error = Error::indeterminate("the NATS server did not answer in time")
            .with("limit", format_args!("{limit:?}"));
        Self::new(Effect::Unknown, true, error)
    }

    /// The connection was lost while the request was under way.
    pub(super) fn broken() -> Self {
        let error =
            Error::indeterminate("the connection to the NATS server was lost before its answer");
        Self::new(Effect::Unknown, true, error)
    }

    /// The server let the user have no permission.
    pub(super) fn forbidden(text: &str) -> Self {
        let error = Error::unsupported(
            "the NATS user may not do this; see the permissions in docs/backends/nats.md",
        )
        .with_source(text.to_owned());
        Self::new(Effect::Refused, false, error)
    }

    /// A failure to connect or to log in.
    pub(super) fn connecting(error: ConnectError, host: &str, port: u16) -> Self {
        // Trying again does not mend these.
        let wrong = match error.kind() {
            ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => {
                "the NATS server refused the user or the password; check both in the URL, or the token there"
            }
            ConnectErrorKind::Tls => {
                "TLS cannot be set up with these files; expected certificates and keys in PEM form"
            }
            _ if speaks_of(&error, "invalid peer certificate") => {
                "the NATS server's certificate is not accepted; name its authority as ca=/path/to/ca.pem"
            }
            _ if speaks_of(&error, "CertificateRequired") => {
                "the NATS server asks for a client's certificate; name it as cert= and cert_key="
            }
            _ if speaks_of(&error, "InvalidContentType") => {
                "the NATS server speaks no TLS; connect with nats:// and without tls, ca and cert"
            }
            _ => "",
        };
        let error_of = match wrong {
            "" => Error::unavailable("the NATS server cannot be reached"),
            wrong => Error::unsupported(wrong),
        };
        Self::not_sent(
            error_of
                .with("host", host)
                .with("port", port)
                .with_source(error),
        )
    }

    /// A failure of a request that was handed to the client.
    pub(super) fn asking(error: RequestError) -> Self {
        match error.kind() {
            // The server's own word: nobody listens on the subject, so nobody took it.
            RequestErrorKind::NoResponders => Self::refused(
                Error::unavailable("no JetStream server takes requests for the bucket now: it has no leader, or is not there")
                    .with_source(error),
            ),
            RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::InvalidSubject => {
                Self::refused(
                    Error::invalid("the NATS client refused the request").with_source(error),
                )
            }
            RequestErrorKind::TimedOut | RequestErrorKind::Other => {
                let failure = Self::broken();
                Self {
                    error: failure.error.with_source(error),
                    ..failure
                }
            }
        }
    }

    /// An error that JetStream answered.
    pub(super) fn of_api(error: &ApiError) -> Self {
        let known = TABLE.iter().find(|(code, ..)| *code == error.err_code);
        let (effect, kind, message) = match known {
            Some((_, kind, message)) => (Effect::Refused, *kind, *message),
            // What it means for a write is not known.
            None => (
                Effect::Unknown,
                ErrorKind::Indeterminate,
                "JetStream answered with an error",
            ),
        };
        let cause = format!(
            "{} (code {}, error {})",
            error.description, error.code, error.err_code
        );
        Self {
            code: Some(error.err_code),
            ..Self::new(effect, false, Error::new(kind, message).with_source(cause))
        }
    }

    /// True where the record was changed since it was read.
    pub(super) fn is_moved(&self) -> bool {
        self.code
            .is_some_and(|code| WRONG_LAST_SEQUENCE.contains(&code))
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
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// Refusals that come before anything is applied.
const TABLE: &[(u64, ErrorKind, &str)] = &[
    (
        10_071,
        ErrorKind::Unavailable,
        "the record changed in the meantime",
    ),
    (
        10_164,
        ErrorKind::Unavailable,
        "the record changed in the meantime",
    ),
    (
        NO_STREAM,
        ErrorKind::Unavailable,
        "the bucket is not there; open the store again",
    ),
    (
        NO_MESSAGE,
        ErrorKind::Unavailable,
        "there is no such record",
    ),
    (
        OTHER_SETTINGS,
        ErrorKind::Unavailable,
        "the bucket is there with other settings",
    ),
    (
        10_076,
        ErrorKind::Unsupported,
        "JetStream is not enabled on the NATS server; start it with -js, or with a jetstream block in its configuration",
    ),
    (
        10_039,
        ErrorKind::Unsupported,
        "JetStream is not enabled for this account; enable it in the account's settings",
    ),
    (
        10_008,
        ErrorKind::Unavailable,
        "JetStream is temporarily unavailable: the cluster has no leader",
    ),
    (
        10_009,
        ErrorKind::Unavailable,
        "JetStream is temporarily unavailable: the server does not lead any more",
    ),
    (
        10_023,
        ErrorKind::Unavailable,
        "JetStream has too few resources",
    ),
    (
        10_047,
        ErrorKind::Unavailable,
        "JetStream's storage is used up; see the limits of the account and the server",
    ),
    (
        10_028,
        ErrorKind::Unavailable,
        "JetStream's memory is used up; see the limits of the account and the server",
    ),
    (
        10_077,
        ErrorKind::Unavailable,
        "JetStream cannot store the message: the bucket or its disk is full",
    ),
    (
        10_049,
        ErrorKind::Unavailable,
        "JetStream cannot make the bucket's files now; try again, and look at its disk where this stays",
    ),
    (
        10_054,
        ErrorKind::Invalid,
        "the value is larger than the bucket takes; see its max_msg_size",
    ),
    (
        10_109,
        ErrorKind::Unsupported,
        "the bucket is sealed, so that nothing can be written to it",
    ),
    (
        10_074,
        ErrorKind::Unsupported,
        "a bucket with replicas needs a NATS cluster; expected replicas=1 for a single server",
    ),
    (
        10_005,
        ErrorKind::Unavailable,
        "the NATS cluster has too few servers for the bucket's replicas",
    ),
    (
        10_065,
        ErrorKind::Unsupported,
        "another stream of the account has the bucket's subjects; choose another bucket",
    ),
];

fn speaks_of(error: &(dyn std::error::Error + 'static), text: &str) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        // One layer shows its cause only in its own text.
        if error.to_string().contains(text) || format!("{error:?}").contains(text) {
            return true;
        }
        cause = error.source();
    }
    false
}
