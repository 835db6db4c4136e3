//! Removing what a trial left in a bucket.

use futures_util::StreamExt as _;

use super::options::{ObjectOptions, Place};
use crate::error::{Error, Result};

/// How many objects are removed at once.
const AT_ONCE: usize = 16;

impl ObjectOptions {
    /// Removes every object below `place`, whose last part has to be `mark`, as a trial's is.
    pub(crate) async fn erase(self, place: Place, mark: &str) -> Result<()> {
        if place.prefix.rsplit('/').next() != Some(mark) {
            return Err(Error::invalid("the prefix is not a trial's own")
                .with("prefix", format_args!("{:?}", place.prefix)));
        }
        // A trial has asked already whether conditions are honoured.
        let link = self.without_probe().link(&place).await?;
        let found = link.list(&link.below()?).await?;
        let mut removals = futures_util::stream::iter(found)
            .map(|object| {
                let link = &link;
                async move { link.remove(&object.path).await }
            })
            .buffer_unordered(AT_ONCE);
        while let Some(removed) = removals.next().await {
            removed?;
        }
        Ok(())
    }
}
