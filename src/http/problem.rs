//! What is answered instead of a handler's own answer: `application/problem+json` (RFC 9457), or for
//! gRPC a response of trailers only.

use std::error::Error as _;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use super::headers::{FENCING_TOKEN, FENCING_WATERMARK, value_of};
use crate::error::{Error, ErrorKind};
use crate::token::FencingToken;

const MEDIA_TYPE: &str = "application/problem+json";

/// What all our problem types begin with; the kind of error follows.
const TYPE_PREFIX: &str = "urn:fencelock:";

/// The type of a request that shows no fence.
const TOKEN_REQUIRED: &str = "token_required";

/// After how many seconds to try again.
const RETRY_AFTER_SECS: &str = "1";

/// The longest problem that is read, in bytes.
const TEXT_MAX_BYTES: usize = 16 << 10;

/// The first number that a double cannot tell from its neighbour.
const EXACT_IN_A_DOUBLE: u64 = 1 << 53;

/// Printable ASCII stands for itself in `grpc-message`, `%` does not.
const GRPC_MESSAGE: &AsciiSet = &CONTROLS.add(b'%');

/// A refusal as HTTP says it.
///
/// The layer answers with it, and so may a handler whose storage refused, so that clients meet one
/// form: [`Problem::of`] and [`response`](Self::response).
///
/// | Error | Status | `type` | gRPC |
/// |---|---|---|---|
/// | `Fenced` | 412 | `urn:fencelock:fenced`, with `token` and `watermark` | `FAILED_PRECONDITION` |
/// | `DomainMismatch` | 409 | `urn:fencelock:domain_mismatch` | `FAILED_PRECONDITION` |
/// | no token | 428 | `urn:fencelock:token_required` | `FAILED_PRECONDITION` |
/// | `Invalid` | 400 | `urn:fencelock:invalid` | `INVALID_ARGUMENT` |
/// | `Unavailable`, `Timeout`, `Indeterminate` | 503 with `Retry-After` | `urn:fencelock:unavailable`, … | `UNAVAILABLE` |
/// | others, and `Invalid` with a cause, which is the server's | 500 | `urn:fencelock:corrupt`, … | `INTERNAL` |
///
/// The detail of the first four says what was wrong with the fence. Of the others it says nothing
/// that a client has no use for: the store's own words belong into your log.
///
/// `token` and `watermark` are JSON numbers below 2^53 and strings from there on, since JavaScript
/// would round them; in a 412 they are also in the headers `Fencing-Token` and `Fencing-Watermark`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
    token: Option<FencingToken>,
    watermark: Option<FencingToken>,
}

#[derive(Serialize, Deserialize)]
struct Json {
    r#type: String,
    #[serde(default)]
    title: String,
    #[serde(default)]
    status: u16,
    #[serde(default)]
    detail: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    watermark: Option<Number>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Exact(u64),
    Text(String),
}

