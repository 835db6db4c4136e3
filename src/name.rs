//! Names of locks and of resources: validated once, and one injective encoding for all engines.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// The longest name, in bytes.
pub const NAME_MAX_BYTES: usize = 512;

/// An encoded name is at most this long, in bytes; a longer one is hashed.
pub const ENCODED_MAX_BYTES: usize = 120;

/// How much of a long name stays readable before its hash, in encoded bytes.
const READABLE_PREFIX_BYTES: usize = 40;

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Validates `name`.
            ///
            /// # Errors
            /// `Invalid` where it is empty or longer than [`NAME_MAX_BYTES`].
            pub fn new(name: &str) -> Result<Self> {
                validate(name, $what)?;
                Ok(Self(name.into()))
            }

            /// The exact name.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The name as a key: see [`encode`].
            #[must_use]
            pub fn encoded(&self) -> String {
                encode(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(s: &str) -> Result<Self> {
                Self::new(s)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = Error;
            fn try_from(s: &str) -> Result<Self> {
                Self::new(s)
            }
        }

        impl TryFrom<&String> for $name {
            type Error = Error;
            fn try_from(s: &String) -> Result<Self> {
                Self::new(s)
            }
        }

        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(s: String) -> Result<Self> {
                Self::new(&s)
            }
        }

        impl TryFrom<&Self> for $name {
            type Error = Error;
            fn try_from(s: &Self) -> Result<Self> {
                Ok(s.clone())
            }
        }
    };
}

name_type!(
    /// The name of a lock: exact UTF-8 bytes, 1 to 512, the same on every engine. Nothing is
    /// folded, normalised or trimmed: `a`, `A`, `a/b` and `../a` are four locks.
    ///
    /// ```
    /// use fencelock::LockName;
    /// assert_eq!(LockName::new("../a")?.as_str(), "../a");
    /// assert!(LockName::new("").is_err());
    /// # Ok::<(), fencelock::Error>(())
    /// ```
    LockName,
    "lock name"
);

name_type!(
    /// The name of a fenced resource within its storage: exact UTF-8 bytes, 1 to 512. What a
    /// storage makes of it (a path below its root, an object key, a row) is its own matter, and it
    /// may refuse names that it cannot hold.
    ResourceName,
    "resource name"
);

fn validate(name: &str, what: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid(format!(
            "{what} is empty; expected 1 to {NAME_MAX_BYTES} bytes"
        )));
    }
    if name.len() > NAME_MAX_BYTES {
        return Err(Error::invalid(format!(
            "{what} is too long; expected 1 to {NAME_MAX_BYTES} bytes"
        ))
        .with("bytes", name.len()));
    }
    Ok(())
}

/// Maps a name injectively to a key that every engine accepts as it is: lowercase letters, digits,
/// `_` and `-` stand for themselves, every other byte is `=` and two lowercase hexadecimal digits.
///
/// No two names share a key even on a file system that folds case or normalises Unicode, the key
/// holds no separator of any engine, and it never begins with a dot. A key longer than
/// [`ENCODED_MAX_BYTES`] becomes its readable beginning, `==`, and the SHA-256 of the raw name;
/// `==` cannot occur in a short key. Backends store the raw name beside such a key.
///
/// ```
/// use fencelock::name::encode;
/// assert_eq!(encode("payment-export"), "payment-export");
/// assert_eq!(encode("A/b"), "=41=2fb");
/// assert_eq!(encode(&"x".repeat(512)).len(), 40 + 2 + 64);
/// ```
#[must_use]
pub fn encode(name: &str) -> String {
    let mut key = String::with_capacity(name.len() + 16);
    let mut readable_end = 0;
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => key.push(char::from(byte)),
            other => {
                key.push('=');
                push_hex(&mut key, other);
            }
        }
        if key.len() <= READABLE_PREFIX_BYTES {
            readable_end = key.len();
        }
    }
    if key.len() > ENCODED_MAX_BYTES {
        key.truncate(readable_end);
        key.push_str("==");
        for byte in Sha256::digest(name.as_bytes()) {
            push_hex(&mut key, byte);
        }
    }
    key
}

/// The name that a key stands for, or `None` where the key is hashed or is not one of ours.
#[must_use]
pub fn decode(key: &str) -> Option<String> {
    let mut name = Vec::with_capacity(key.len());
    let mut bytes = key.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => name.push(byte),
            b'=' => {
                let high = hex_value(bytes.next()?)?;
                let low = hex_value(bytes.next()?)?;
                name.push(high << 4 | low);
            }
            _ => return None,
        }
    }
    let name = String::from_utf8(name).ok()?;
    // A key has one spelling: `=61` is not how `a` is written.
    (encode(&name) == key).then_some(name)
}

pub(crate) fn push_hex(out: &mut String, byte: u8) {
    const DIGITS: [char; 16] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f',
    ];
    for nibble in [byte >> 4, byte & 15] {
        if let Some(digit) = DIGITS.get(usize::from(nibble)) {
            out.push(*digit);
        }
    }
}

pub(crate) fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_are_bytes() {
        assert!(LockName::new(&"é".repeat(256)).is_ok());
        assert!(LockName::new(&"é".repeat(257)).is_err());
        assert!(LockName::new("").is_err());
    }

    #[test]
    fn a_long_name_cannot_be_spelled_by_a_short_one() {
        let long = encode(&"x".repeat(300));
        assert_ne!(encode(&long), long);
        assert_eq!(decode(&long), None);
    }

    proptest! {
        #[test]
        fn short_names_round_trip(name in "\\PC{1,30}") {
            let key = encode(&name);
            prop_assume!(!key.contains("=="));
            prop_assert_eq!(decode(&key), Some(name));
        }

        #[test]
        fn keys_are_plain_and_bounded(name in any::<String>()) {
            let key = encode(&name);
            prop_assert!(key.len() <= ENCODED_MAX_BYTES);
            prop_assert!(key.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'=')));
        }

        #[test]
        fn different_names_have_different_keys(a in any::<String>(), b in any::<String>()) {
            prop_assume!(a != b);
            prop_assert_ne!(encode(&a), encode(&b));
        }
    }
}
