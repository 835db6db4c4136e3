//! What fuzzing asks of a watermark in the headers of a message.

use super::{Message, Seen, Stored, WATERMARK, seen};
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
    let stored = |headers: String| Message {
        at: 7,
        stamped_ns: 0,
        headers,
        body: b"value".to_vec(),
    };
    let found = seen(&resource, stored(headers));
    crate::fuzzing::assert_corrupt(&found);
    let Ok(Seen {
        watermark: Some(watermark),
        writer,
        ..
    }) = found
    else {
        return;
    };
    let again = Stored::encode(&resource.encoded(), &watermark, writer);
    let again = again.and_then(|value| {
        seen(
            &resource,
            stored(format!("NATS/1.0\r\n{WATERMARK}: {value}\r\n\r\n")),
        )
    });
    assert!(matches!(
        again,
        Ok(again) if again.watermark == Some(watermark)
            && again.writer == writer
    ));
}
