//! What fuzzing asks of the answers about a watermark, whose words are lines here.

use super::Told;
use crate::fence::Fence;
use crate::redis::record::fuzz::values;
use crate::token::{FencingToken, Intent};

pub(crate) fn watermark(bytes: &[u8]) {
    let Ok(told) = Told::read(values(bytes)) else {
        return;
    };
    let refused = told.verdict == "refused";
    let watermark = told.watermark.clone();
    let fence = Fence::from(FencingToken::MIN);
    let admitted = told.admitted(&fence, Intent::Write, None);
    // What a script refused is never taken for done (S10).
    assert!(!refused || admitted.is_err());
    assert!(admitted.is_err() || admitted.ok() == watermark);
}
