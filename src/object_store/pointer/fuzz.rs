//! What fuzzing asks of a pointer, and of a data object's name.

use bytes::Bytes;

use super::{DataName, Pointer};

const KEY: &str = "exports/today.csv";

pub(crate) fn pointer(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(name) = DataName::parse(text)
    {
        assert_eq!(name.as_str(), text);
        assert!(name.token().is_some());
    }
    let body = Bytes::copy_from_slice(bytes);
    let pointer = Pointer::decode(&body, KEY);
    crate::fuzzing::assert_corrupt(&pointer);
    let Ok(pointer) = pointer else { return };
    assert!(Pointer::decode(&body, "another").is_err());
    let again = pointer
        .encode()
        .and_then(|body| Pointer::decode(&body, KEY));
    assert!(matches!(again, Ok(again) if again == pointer));
    assert!(pointer.next_trail().len() <= super::TRAIL_MAX);
    let _ = pointer.follows(&pointer);
}
