//! Fencing tokens, and the one rule by which a storage admits or refuses one.
//!
//! Tokens are compared here and in the scripts that run inside a store, nowhere else. The scripts
//! follow [`judge`], and the conformance cases hold them to it.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Domain, Fence, HolderTag};

/// How far above the watermark a token may jump when it is not a clock reading (S11).
pub const JUMP_MAX: u64 = 1 << 32;

/// How far above the present time a clock token may lie, in microseconds (S11): one day.
pub const CLOCK_JUMP_MAX_US: u64 = 86_400_000_000;

/// A number that is larger for each grant of a lock name (L1, L2).
///
/// From 1 to `i64::MAX`, so that every engine can hold it. It orders honest clients; it is not a
/// secret and not an authority.
///
/// ```
/// use fencelock::FencingToken;
/// let token: FencingToken = "33".parse()?;
/// assert_eq!(token.get(), 33);
/// assert!("0".parse::<FencingToken>().is_err());
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// The smallest token.
    pub const MIN: Self = Self(NonZeroU64::MIN);

    /// The ceiling, `i64::MAX` (L9).
    pub const MAX: Self = match NonZeroU64::new(i64::MAX.cast_unsigned()) {
        Some(max) => Self(max),
        None => Self::MIN,
    };

    /// Validates `number`.
    ///
    /// # Errors
    /// `Invalid` where it is 0 or above [`FencingToken::MAX`].
    pub fn new(number: u64) -> Result<Self> {
        match NonZeroU64::new(number) {
            Some(n) if n <= Self::MAX.0 => Ok(Self(n)),
            _ => Err(Error::invalid(format!(
                "fencing token is out of range; expected 1 to {}",
                Self::MAX
            ))
            .with("token", number)),
        }
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The next token of a counter.
    ///
    /// # Errors
    /// `Exhausted` at [`FencingToken::MAX`] (L9): a token never wraps.
    pub fn next(self) -> Result<Self> {
        Self::after(Some(self))
    }

    /// The token that follows `last`, or the first one.
    ///
    /// # Errors
    /// `Exhausted` at [`FencingToken::MAX`] (L9).
    pub fn after(last: Option<Self>) -> Result<Self> {
        let Some(last) = last else {
            return Ok(Self::MIN);
        };
        Self::new(last.get() + 1).map_err(|_| {
            Error::new(
                ErrorKind::Exhausted,
                "the fencing tokens of this name are used up",
            )
            .with("last", last)
        })
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FencingToken({})", self.0)
    }
}

impl TryFrom<u64> for FencingToken {
    type Error = Error;
    fn try_from(number: u64) -> Result<Self> {
        Self::new(number)
    }
}

impl FromStr for FencingToken {
    type Err = Error;

    /// Decimal digits only: no sign, no blanks, no leading zero.
    fn from_str(s: &str) -> Result<Self> {
        let plain = !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()) && !s.starts_with('0');
        let number = plain.then(|| s.parse::<u64>().ok()).flatten();
        number.and_then(|n| Self::new(n).ok()).ok_or_else(|| {
            Error::invalid(format!(
                "not a fencing token; expected a whole number from 1 to {}",
                Self::MAX
            ))
            .with("token", format_args!("{s:?}"))
        })
    }
}

/// What a resource remembers of the fences that it admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watermark {
    /// The highest token that was accepted or raised to.
    pub token: FencingToken,
    /// Who showed that token (S8); `None` where only a bare number was shown.
    pub holder: Option<HolderTag>,
    /// The sequence of the last write that was applied under this token (S7); 0 for none.
    pub seq: u64,
    /// The lock whose tokens this resource accepts (S9); `None` until a fence names one.
    pub domain: Option<Domain>,
}

/// What the caller wants to do at a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Replace or delete the value.
    Write,
    /// Move the watermark up and read, without writing.
    Raise,
    /// Bind the resource to the fence's lock, with a larger token than any before.
    Rebind,
}

/// What the rule answers where it does not refuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Go on, and store this watermark in the same atomic step.
    Apply(Watermark),
    /// This very write was applied already: acknowledge it, change nothing (S7).
    Repeat(Watermark),
}

