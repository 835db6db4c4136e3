//! Durations as flags: `30s`, `1h 30m`, `100ms`.

use std::time::Duration;

use fencelock::Ttl;

/// The longest duration of any flag; more is a slip.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A duration with its unit.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    if text.trim_start().starts_with('-') {
        return Err(format!(
            "{text:?} is not a duration (below zero); expected one such as 30s"
        ));
    }
    let duration = humantime::parse_duration(text.trim()).map_err(|error| {
        format!("{text:?} is not a duration ({error}); expected a number with a unit, such as 30s, 100ms or \"1h 30m\"")
    })?;
    if duration > LONGEST {
        return Err(format!("{text:?} is too long; expected at most 100 years"));
    }
    Ok(duration)
}

/// A duration that is not zero.
pub(crate) fn parse_positive(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        Duration::ZERO => Err(format!("{text:?} is zero; expected a duration such as 30s")),
        duration => Ok(duration),
    }
}

/// A TTL: a duration from 100 ms to 365 days, or `none`.
pub(crate) fn parse_ttl(text: &str) -> Result<Ttl, String> {
    const EXPECTED: &str = "expected 100ms to 365days, such as 30s or \"1h 30m\", or none";
    if text == "none" {
        return Ok(Ttl::NONE);
    }
    let duration = humantime::parse_duration(text.trim())
        .map_err(|error| format!("{text:?} is not a TTL ({error}); {EXPECTED}"))?;
    Ttl::new(duration).map_err(|_| format!("{text:?} is out of range; {EXPECTED}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_add_up() {
        assert_eq!(parse("1h 30m"), Ok(Duration::from_secs(5_400)));
        assert_eq!(parse("100ms"), Ok(Duration::from_millis(100)));
    }

    #[test]
    fn a_ttl_is_bounded_and_the_message_names_the_value() {
        for bad in [
            "0",
            "0s",
            "-5s",
            "99ms",
            "366days",
            "9e18s",
            "99999999999999999999s",
            "abc",
            "",
            "5",
        ] {
            let message = parse_ttl(bad).unwrap_err();
            assert!(message.contains(&format!("{bad:?}")), "{message}");
            assert!(message.contains("100ms to 365days"), "{message}");
        }
        assert_eq!(parse_ttl("none"), Ok(Ttl::NONE));
    }
}
