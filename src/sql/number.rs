//! Numbers as SQL keeps them: signed, of 64 bits.

use crate::error::{Error, Result};
use crate::token::FencingToken;

/// A token as a database keeps it; the ceiling of both is `i64::MAX`.
pub(crate) fn signed(token: FencingToken) -> i64 {
    i64::try_from(token.get()).unwrap_or(i64::MAX)
}

/// The token of a stored number.
pub(crate) fn token(number: i64) -> Result<FencingToken> {
    u64::try_from(number)
        .ok()
        .and_then(|number| FencingToken::new(number).ok())
        .ok_or_else(|| Error::corrupt("a stored token is out of range").with("token", number))
}

/// A sequence; one below 0 is damage, and as 0 it would let older writes of the holder pass (S7).
pub(crate) fn sequence(number: i64) -> Result<u64> {
    u64::try_from(number)
        .map_err(|_| Error::corrupt("a stored sequence is out of range").with("seq", number))
}
