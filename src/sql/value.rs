//! Values on their way to and from a server.

use std::time::Duration;

use bytes::Bytes;

use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fencing;

/// The largest value: 64 MiB.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// What a read will bring is not known beforehand.
pub(crate) const READ_LIMIT_BYTES: u64 = MAX_BYTES / 8;

/// How long a request of the storage may take, and how much longer for each MiB of the value.
const REQUEST_LIMIT: Duration = Duration::from_secs(8);
const REQUEST_LIMIT_PER_MIB: Duration = Duration::from_millis(300);

pub(crate) fn limit(bytes: u64) -> Duration {
    let mebibytes = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    REQUEST_LIMIT + REQUEST_LIMIT_PER_MIB * mebibytes
}

/// The value to be written, read before the request: that may take long, and may fail.
pub(crate) async fn read(body: Body) -> Result<Bytes> {
    if body.in_memory() {
        body.into_bytes(MAX_BYTES)
    } else {
        blocking::unblock(move || body.into_bytes(MAX_BYTES)).await
    }
}

/// Why an `admit` in the caller's own transaction failed. The caller has not committed, so nothing
/// can have been applied.
pub(crate) fn not_admitted(error: Error, fence: &impl Fencing) -> Error {
    let error = match error {
        error if error.kind() == ErrorKind::Indeterminate => {
            error.into_kind(ErrorKind::Unavailable)
        }
        error => error,
    };
    if let Some(watermark) = error.watermark() {
        fence.refused(watermark);
    }
    error
}
