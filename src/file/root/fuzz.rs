//! What fuzzing asks of a store's identity.

use super::Identity;

pub(crate) fn identity(bytes: &[u8]) {
    let Some(identity) = Identity::parse(bytes) else {
        return;
    };
    assert!(crate::FencingToken::new(identity.floor.max(1)).is_ok());
    let again = serde_json::to_vec(&identity).ok();
    let again = again.and_then(|json| Identity::parse(&json));
    assert_eq!(again, Some(identity));
}
