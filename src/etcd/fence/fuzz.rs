//! What fuzzing asks of a stored watermark.

use super::{Seen, Stored, read};
use crate::name::ResourceName;

pub(crate) fn watermark(bytes: &[u8]) {
    let Ok(resource) = ResourceName::new("today.csv") else {
        return;
    };
    let seen = read(&resource, bytes, 7);
    crate::fuzzing::assert_corrupt(&seen);
    let Ok(Seen {
        watermark: Some(watermark),
        writer,
        ..
    }) = seen
    else {
        return;
    };
    let again = Stored::encode(resource.as_str(), &watermark, writer);
    let again = again.and_then(|json| read(&resource, json.as_bytes(), 7));
    assert!(matches!(
        again,
        Ok(again) if again.watermark == Some(watermark) && again.writer == writer
    ));
}