/// The one rule: may `fence` act on a resource that remembers `current`?
///
/// `now_us` is the present time in microseconds since the Unix epoch, for the bound on jumps.
///
/// | the fence's token is | and | answer |
/// |---|---|---|
/// | above both `watermark + 2^32` and now + one day | | refused as out of bounds (S11) |
/// | of no domain | a rebind | `Invalid`: it would unbind the resource (S9) |
/// | of another domain than the resource's | not a rebind | `DomainMismatch` (S9) |
/// | smaller than the watermark | | `Fenced` (S1) |
/// | equal | a rebind to another domain | `Fenced`: a rebind raises |
/// | equal | of another holder | `Fenced` (S8) |
/// | equal | a write whose sequence is the last one applied | repeat (S7) |
/// | equal | a write whose sequence is smaller | `Fenced` (S7) |
/// | equal | otherwise | apply |
/// | larger | | apply |
///
/// A bare number has no holder, no sequence and no domain: it passes where its number passes.
///
/// # Errors
/// As in the table; a jump out of bounds is `Invalid`.
pub fn judge(
    current: Option<&Watermark>,
    fence: &Fence,
    intent: Intent,
    now_us: u64,
) -> Result<Admission> {
    let token = fence.token();
    if intent == Intent::Rebind && fence.domain().is_none() {
        return Err(
            Error::invalid("a rebind needs the whole fence of a lock, not only its token")
                .with("token", token),
        );
    }
    check_jump(current.map(|w| w.token), token, now_us)?;
    let Some(current) = current else {
        return Ok(Admission::Apply(Watermark {
            token,
            holder: fence.holder(),
            seq: applied_seq(fence, intent, 0),
            domain: fence.domain().cloned(),
        }));
    };
    let same_domain = match (&current.domain, fence.domain()) {
        (Some(bound), Some(shown)) => bound == shown,
        _ => true,
    };
    if !same_domain && intent != Intent::Rebind {
        return Err(domain_mismatch(current, fence));
    }
    if token < current.token {
        return Err(refuse(current, fence, "stale fencing token refused"));
    }
    if token > current.token {
        let domain = match intent {
            Intent::Rebind => fence.domain().cloned(),
            Intent::Write | Intent::Raise => {
                current.domain.clone().or_else(|| fence.domain().cloned())
            }
        };
        return Ok(Admission::Apply(Watermark {
            token,
            holder: fence.holder(),
            seq: applied_seq(fence, intent, 0),
            domain,
        }));
    }
    if !same_domain {
        return Err(refuse(
            current,
            fence,
            "a rebind needs a larger token than the watermark",
        ));
    }
    if let (Some(bound), Some(shown)) = (current.holder, fence.holder())
        && bound != shown
    {
        return Err(refuse(
            current,
            fence,
            "an equal fencing token of another holder refused",
        ));
    }
    let next = Watermark {
        token,
        holder: current.holder.or(fence.holder()),
        seq: applied_seq(fence, intent, current.seq),
        domain: current.domain.clone().or_else(|| fence.domain().cloned()),
    };
    match (intent, fence.seq()) {
        (Intent::Write, Some(seq)) if seq == current.seq => Ok(Admission::Repeat(next)),
        (Intent::Write, Some(seq)) if seq < current.seq => Err(refuse(
            current,
            fence,
            "a write that the same holder has already superseded refused",
        )
        .with("seq", seq)
        .with("applied_seq", current.seq)),
        _ => Ok(Admission::Apply(next)),
    }
}

/// The bound on jumps (S11): refuses a token above both `last + 2^32` and the present time plus
/// one day, so that a first counted token and a first clock token both pass and one bad number
/// cannot make all later ones stale.
///
/// # Errors
/// `Invalid` where the token is out of bounds.
pub fn check_jump(last: Option<FencingToken>, token: FencingToken, now_us: u64) -> Result<()> {
    let by_count = last.map_or(0, FencingToken::get).saturating_add(JUMP_MAX);
    let by_clock = now_us.saturating_add(CLOCK_JUMP_MAX_US);
    let limit = by_count.max(by_clock);
    if token.get() <= limit {
        return Ok(());
    }
    let error = Error::invalid("fencing token is implausibly far ahead and was refused")
        .with("token", token)
        .with("limit", limit);
    Err(match last {
        Some(last) => error.with("watermark", last),
        None => error.with("watermark", "none"),
    })
}

fn applied_seq(fence: &Fence, intent: Intent, before: u64) -> u64 {
    match (intent, fence.seq()) {
        (Intent::Write, Some(seq)) => seq,
        _ => before,
    }
}

fn refuse(current: &Watermark, fence: &Fence, message: &str) -> Error {
    Error::fenced(fence.token(), current.token, message)
        .with("token", fence.token())
        .with("watermark", current.token)
}

