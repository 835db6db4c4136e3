//! Removing what a trial left in a cluster.

use bytes::Bytes;
use serde_json::Value;

use super::connect::write_within;
use super::failure::{Failure, NO_STREAM};
use super::lease::NatsStore;
use crate::error::{Error, Result};

impl NatsStore {
    /// Deletes this store's bucket, which has to be named after `mark`, as a trial's is.
    pub(crate) async fn erase(&self, mark: &str) -> Result<()> {
        let stream = self.inner.bucket.stream.as_str();
        if stream != format!("KV_{mark}") {
            return Err(Error::invalid("the bucket is not a trial's own").with("stream", stream));
        }
        let subject = format!("$JS.API.STREAM.DELETE.{stream}");
        write_within(async {
            let link = &self.inner.link;
            let answer: Result<Value, Failure> = link.api_once(&subject, &Bytes::new()).await;
            match answer {
                Err(failure) if failure.code != Some(NO_STREAM) => Err(failure.into()),
                _ => Ok(()),
            }
        })
        .await
    }
}
