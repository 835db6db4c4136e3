//! A fence as a statement shows it.

use crate::fence::Fence;
use crate::sql::number::signed;

/// What a fence says, as parameters of a statement.
pub(crate) struct Shown {
    pub(crate) token: i64,
    pub(crate) holder: Option<Vec<u8>>,
    pub(crate) domain: Option<String>,
    pub(crate) seq: Option<i64>,
}

impl Shown {
    pub(crate) fn of(fence: &Fence) -> Self {
        Self {
            token: signed(fence.token()),
            holder: fence.holder().map(|tag| tag.as_bytes().to_vec()),
            domain: fence.domain().map(|domain| domain.as_str().to_owned()),
            seq: fence
                .seq()
                .map(|seq| i64::try_from(seq).unwrap_or(i64::MAX)),
        }
    }
}
