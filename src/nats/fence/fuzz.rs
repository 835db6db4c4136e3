//! What fuzzing asks of a watermark in the headers of a message.

use super::{Seen, Stored, StoredWatermark, WATERMARK};
use crate::name::ResourceName;

/// The input is the value of the header, or all of them.
pub(crate) fn watermark(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes).into_owned();
    read(format!("NATS/1.0\r\n{WATERMARK}: {text}\r\n\r\n"));
    read(text);
}

fn read(headers: String) {
    let Ok(resource) = ResourceName::new("today.csv") else {
        return;
    };
    let stored = |headers: String| Stored {
        at: 7,
        stamped_ns: 0,
        headers,
        body: b"value".to_vec(),
    };
    let seen = Seen::of(&resource, stored(headers));
    crate::fuzzing::assert_corrupt(&seen);
    let Ok(Seen {
        watermark: Some(watermark),
        value,
        ..
    }) = seen
    else {
        return;
    };
    let writer = value.map(|(_, writer)| writer);
    let again = StoredWatermark::of(&resource, &watermark, writer).encode();
    let again = again.and_then(|value| {
        Seen::of(
            &resource,
            stored(format!("NATS/1.0\r\n{WATERMARK}: {value}\r\n\r\n")),
        )
    });
    assert!(matches!(
        again,
        Ok(again) if again.watermark == Some(watermark)
            && again.value.as_ref().map(|(_, writer)| *writer) == writer
    ));
}
