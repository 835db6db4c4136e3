//! What the tests of this engine share.

use std::sync::Arc;

use fencelock::Result;
use fencelock::body::Body;
use fencelock::fence::{Domain, HolderTag, Snapshot};
use fencelock::object_store::client::ObjectStore;
use fencelock::object_store::client::aws::{AmazonS3Builder, S3ConditionalPut};
use fencelock::object_store::{FencedObjects, ObjectOptions};
use fencelock::{Fence, FencingToken};
use fencelock_testbed::s3;

/// More than is kept in a pointer.
pub(crate) const LARGE: usize = 70_000;

/// Opens fenced objects by URL, with the credentials that the servers know.
pub(crate) async fn open(url: &str) -> Result<FencedObjects> {
    let options = ObjectOptions::default().credentials(s3::KEY, s3::SECRET, None);
    options.open_fenced(url).await
}

/// Opens them over a store.
pub(crate) async fn over(store: Arc<dyn ObjectStore>) -> FencedObjects {
    let options = ObjectOptions::default();
    options.open_fenced_store(store, "x").await.unwrap()
}

/// A client of a server's bucket, to look behind the engine's back.
pub(crate) fn client(server: &s3::S3) -> Arc<dyn ObjectStore> {
    let store = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_endpoint(format!("http://{}", server.address()))
        .with_allow_http(true)
        .with_access_key_id(s3::KEY)
        .with_secret_access_key(s3::SECRET)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .build();
    Arc::new(store.unwrap())
}

pub(crate) fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

/// The fence of a holder's write.
pub(crate) fn fence(number: u64, holder: u8, seq: u64) -> Fence {
    let domain = Domain::new("test", "r", &"lock".parse().unwrap());
    Fence::new(token(number), HolderTag::from_bytes([holder; 16]), domain).with_seq(seq)
}

/// A value that is kept in an object of its own, and says what it is.
pub(crate) fn large(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(LARGE, b'.');
    bytes
}

/// The value up to its padding.
pub(crate) fn text(seen: Snapshot) -> Option<String> {
    let bytes = seen.value.map(Body::into_bytes_all)?;
    let text = String::from_utf8(bytes).unwrap();
    Some(text.trim_end_matches('.').to_owned())
}

/// All bytes of a body.
pub(crate) trait All {
    fn into_bytes_all(self) -> Vec<u8>;
}

impl All for Body {
    fn into_bytes_all(self) -> Vec<u8> {
        self.into_bytes(u64::MAX).unwrap().to_vec()
    }
}
