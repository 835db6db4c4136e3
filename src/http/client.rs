//! The client's half: show a fence, and hear a refusal.

use http::{HeaderMap, HeaderValue, StatusCode};

use super::headers::{FENCING_LOCK, FENCING_TOKEN, FENCING_WATERMARK, number, value_of};
use super::problem::Problem;
use crate::clock::unix_micros;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, Fencing};
use crate::token::check_jump;

/// Sets both [headers](super::headers) of a request, in place of any that it had, and returns what
/// they show.
///
/// One call is one operation: a guard gives each a sequence of its own (S7). To repeat a request of
/// unknown outcome, send the *same* headers again, or show the returned fence; the server then
/// tells the repeat from a second write. For gRPC, pass a tonic request's `metadata_mut().as_mut()`.
///
/// ```
/// use fencelock::{FencingToken, http::show};
///
/// let mut headers = http::HeaderMap::new();
/// show(&mut headers, FencingToken::new(34)?)?;
/// assert_eq!(headers["fencing-token"], "34");
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Lost` where a guard knows that it no longer holds its lock: do not send the request then. The
/// headers are as they were.
pub fn show(headers: &mut HeaderMap, fencing: impl Fencing) -> Result<Fence> {
    let fence = fencing.to_fence()?;
    // A bare number has nothing to explain.
    let lock = if fence.holder().is_some() || fence.domain().is_some() {
        let text = HeaderValue::from_str(&fence.to_string());
        Some(text.map_err(|error| {
            Error::invalid("the fence cannot stand in a header").with_source(error)
        })?)
    } else {
        None
    };
    headers.remove(&FENCING_LOCK);
    headers.insert(&FENCING_TOKEN, value_of(fence.token()));
    if let Some(lock) = lock {
        headers.insert(&FENCING_LOCK, lock);
    }
    Ok(fence)
}

/// What an answer says of the fence, or `None` where it is no refusal of a [`FencingLayer`] or of a
/// handler that answers with a [`Problem`].
///
/// It is known by its `application/problem+json` of our type, or by the two numbers in the headers
/// where there is no such body: the answer to a HEAD, and a refusal of gRPC (for tonic, pass
/// `status.metadata().as_ref()` and an empty body). The kind says what to do next:
///
/// | Kind | Status | The request |
/// |---|---|---|
/// | `Fenced` | 412 | had no effect: stop |
/// | `DomainMismatch` | 409 | had no effect: use the other lock, or rebind |
/// | `Invalid` | 400, 428 | had no effect: correct it |
/// | `Unavailable`, `Timeout` | 503 | had no effect where the layer says so: repeat it |
/// | `Indeterminate` | 503 | may have been applied: repeat it with the same headers |
/// | others | 500 | see the server's log |
///
/// ```
/// use fencelock::http::{Problem, refusal};
/// use fencelock::{Error, ErrorKind, FencingToken};
///
/// let (old, new) = (FencingToken::new(33)?, FencingToken::new(34)?);
/// let answer = Problem::of(&Error::fenced(old, new, "stale")).response::<bytes::Bytes>();
/// let error = refusal(answer.status(), answer.headers(), answer.body()).unwrap();
/// assert_eq!(error.kind(), ErrorKind::Fenced);
/// assert_eq!((error.token(), error.watermark()), (Some(old), Some(new)));
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// [`FencingLayer`]: super::FencingLayer
#[must_use]
pub fn refusal(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Option<Error> {
    if let Some(problem) = Problem::parse(status, headers, body) {
        return Some(problem);
    }
    let token = number(headers, &FENCING_TOKEN)?;
    let watermark = number(headers, &FENCING_WATERMARK)?;
    Some(
        Error::fenced(
            token,
            watermark,
            "stale fencing token refused by the server",
        )
        .with("token", token)
        .with("watermark", watermark),
    )
}

/// `Ok` where an answer is no [`refusal`]; else that refusal, after `fencing` has heard of it: a
/// guard that is refused while its lease is good makes its lock's next token larger than the
/// watermark (L10), which is how a lock whose engine lost its data recovers.
///
/// A refusal of another token than the one that `fencing` shows, as a confused proxy could give it,
/// moves nothing, and neither does a watermark out of bounds (S11): a server that lies is not to use
/// up the tokens of a lock.
///
/// # Errors
/// As [`refusal`] says.
pub fn check_answer(
    fencing: impl Fencing,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<()> {
    let Some(error) = refusal(status, headers, body) else {
        return Ok(());
    };
    if let (ErrorKind::Fenced, Some(refused), Some(watermark), Ok(shown)) = (
        error.kind(),
        error.token(),
        error.watermark(),
        fencing.to_fence(),
    ) && refused == shown.token()
        && check_jump(Some(refused), watermark, unix_micros()).is_ok()
    {
        fencing.refused(watermark);
    }
    Err(error)
}
