//! The environment variables that `fencelock` reads and sets.

use fencelock::{Fence, FencingToken};

use crate::failure::{Failure, Result};

/// The store's URL, instead of `--store`; set for the command of `run`.
pub(crate) const STORE: &str = "FENCELOCK_STORE";
/// The lock's name; set for the command of `run`.
pub(crate) const NAME: &str = "FENCELOCK_NAME";
/// The token as a number; set for the command of `run`.
pub(crate) const TOKEN: &str = "FENCELOCK_TOKEN";
/// The fence in its text form, without a sequence; set for the command of `run`.
pub(crate) const FENCE: &str = "FENCELOCK_FENCE";
/// The holder's secret, for `renew` and `release`: arguments are visible in ps(1), this is not.
pub(crate) const HOLDER: &str = "FENCELOCK_HOLDER";
/// The trace that the work belongs to, as W3C Trace Context names it.
const TRACEPARENT: &str = "TRACEPARENT";

/// A variable that is set and not empty.
pub(crate) fn text(variable: &str) -> Result<Option<String>> {
    match std::env::var(variable) {
        Ok(value) => Ok((!value.is_empty()).then_some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(Failure::usage(format!("{variable} is not UTF-8")))
        }
    }
}

/// The fence of the surrounding `fencelock run`.
pub(crate) fn fence() -> Result<Option<Fence>> {
    parsed(FENCE)
}

/// The token of the surrounding `fencelock run`.
pub(crate) fn token() -> Result<Option<FencingToken>> {
    parsed(TOKEN)
}

fn parsed<T: std::str::FromStr<Err = fencelock::Error>>(variable: &str) -> Result<Option<T>> {
    text(variable)?
        .map(|value| {
            value
                .parse()
                .map_err(|error| Failure::from(error).within(variable))
        })
        .transpose()
}

/// The trace id of `TRACEPARENT` (`00-TRACEID-SPANID-FLAGS`); anything else is ignored, as the
/// specification asks.
pub(crate) fn trace_id() -> Option<String> {
    let parent = std::env::var(TRACEPARENT).ok()?;
    let id = parent.split('-').nth(1)?;
    let well_formed = id.len() == 32
        && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        && id.bytes().any(|b| b != b'0');
    well_formed.then(|| id.to_owned())
}