/// The refusal of a fence whose lock is not the one that the resource is bound to (S9).
#[must_use]
pub fn domain_mismatch(current: &Watermark, fence: &Fence) -> Error {
    let show = |domain: Option<&Domain>| domain.map_or("none".to_owned(), Domain::to_string);
    Error::new(
        ErrorKind::DomainMismatch,
        "the resource is bound to another lock; use that lock, or rebind the resource",
    )
    .with("bound_to", show(current.domain.as_ref()))
    .with("shown", show(fence.domain()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_US: u64 = 1_796_000_000_000_000;

    fn domain(name: &str) -> Domain {
        Domain::new("memory", "r", &name.parse().unwrap())
    }

    fn fence(token: u64, holder: u8, seq: Option<u64>) -> Fence {
        let token = FencingToken::new(token).unwrap();
        let fence = Fence::new(token, HolderTag::from_bytes([holder; 16]), domain("a"));
        match seq {
            Some(seq) => fence.with_seq(seq),
            None => fence,
        }
    }

    fn bare(token: u64) -> Fence {
        Fence::from(FencingToken::new(token).unwrap())
    }

    fn apply(current: Option<&Watermark>, fence: &Fence, intent: Intent) -> Watermark {
        match judge(current, fence, intent, NOW_US).unwrap() {
            Admission::Apply(next) => next,
            Admission::Repeat(_) => panic!("expected a first application"),
        }
    }

    fn kind(current: &Watermark, fence: &Fence, intent: Intent) -> ErrorKind {
        judge(Some(current), fence, intent, NOW_US)
            .unwrap_err()
            .kind()
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in [
            "",
            "0",
            "-1",
            "+1",
            "1.5",
            " 1",
            "01",
            "9223372036854775808",
            "x",
        ] {
            assert!(bad.parse::<FencingToken>().is_err(), "{bad:?}");
        }
        assert_eq!(
            "9223372036854775807".parse::<FencingToken>().unwrap(),
            FencingToken::MAX
        );
        assert_eq!(
            FencingToken::MAX.next().unwrap_err().kind(),
            ErrorKind::Exhausted
        );
    }

    #[test]
    fn a_stale_token_is_refused_with_both_numbers() {
        let wm = apply(None, &fence(34, 1, None), Intent::Write);
        let error = judge(Some(&wm), &fence(33, 2, None), Intent::Write, NOW_US).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert_eq!(error.token().unwrap().get(), 33);
        assert_eq!(error.watermark().unwrap().get(), 34);
        assert_eq!(
            error.to_string(),
            "stale fencing token refused token=33 watermark=34"
        );
    }

    #[test]
    fn an_equal_token_is_for_its_holder_only() {
        let wm = apply(None, &fence(34, 1, None), Intent::Raise);
        assert_eq!(
            kind(&wm, &fence(34, 2, None), Intent::Write),
            ErrorKind::Fenced
        );
        assert_eq!(
            kind(&wm, &fence(34, 2, None), Intent::Raise),
            ErrorKind::Fenced
        );
        apply(Some(&wm), &fence(34, 1, None), Intent::Write);
        let after_bare = apply(Some(&wm), &bare(34), Intent::Write);
        assert_eq!(after_bare.holder, wm.holder);
    }

    #[test]
    fn own_writes_are_ordered_and_repeats_acknowledged() {
        let wm = apply(None, &fence(34, 1, Some(2)), Intent::Write);
        let again = judge(Some(&wm), &fence(34, 1, Some(2)), Intent::Write, NOW_US).unwrap();
        assert_eq!(again, Admission::Repeat(wm.clone()));
        assert_eq!(
            kind(&wm, &fence(34, 1, Some(1)), Intent::Write),
            ErrorKind::Fenced
        );
        let later = apply(Some(&wm), &fence(34, 1, Some(3)), Intent::Write);
        assert_eq!(later.seq, 3);
    }

    #[test]
    fn a_raise_does_not_count_as_a_write() {
        let wm = apply(None, &fence(34, 1, Some(1)), Intent::Raise);
        assert_eq!(wm.seq, 0);
        let wm = apply(Some(&wm), &fence(34, 1, Some(1)), Intent::Write);
        let wm = apply(Some(&wm), &fence(34, 1, Some(2)), Intent::Raise);
        assert_eq!(wm.seq, 1);
    }

    #[test]
    fn another_lock_is_refused_until_a_rebind_that_raises() {
        let wm = apply(None, &fence(34, 1, None), Intent::Write);
        let other = |token| {
            Fence::new(
                FencingToken::new(token).unwrap(),
                HolderTag::from_bytes([9; 16]),
                domain("b"),
            )
        };
        assert_eq!(
            kind(&wm, &other(99), Intent::Write),
            ErrorKind::DomainMismatch
        );
        assert_eq!(kind(&wm, &other(34), Intent::Rebind), ErrorKind::Fenced);
        let moved = apply(Some(&wm), &other(35), Intent::Rebind);
        assert_eq!(moved.domain, Some(domain("b")));
        assert_eq!(
            kind(&moved, &fence(36, 1, None), Intent::Write),
            ErrorKind::DomainMismatch
        );
    }

    #[test]
    fn a_bare_number_rebinds_nothing() {
        let wm = apply(None, &fence(34, 1, None), Intent::Write);
        assert_eq!(kind(&wm, &bare(99), Intent::Rebind), ErrorKind::Invalid);
    }

    #[test]
    fn one_bad_number_cannot_brick_a_resource() {
        let wm = apply(None, &bare(1), Intent::Write);
        assert_eq!(kind(&wm, &bare(1 << 62), Intent::Write), ErrorKind::Invalid);
        apply(Some(&wm), &bare(NOW_US), Intent::Write);
        apply(Some(&wm), &bare(1 << 32), Intent::Write);
    }
}
