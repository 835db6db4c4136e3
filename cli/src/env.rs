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

/// The trace id of `TRACEPARENT`.
pub(crate) fn trace_id() -> Option<String> {
    trace_id_of(&std::env::var(TRACEPARENT).ok()?)
}

/// The trace id of `00-TRACEID-SPANID-FLAGS`; anything else is ignored, as the specification asks. Later
/// versions may have more after the flags.
pub(crate) fn trace_id_of(parent: &str) -> Option<String> {
    let mut fields = parent.split('-');
    let version = hexadecimal(fields.next()?, 2)?;
    let trace = hexadecimal(fields.next()?, 32)?;
    let span = hexadecimal(fields.next()?, 16)?;
    hexadecimal(fields.next()?, 2)?;
    let is_whole = version != "00" || fields.next().is_none();
    let is_some = |id: &str| id.bytes().any(|b| b != b'0');
    (is_whole && version != "ff" && is_some(trace) && is_some(span)).then(|| trace.to_owned())
}

/// A field of that many lowercase digits.
fn hexadecimal(field: &str, digits: usize) -> Option<&str> {
    let plain = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    (field.len() == digits && field.bytes().all(plain)).then_some(field)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_id_is_that_of_a_well_formed_parent() {
        const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
        for good in [
            format!("00-{TRACE}-b7ad6b7169203331-01"),
            format!("cc-{TRACE}-b7ad6b7169203331-01"),
            format!("cc-{TRACE}-b7ad6b7169203331-01-what-the-future-brings"),
        ] {
            assert_eq!(trace_id_of(&good).as_deref(), Some(TRACE), "{good}");
        }
        for bad in [
            String::new(),
            TRACE.to_owned(),
            format!("x-{TRACE}-y"),
            format!("00-{TRACE}"),
            format!("00-{TRACE}-b7ad6b7169203331"),
            format!("00-{TRACE}-b7ad6b7169203331-01-more"),
            format!("ff-{TRACE}-b7ad6b7169203331-01"),
            format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{TRACE}-0000000000000000-01"),
        ] {
            assert_eq!(trace_id_of(&bad), None, "{bad}");
        }
    }
}
