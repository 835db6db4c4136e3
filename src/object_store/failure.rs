//! What a store's failures mean: applied, certainly not applied, or unknown. And what of them may be
//! shown: a store's answer can hold the caller's session token.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use ::object_store::Error as StoreError;
use ::object_store::client::{HttpError, HttpErrorKind};

use crate::error::{Error, ErrorKind};

/// How much of a cause is shown, in bytes.
const CAUSE_MAX_BYTES: usize = 400;

/// What stands before the status in the client's message, which has no other way to tell it.
const STATUS: &str = "status code: ";

/// A failure to read: nothing was to be applied.
pub(super) fn reading(error: &StoreError) -> Error {
    let answered = writing(error);
    match answered.kind() {
        ErrorKind::Indeterminate => {
            Error::unavailable("the object store did not serve the request")
                .with_source(shown(error))
        }
        _ => answered,
    }
}

/// A failure to write that is no refusal of its condition.
pub(super) fn writing(error: &StoreError) -> Error {
    match error {
        StoreError::NotImplemented { .. } | StoreError::NotSupported { .. } => Error::unsupported(
            "the object store has no conditional writes, without which nothing can be fenced",
        )
        .with_source(shown(error)),
        StoreError::PermissionDenied { .. } => Error::unsupported(
            "the object store denied access; see the credentials and what they may do",
        )
        .with_source(shown(error)),
        StoreError::Unauthenticated { .. } => {
            Error::unsupported("the object store did not accept the credentials")
                .with_source(shown(error))
        }
        StoreError::NotFound { .. } if is_missing_bucket(error) => {
            Error::invalid("the bucket does not exist").with_source(shown(error))
        }
        StoreError::NotFound { .. } => {
            Error::unavailable("the object store does not find what the request is about")
                .with_source(shown(error))
        }
        StoreError::InvalidPath { .. } => {
            Error::invalid("the object's key is not one that the store takes")
                .with_source(shown(error))
        }
        _ if not_sent(error) => {
            Error::unavailable("the object store cannot be reached").with_source(shown(error))
        }
        _ => match status(error) {
            // Refused before anything was done. 408 and 409 may come after it.
            Some(429) => Error::unavailable("the object store takes no more requests now")
                .with_source(shown(error)),
            Some(status) if (400..500).contains(&status) && status != 408 && status != 409 => {
                Error::invalid("the object store refused the request").with_source(shown(error))
            }
            Some(status) if (300..400).contains(&status) => {
                Error::invalid("the object store refers to another place; see region and endpoint")
                    .with_source(shown(error))
            }
            _ => Error::indeterminate(
                "the object store gave no answer that says whether the request was applied",
            )
            .with_source(shown(error)),
        },
    }
}

/// No answer in time to a request that was to change something.
pub(super) fn silent(limit: Duration) -> Error {
    Error::indeterminate("the object store did not answer in time")
        .with("limit", format_args!("{limit:?}"))
}

/// True where the bucket is what was not found.
pub(super) fn is_missing_bucket(error: &StoreError) -> bool {
    let text = error.to_string();
    [
        "NoSuchBucket",
        "ContainerNotFound",
        "The specified bucket does not exist",
    ]
    .iter()
    .any(|word| text.contains(word))
}

fn not_sent(error: &StoreError) -> bool {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return http.kind() == HttpErrorKind::Connect;
        }
        cause = error.source();
    }
    false
}

/// The status of an answer.
fn status(error: &StoreError) -> Option<u16> {
    let text = error.to_string();
    let (_, rest) = text.split_once(STATUS)?;
    rest.get(..3)?.parse().ok()
}

/// A cause without what may be secret in it: of an answer in XML only its code and its message.
#[derive(Debug)]
struct Cause(String);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Cause {}

fn shown(error: &StoreError) -> impl Into<Box<dyn StdError + Send + Sync>> {
    let text = error.to_string();
    let mut shown = match text.find(['<', '{']) {
        None => text,
        Some(at) => {
            let (before, body) = text.split_at(at);
            let part = |tag: &str| {
                let (_, rest) = body.split_once(&format!("<{tag}>"))?;
                let (inner, _) = rest.split_once(&format!("</{tag}>"))?;
                Some(inner.to_owned())
            };
            let parts = [part("Code"), part("Message")];
            let said: Vec<String> = parts.into_iter().flatten().collect();
            format!("{}{}", before, said.join(": "))
        }
    };
    let mut end = CAUSE_MAX_BYTES.min(shown.len());
    while !shown.is_char_boundary(end) {
        end -= 1;
    }
    shown.truncate(end);
    Box::<dyn StdError + Send + Sync>::from(Cause(with_roots(shown, error)))
}

/// The client's messages stop at "error sending request"; why is below.
fn with_roots(mut shown: String, error: &StoreError) -> String {
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !said.contains(['<', '{']) && said.len() <= CAUSE_MAX_BYTES && !shown.contains(&said) {
            shown.push_str(": ");
            shown.push_str(&said);
        }
        cause = error.source();
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: &str, body: &str) -> StoreError {
        StoreError::Generic {
            store: "S3",
            source: format!("Server returned non-2xx status code: {status}: {body}").into(),
        }
    }

    #[test]
    fn only_an_answer_that_says_so_means_that_nothing_was_applied() {
        for (status, kind) in [
            ("400 Bad Request", ErrorKind::Invalid),
            ("429 Too Many Requests", ErrorKind::Unavailable),
            ("408 Request Timeout", ErrorKind::Indeterminate),
            ("500 Internal Server Error", ErrorKind::Indeterminate),
            ("503 Service Unavailable", ErrorKind::Indeterminate),
        ] {
            assert_eq!(writing(&answer(status, "")).kind(), kind, "{status}");
        }
        let lost = StoreError::Generic {
            store: "S3",
            source: Box::new(HttpError::new(
                HttpErrorKind::Interrupted,
                Cause("reset".into()),
            )),
        };
        assert_eq!(writing(&lost).kind(), ErrorKind::Indeterminate);
        assert_eq!(reading(&lost).kind(), ErrorKind::Unavailable);
        let unreachable = StoreError::Generic {
            store: "S3",
            source: Box::new(HttpError::new(
                HttpErrorKind::Connect,
                Cause("refused".into()),
            )),
        };
        assert_eq!(writing(&unreachable).kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn a_session_token_in_an_answer_is_not_shown() {
        let body = "<Error><Code>ExpiredToken</Code><Message>The token has expired</Message><Token-0>hunter2</Token-0></Error>";
        let error = writing(&answer("400 Bad Request", body));
        let shown = format!("{error:?}");
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(
            shown.contains("ExpiredToken: The token has expired"),
            "{shown}"
        );
    }
}
