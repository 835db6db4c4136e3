//! What fuzzing asks of a fence file's content.

use std::path::Path;

use super::{Place, decode, encode};
use crate::name::ResourceName;

pub(crate) fn sidecar(bytes: &[u8]) {
    let state = decode(bytes);
    crate::fuzzing::assert_corrupt(&state);
    let Ok(state) = state else { return };
    let Ok(place) =
        ResourceName::new("today.csv").and_then(|name| Place::new(Path::new("/"), &name))
    else {
        return;
    };
    let again = encode(&state, &place).and_then(|json| decode(&json));
    assert!(matches!(again, Ok(again) if again == state));
    let settled = state.settled(None);
    assert!(settled.pending.is_none());
    // The raise stands, whatever became of the write (S1).
    let token = |state: &super::State| state.watermark.as_ref().map(|w| w.token);
    assert_eq!(token(&settled), token(&state));
}

/// Two resources never share a file, neither their own nor one of ours.
pub(crate) fn places(first: &str, second: &str) {
    let place = |name: &str| Place::new(Path::new("/r"), &ResourceName::new(name).ok()?).ok();
    let (Some(a), Some(b)) = (place(first), place(second)) else {
        return;
    };
    let inside = |path: &Path| {
        path.starts_with("/r") && !path.components().any(|part| part.as_os_str() == "..")
    };
    for path in [&a.data, &a.fence, &b.data, &b.fence, &a.temp(9_999)] {
        assert!(inside(path), "{path:?} leaves the root");
    }
    assert!(a.fence != b.data && a.data != b.fence);
    if first != second {
        assert!(a.data != b.data && a.fence != b.fence);
        assert!(a.temp(0) != b.temp(0) && a.temp(0) != b.data && a.temp(0) != b.fence);
    }
}