impl Problem {
    /// The problem that an error of this crate is to a client.
    ///
    /// ```
    /// use fencelock::{Error, FencingToken, http::Problem};
    /// let (old, new) = (FencingToken::new(33)?, FencingToken::new(34)?);
    /// let problem = Problem::of(&Error::fenced(old, new, "stale fencing token refused"));
    /// assert_eq!(problem.status(), 412);
    /// # Ok::<(), fencelock::Error>(())
    /// ```
    #[must_use]
    pub fn of(error: &Error) -> Self {
        let (status, title, detail) = match error.kind() {
            ErrorKind::Fenced => (
                StatusCode::PRECONDITION_FAILED,
                "The fencing token is stale",
                error.to_string(),
            ),
            // One with a cause comes from a driver: the server's own settings, which are no mistake
            // of the client's.
            ErrorKind::Invalid if error.source().is_none() => (
                StatusCode::BAD_REQUEST,
                "The request cannot be fenced",
                error.to_string(),
            ),
            // The store's words name the lock that the resource is bound to.
            ErrorKind::DomainMismatch => (
                StatusCode::CONFLICT,
                "The resource is bound to another lock",
                "use the lock that the resource is bound to, or have the resource rebound"
                    .to_owned(),
            ),
            ErrorKind::Timeout => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The resource is busy",
                "other requests are at the resource, and nothing was done; try again".to_owned(),
            ),
            ErrorKind::Unavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The fence cannot be judged now",
                "nothing was done; try again".to_owned(),
            ),
            ErrorKind::Indeterminate => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The outcome is unknown",
                "the request may have been applied; send it again with the same headers".to_owned(),
            ),
            _ => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "The fence cannot be judged",
                "the server's log says why".to_owned(),
            ),
        };
        Self {
            status,
            kind: match error.kind() {
                ErrorKind::Invalid if status.is_server_error() => ErrorKind::Unsupported.as_str(),
                kind => kind.as_str(),
            },
            title,
            detail,
            token: error.token(),
            watermark: error.watermark(),
        }
    }

    /// A request without a token, for a resource that asks for one: 428.
    #[must_use]
    pub fn token_required() -> Self {
        Self {
            status: StatusCode::PRECONDITION_REQUIRED,
            kind: TOKEN_REQUIRED,
            title: "A fencing token is required",
            detail: "send the headers fencing-token and fencing-lock of the lock that guards the \
                     resource"
                .to_owned(),
            token: None,
            watermark: None,
        }
    }

    /// The status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The answer, for whatever body type: axum's, `Bytes`, `Full<Bytes>`.
    #[must_use]
    pub fn response<B: From<Bytes>>(&self) -> Response<B> {
        let mut response = Response::new(B::from(self.json().into()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_SECS));
        }
        self.number_headers(headers);
        response
    }

    /// The answer to a request with these headers: trailers only, status 200 and `grpc-status`, where
    /// its content type is gRPC's, and [`response`](Self::response) otherwise.
    #[must_use]
    pub fn response_to<B: From<Bytes>>(&self, request: &HeaderMap) -> Response<B> {
        let grpc = request
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
        if !grpc {
            return self.response();
        }
        let mut response = Response::new(B::from(Bytes::new()));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert("grpc-status", HeaderValue::from(self.grpc_status()));
        let message = format!("{}: {}", self.title, self.detail);
        let message = utf8_percent_encode(&message, GRPC_MESSAGE).to_string();
        if let Ok(message) = HeaderValue::from_str(&message) {
            headers.insert("grpc-message", message);
        }
        self.number_headers(headers);
        response
    }

    /// The codes of gRPC: which of them a client may simply retry is what matters.
    fn grpc_status(&self) -> u16 {
        const INVALID_ARGUMENT: u16 = 3;
        const FAILED_PRECONDITION: u16 = 9;
        const INTERNAL: u16 = 13;
        const UNAVAILABLE: u16 = 14;
        match self.status {
            StatusCode::BAD_REQUEST => INVALID_ARGUMENT,
            StatusCode::PRECONDITION_FAILED
            | StatusCode::CONFLICT
            | StatusCode::PRECONDITION_REQUIRED => FAILED_PRECONDITION,
            StatusCode::SERVICE_UNAVAILABLE => UNAVAILABLE,
            _ => INTERNAL,
        }
    }

    fn number_headers(&self, headers: &mut HeaderMap) {
        // Whether a token is stale changes with the next request.
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let (Some(token), Some(watermark)) = (self.token, self.watermark) {
            headers.insert(&FENCING_TOKEN, value_of(token));
            headers.insert(&FENCING_WATERMARK, value_of(watermark));
        }
    }

    fn json(&self) -> String {
        let json = Json {
            r#type: format!("{TYPE_PREFIX}{}", self.kind),
            title: self.title.to_owned(),
            status: self.status.as_u16(),
            detail: self.detail.clone(),
            token: self.token.map(Number::of),
            watermark: self.watermark.map(Number::of),
        };
        // Strings and numbers always serialize.
        serde_json::to_string(&json).unwrap_or_default()
    }

    /// The error that an answer stands for, where it is one of ours.
    pub(super) fn parse(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Option<Error> {
        let media_type = headers.get(CONTENT_TYPE)?.to_str().ok()?;
        let media_type = media_type.split(';').next()?.trim();
        if !media_type.eq_ignore_ascii_case(MEDIA_TYPE) || body.len() > TEXT_MAX_BYTES {
            return None;
        }
        let json: Json = serde_json::from_slice(body).ok()?;
        let kind = kind_of(json.r#type.strip_prefix(TYPE_PREFIX)?)?;
        let detail = match json.detail.as_str() {
            "" => json.title,
            _ => json.detail,
        };
        if kind == ErrorKind::Fenced {
            let number = |number: Option<Number>| number.and_then(Number::token);
            // A refusal without its numbers is none of ours.
            let (token, watermark) = (number(json.token)?, number(json.watermark)?);
            return Some(Error::fenced(token, watermark, detail));
        }
        Some(Error::new(kind, detail).with("status", status.as_u16()))
    }
}

impl Number {
    fn of(token: FencingToken) -> Self {
        match token.get() {
            exact if exact < EXACT_IN_A_DOUBLE => Self::Exact(exact),
            large => Self::Text(large.to_string()),
        }
    }

    fn token(self) -> Option<FencingToken> {
        match self {
            Self::Exact(number) => FencingToken::new(number).ok(),
            Self::Text(text) => text.parse().ok(),
        }
    }
}

fn kind_of(word: &str) -> Option<ErrorKind> {
    if word == TOKEN_REQUIRED {
        return Some(ErrorKind::Invalid);
    }
    [
        ErrorKind::Fenced,
        ErrorKind::Lost,
        ErrorKind::Timeout,
        ErrorKind::Unavailable,
        ErrorKind::Indeterminate,
        ErrorKind::Invalid,
        ErrorKind::Unsupported,
        ErrorKind::Corrupt,
        ErrorKind::DomainMismatch,
        ErrorKind::Exhausted,
    ]
    .into_iter()
    .find(|kind| kind.as_str() == word)
}
