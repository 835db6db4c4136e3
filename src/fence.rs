//! What a storage checks ([`Fence`]), what a storage implements ([`FencedStore`]), and what users
//! hold ([`Fenced`]).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
pub use crate::fenced::{Fenced, FencedStore, Snapshot, Written};
use crate::lease::HolderId;
use crate::name::{LockName, hex_value, push_hex};
use crate::token::FencingToken;

/// The longest text form of a fence, in bytes.
const FENCE_TEXT_MAX_BYTES: usize = 512;

/// A public, one-way mark of a holder: the first 128 bits of the SHA-256 of its secret
/// [`HolderId`]. It binds writes to one holder (S8) and gives no right to renew or release.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HolderTag([u8; 16]);

impl HolderTag {
    /// The tag of a holder.
    #[must_use]
    pub fn of(holder: &HolderId) -> Self {
        let mut tag = [0; 16];
        for (to, from) in tag.iter_mut().zip(Sha256::digest(holder.as_bytes())) {
            *to = from;
        }
        Self(tag)
    }

    /// A tag from its bytes, as a storage kept them.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for HolderTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for HolderTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HolderTag({self})")
    }
}

impl FromStr for HolderTag {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        unhex(s)
            .map(Self)
            .ok_or_else(|| Error::invalid("not a holder tag; expected 32 hexadecimal digits"))
    }
}

/// The lock whose tokens may be compared with each other: engine kind, realm, and name (S9).
///
/// The realm is the identity of the store's data: another server, or the same one with its data
/// lost, is another realm. Displayed as `kind/realm/encoded-name`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Domain(Arc<str>);

impl Domain {
    /// The domain of the lock `name` in the store `kind`, `realm`.
    ///
    /// `kind` and `realm` are given by the backend: lowercase letters, digits, `-`, `_`, `=`.
    #[must_use]
    pub fn new(kind: &str, realm: &str, name: &LockName) -> Self {
        Self(format!("{kind}/{realm}/{}", name.encoded()).into())
    }

    /// The text form.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({self})")
    }
}

impl FromStr for Domain {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let plain = |part: &str| {
            !part.is_empty()
                && part
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'='))
        };
        let parts: Vec<&str> = s.split('/').collect();
        if s.len() > FENCE_TEXT_MAX_BYTES || parts.len() != 3 || !parts.iter().all(|p| plain(p)) {
            return Err(Error::invalid(
                "not a lock domain; expected kind/realm/encoded-name",
            ));
        }
        Ok(Self(s.into()))
    }
}

/// What a storage checks: the token, and where they are known the holder's tag, the lock's domain
/// and the sequence of the write.
///
/// One fence stands for one operation. [`LockGuard::fence`](crate::LockGuard::fence) gives each a
/// sequence of its own, so a clone of a fence means *the same write again*: a retry of it is
/// acknowledged, not applied twice (S7).
///
/// The text form, `v1:TOKEN:HOLDER:DOMAIN` or `v1:TOKEN:HOLDER:DOMAIN:SEQ` (with `-` for an unknown
/// holder or domain), travels in environment variables and headers:
///
/// ```
/// use fencelock::Fence;
/// let fence: Fence = "v1:34:8c1f0000000000000000000000000000:file/r/payment-export".parse()?;
/// assert_eq!(fence.token().get(), 34);
/// assert_eq!(fence.to_string().parse::<Fence>()?, fence);
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    token: FencingToken,
    holder: Option<HolderTag>,
    domain: Option<Domain>,
    seq: Option<u64>,
}

impl Fence {
    /// A fence of a known holder and lock, without a sequence.
    #[must_use]
    pub fn new(token: FencingToken, holder: HolderTag, domain: Domain) -> Self {
        Self {
            token,
            holder: Some(holder),
            domain: Some(domain),
            seq: None,
        }
    }

    /// The same with the sequence of one write; later writes of a holder have larger ones. 0 means
    /// none.
    #[must_use]
    pub fn with_seq(mut self, seq: u64) -> Self {
        self.seq = (seq > 0).then_some(seq);
        self
    }

    /// The same without a sequence: writes under it are ordered only by their arrival.
    #[must_use]
    pub fn without_seq(mut self) -> Self {
        self.seq = None;
        self
    }

    /// The token.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The holder's tag.
    #[must_use]
    pub fn holder(&self) -> Option<HolderTag> {
        self.holder
    }

    /// The lock that minted the token.
    #[must_use]
    pub fn domain(&self) -> Option<&Domain> {
        self.domain.as_ref()
    }

    /// The sequence of the write.
    #[must_use]
    pub fn seq(&self) -> Option<u64> {
        self.seq
    }
}

