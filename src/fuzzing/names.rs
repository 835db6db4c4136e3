//! Names, and the keys that the engines make of them.

use crate::name::{self, LockName, ResourceName};

/// Two names, of which the second may be a key of the first's kind: one line each.
pub(super) fn names(bytes: &[u8]) {
    let (first, second) = super::split_line(bytes);
    let (Ok(first), Ok(second)) = (std::str::from_utf8(first), std::str::from_utf8(second)) else {
        return;
    };
    for text in [first, second] {
        decoded_has_one_key(text);
        let (lock, resource) = (LockName::new(text), ResourceName::new(text));
        assert_eq!(
            lock.is_ok(),
            (1..=name::NAME_MAX_BYTES).contains(&text.len())
        );
        assert_eq!(lock.is_ok(), resource.is_ok());
        if let Ok(lock) = lock {
            assert_eq!(lock.as_str(), text, "names are exact");
            key_is_plain(&lock);
        }
    }
    if let (Ok(first), Ok(second)) = (LockName::new(first), LockName::new(second)) {
        assert_eq!(first == second, first.encoded() == second.encoded());
        #[cfg(feature = "file")]
        crate::file::fuzz_places(first.as_str(), second.as_str());
    }
}

fn decoded_has_one_key(key: &str) {
    if let Some(name) = name::decode(key) {
        assert_eq!(name::encode(&name), key);
    }
}

/// No separator of any engine, nothing that a file system folds, and of bounded length.
fn key_is_plain(lock: &LockName) {
    let key = lock.encoded();
    assert!(key.len() <= name::ENCODED_MAX_BYTES);
    assert!(
        key.bytes()
            .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'=')),
        "{key}"
    );
    match name::decode(&key) {
        Some(name) => assert_eq!(name, lock.as_str()),
        None => assert!(key.contains("=="), "only a hashed key hides its name"),
    }
}
