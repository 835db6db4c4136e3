//! Tokens, fences and durations as text.

use std::fmt::Display;
use std::str::FromStr;

use crate::fence::{Domain, Fence, HolderTag};
use crate::lease::HolderId;
use crate::open::{parse_duration, parse_ttl};
use crate::token::FencingToken;

/// What has a text form has only one: `034` is no token, or two writers could mean the same by
/// different bytes.
fn one_spelling<T: FromStr + Display>(text: &str) {
    if let Ok(parsed) = text.parse::<T>() {
        assert_eq!(parsed.to_string(), text);
    }
}

pub(super) fn token(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    one_spelling::<FencingToken>(text);
    if let Ok(token) = text.parse::<FencingToken>() {
        assert!((1..=FencingToken::MAX.get()).contains(&token.get()));
        // The next one is larger, or there is none (L9).
        assert!(
            token
                .next()
                .map_or(token == FencingToken::MAX, |n| n > token)
        );
    }
}

pub(super) fn fence(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    one_spelling::<Fence>(text);
    one_spelling::<Domain>(text);
    one_spelling::<HolderTag>(text);
    if let Ok(holder) = text.parse::<HolderId>() {
        assert_eq!(holder.reveal(), text);
    }
    if let Ok(fence) = text.parse::<Fence>() {
        assert!(text.len() <= 512, "no environment or header is that long");
        assert!(fence.seq().is_none() || fence.holder().is_some());
    }
}

pub(super) fn duration(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Some(duration) = parse_duration(text) {
        let again = parse_duration(&format!("{}ms", duration.as_millis()));
        assert_eq!(again, Some(duration));
    }
    if let Ok(ttl) = parse_ttl(text)
        && let Some(duration) = ttl.duration()
    {
        assert!((crate::Ttl::MIN..=crate::Ttl::MAX).contains(&duration));
    }
}