/// A bare number: no holder, no lock, no sequence.
impl From<FencingToken> for Fence {
    fn from(token: FencingToken) -> Self {
        Self {
            token,
            holder: None,
            domain: None,
            seq: None,
        }
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v1:{}:", self.token)?;
        match &self.holder {
            Some(holder) => write!(f, "{holder}:")?,
            None => f.write_str("-:")?,
        }
        match &self.domain {
            Some(domain) => write!(f, "{domain}")?,
            None => f.write_str("-")?,
        }
        match self.seq {
            Some(seq) => write!(f, ":{seq}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Fence {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let malformed = || {
            Error::invalid(
                "not a fence; expected v1:TOKEN:HOLDER:DOMAIN or v1:TOKEN:HOLDER:DOMAIN:SEQ",
            )
        };
        if s.len() > FENCE_TEXT_MAX_BYTES {
            return Err(malformed());
        }
        let parts: Vec<&str> = s.split(':').collect();
        let (token, holder, domain, seq) = match parts.as_slice() {
            ["v1", token, holder, domain] => (token, holder, domain, None),
            ["v1", token, holder, domain, seq] => (token, holder, domain, Some(seq)),
            _ => return Err(malformed()),
        };
        let known = |part: &str| part != "-";
        let seq = match seq {
            None => None,
            // A sequence is positive and spelled like a token.
            Some(seq) => Some(seq.parse::<FencingToken>().map_err(|_| malformed())?.get()),
        };
        let fence = Self {
            token: token.parse()?,
            holder: known(holder).then(|| holder.parse()).transpose()?,
            domain: known(domain).then(|| domain.parse()).transpose()?,
            seq,
        };
        if fence.seq.is_some() && fence.holder.is_none() {
            // Without a holder, two writers could share a sequence.
            return Err(malformed());
        }
        Ok(fence)
    }
}

/// Whoever can show a fence: `&LockGuard`, a [`Fence`], or a bare [`FencingToken`].
pub trait Fencing {
    /// The fence of one operation.
    ///
    /// # Errors
    /// `Lost` where a guard knows that it no longer holds its lock.
    fn to_fence(&self) -> Result<Fence>;

    /// Hears that the fence was refused by a higher watermark. A guard whose lease is good makes
    /// its lock's next token larger (L10); others do nothing.
    fn refused(&self, watermark: FencingToken);
}

impl Fencing for Fence {
    fn to_fence(&self) -> Result<Fence> {
        Ok(self.clone())
    }
    fn refused(&self, _: FencingToken) {}
}

impl Fencing for FencingToken {
    fn to_fence(&self) -> Result<Fence> {
        Ok(Fence::from(*self))
    }
    fn refused(&self, _: FencingToken) {}
}

impl Fencing for &Fence {
    fn to_fence(&self) -> Result<Fence> {
        Ok((*self).clone())
    }
    fn refused(&self, _: FencingToken) {}
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        push_hex(&mut text, *byte);
    }
    text
}

pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != N * 2 {
        return None;
    }
    let mut digits = text.bytes();
    let mut bytes = [0; N];
    for byte in &mut bytes {
        *byte = hex_value(digits.next()?)? << 4 | hex_value(digits.next()?)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_fence_round_trips_as_text() {
        let name: LockName = "Größe/π".parse().unwrap();
        let holder = HolderTag::from_bytes([0xab; 16]);
        let token = FencingToken::new(34).unwrap();
        let full = Fence::new(token, holder, Domain::new("file", "r0", &name));
        for fence in [
            full.clone(),
            full.with_seq(7),
            Fence::from(FencingToken::MAX),
        ] {
            assert_eq!(fence.to_string().parse::<Fence>().unwrap(), fence);
        }
    }

    #[test]
    fn malformed_fences_are_refused() {
        for bad in [
            "",
            "34",
            "v1:34",
            "v2:34:-:-",
            "v1:0:-:-",
            "v1:34:-:-:1",
            "v1:34:zz:-",
            "v1:34:-:a/b",
            "v1:34:-:a/b/C",
            "v1:34:00000000000000000000000000000000:a/b/c:0",
            "v1:34:00000000000000000000000000000000:a/b/c:1:2",
        ] {
            assert!(bad.parse::<Fence>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_tag_does_not_show_the_holder() {
        let holder = HolderId::random();
        assert_ne!(HolderTag::of(&holder).as_bytes(), holder.as_bytes());
    }

    proptest! {
        #[test]
        fn any_text_parses_or_is_refused(text in any::<String>()) {
            if let Ok(fence) = text.parse::<Fence>() {
                prop_assert_eq!(fence.to_string(), text);
            }
        }
    }
}
