//! The headers, and their one grammar.
//!
//! | Header | Value | Sent by |
//! |---|---|---|
//! | `Fencing-Token` | the token: decimal digits, 1 to 9223372036854775807, no sign, no leading zero | client; server in a refusal |
//! | `Fencing-Lock` | the whole fence in the text form of [`Fence`]: `v1:TOKEN:HOLDER:DOMAIN` or `v1:TOKEN:HOLDER:DOMAIN:SEQ`, with the same token | client |
//! | `Fencing-Watermark` | the watermark that the token met | server in a refusal |
//!
//! `Fencing-Token` alone is judged by its number (S1). With `Fencing-Lock`, an equal token of another
//! holder is refused (S8), tokens of another lock are (S9), and a storage that the handler passes
//! the fence to orders the holder's own writes (S7). `Fencing-Lock` alone is refused. Each may be sent once; a second one is
//! refused even where it says the same, since what stands between client and server may disagree
//! about which of the two counts.
//!
//! Both values are what a child of `fencelock run` finds in its environment:
//!
//! ```sh
//! curl -H "Fencing-Token: $FENCELOCK_TOKEN" -H "Fencing-Lock: $FENCELOCK_FENCE" -T today.csv "$URL"
//! ```

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::token::FencingToken;

/// `Fencing-Token`.
pub static FENCING_TOKEN: HeaderName = HeaderName::from_static("fencing-token");

/// `Fencing-Lock`.
pub static FENCING_LOCK: HeaderName = HeaderName::from_static("fencing-lock");

/// `Fencing-Watermark`.
pub static FENCING_WATERMARK: HeaderName = HeaderName::from_static("fencing-watermark");

/// The longest value that is looked at, in bytes: no fence is longer.
const VALUE_MAX_BYTES: usize = 512;

/// The longest number, in bytes: `i64::MAX` has 19 digits.
const NUMBER_MAX_BYTES: usize = 19;

/// The fence that a request shows, or `None` where it shows none.
///
/// ```
/// use fencelock::http::{headers::fence_of, http::HeaderMap};
///
/// let mut headers = HeaderMap::new();
/// assert!(fence_of(&headers)?.is_none());
/// headers.insert("fencing-token", "34".parse().unwrap());
/// assert_eq!(fence_of(&headers)?.map(|fence| fence.token().get()), Some(34));
/// headers.insert("fencing-token", "034".parse().unwrap());
/// assert!(fence_of(&headers).is_err());
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where a header is malformed or sent twice, where `Fencing-Lock` comes alone, and where
/// the two show different tokens.
pub fn fence_of(headers: &HeaderMap) -> Result<Option<Fence>> {
    let token = one(headers, &FENCING_TOKEN, NUMBER_MAX_BYTES)?;
    let lock = one(headers, &FENCING_LOCK, VALUE_MAX_BYTES)?;
    let Some(token) = token else {
        return match lock {
            None => Ok(None),
            Some(_) => Err(Error::invalid(
                "header without the one it explains; send fencing-token beside fencing-lock",
            )),
        };
    };
    let token = token.parse::<FencingToken>()?;
    let Some(lock) = lock else {
        return Ok(Some(Fence::from(token)));
    };
    let fence = lock.parse::<Fence>()?;
    if fence.token() != token {
        return Err(Error::invalid(
            "two headers show different tokens; expected the same in fencing-token and fencing-lock",
        )
        .with("fencing_token", token)
        .with("fencing_lock", fence.token()));
    }
    Ok(Some(fence))
}

/// The only value of a header; too long a one is not echoed.
fn one<'h>(headers: &'h HeaderMap, name: &HeaderName, max_bytes: usize) -> Result<Option<&'h str>> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Error::invalid(
            "header sent more than once; expected one fencing-token and at most one fencing-lock",
        )
        .with("header", name));
    }
    if value.len() > max_bytes {
        return Err(Error::invalid("header is too long")
            .with("header", name)
            .with("bytes", value.len())
            .with("limit_bytes", max_bytes));
    }
    match value.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(Error::invalid("header is not plain ASCII").with("header", name)),
    }
}

/// The number in an answer's header; anything but one good number is none.
pub(super) fn number(headers: &HeaderMap, name: &HeaderName) -> Option<FencingToken> {
    one(headers, name, NUMBER_MAX_BYTES).ok()??.parse().ok()
}

/// A token as a value.
pub(super) fn value_of(token: FencingToken) -> HeaderValue {
    HeaderValue::from(token.get())
}
