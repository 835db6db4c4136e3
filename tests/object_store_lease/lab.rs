//! What the tests of these locks share.

use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fencelock::clock::Clock;
use fencelock::lease::{AcquireRequest, Attempt, Contention, Grant, LeaseRef, LeaseStore, Ttl};
use fencelock::object_store::BucketStore;
use fencelock::object_store::client::aws::AmazonS3Builder;
use fencelock::object_store::client::path::Path;
use fencelock::object_store::client::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RetryConfig,
};
use fencelock::{Error, FencingToken};
use fencelock_testbed::s3;
use futures_util::stream::BoxStream;
use tokio::sync::Barrier;

/// Everything has to end within this time, whatever the server does.
pub(crate) const END: Duration = Duration::from_secs(10);

/// The margin of the clock at first, and a bit.
pub(crate) const MARGIN: Duration = Duration::from_millis(3_100);

/// The servers of the tests that leave them running, each test below a prefix of its own. They end
/// with the test's process.
pub(crate) static MOTO: LazyLock<s3::S3> = LazyLock::new(s3::S3::moto);
pub(crate) static SEAWEED: LazyLock<s3::S3> = LazyLock::new(s3::S3::seaweed);

/// A store whose clock a test can move, and that counts requests. All clients have to share it.
#[derive(Debug)]
pub(crate) struct Aging {
    inner: Arc<dyn ObjectStore>,
    ahead_us: AtomicU64,
    /// How far the clock was ahead when an object was written.
    written: Mutex<HashMap<Path, u64>>,
    pub(crate) puts: AtomicU64,
    pub(crate) gets: AtomicU64,
    under_way: AtomicU64,
    most: AtomicU64,
    meeting: Mutex<Option<Arc<Barrier>>>,
}

impl Aging {
    pub(crate) fn over(inner: Arc<dyn ObjectStore>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            ahead_us: AtomicU64::new(0),
            written: Mutex::default(),
            puts: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            most: AtomicU64::new(0),
            meeting: Mutex::default(),
        })
    }

    /// Moves the clock.
    pub(crate) fn advance(&self, by: Duration) {
        let by = u64::try_from(by.as_micros()).unwrap();
        self.ahead_us.fetch_add(by, Ordering::SeqCst);
    }

    /// Moves the clock the other way.
    pub(crate) fn set_back(&self, by: Duration) {
        let by = u64::try_from(by.as_micros()).unwrap();
        self.ahead_us.fetch_sub(by, Ordering::SeqCst);
    }

    /// Puts and gets since the last call.
    pub(crate) fn requests(&self) -> (u64, u64) {
        let puts = self.puts.swap(0, Ordering::SeqCst);
        (puts, self.gets.swap(0, Ordering::SeqCst))
    }

    /// From now on each request waits until `so_many` are under way.
    pub(crate) fn gather(&self, so_many: usize) {
        *self.meeting.lock().unwrap() = Some(Arc::new(Barrier::new(so_many)));
    }

    /// How many requests were under way at once at the most.
    pub(crate) fn most_at_once(&self) -> u64 {
        self.most.load(Ordering::SeqCst)
    }

    async fn counted<T>(&self, request: impl Future<Output = T>) -> T {
        let now = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        let meeting = self.meeting.lock().unwrap().clone();
        if let Some(meeting) = meeting {
            meeting.wait().await;
        }
        let answer = request.await;
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        answer
    }
}

impl fmt::Display for Aging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

type Answer<T> = fencelock::object_store::client::Result<T>;

#[async_trait::async_trait]
impl ObjectStore for Aging {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Answer<PutResult> {
        self.puts.fetch_add(1, Ordering::SeqCst);
        let ahead = self.ahead_us.load(Ordering::SeqCst);
        let put = self
            .counted(self.inner.put_opts(location, payload, opts))
            .await?;
        self.written.lock().unwrap().insert(location.clone(), ahead);
        Ok(put)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Answer<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Answer<GetResult> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        let mut got = self.counted(self.inner.get_opts(location, options)).await?;
        let ahead = self.written.lock().unwrap().get(location).copied();
        got.meta.last_modified += Duration::from_micros(ahead.unwrap_or(0));
        Ok(got)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Answer<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Answer<Path>>,
    ) -> BoxStream<'static, Answer<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Answer<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Answer<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Answer<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// The client that fencelock itself would make repeats nothing.
pub(crate) fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// A client of the bucket of a server, as a user would build it.
pub(crate) fn client_at(address: SocketAddr, retry: RetryConfig) -> Arc<dyn ObjectStore> {
    Arc::new(builder(address, retry).build().unwrap())
}

pub(crate) fn builder(address: SocketAddr, retry: RetryConfig) -> AmazonS3Builder {
    // Where another test was first, there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_region("us-east-1")
        .with_endpoint(format!("http://{address}"))
        .with_allow_http(true)
        .with_access_key_id(s3::KEY)
        .with_secret_access_key(s3::SECRET)
        .with_retry(retry)
}

pub(crate) fn request(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name.parse().unwrap(), Ttl::new(ttl).unwrap())
}

pub(crate) fn long(name: &str) -> AcquireRequest {
    request(name, Duration::from_secs(600))
}

pub(crate) async fn granted(store: &BucketStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

pub(crate) async fn held(store: &BucketStore, request: &AcquireRequest) -> Contention {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => panic!("granted {grant:?}"),
        Attempt::Held(by) => by,
    }
}

pub(crate) fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

/// How many hold the lock.
pub(crate) async fn holders(store: &BucketStore, name: &str) -> usize {
    let state = store.inspect(&name.parse().unwrap()).await.unwrap();
    state.map_or(0, |state| state.holders.len())
}

/// The body of a record that nobody holds, whose last token is `last`.
pub(crate) fn record(name: &str, last: FencingToken) -> String {
    use sha2::{Digest as _, Sha256};
    use std::fmt::Write as _;
    let json = serde_json::json!({
        "name": name, "last": last.get(), "capacity": 1, "holders": [], "nonce": "0".repeat(32),
    })
    .to_string();
    let mut sum = String::new();
    for byte in Sha256::digest(json.as_bytes()) {
        write!(sum, "{byte:02x}").unwrap();
    }
    format!("fencelock-lock 1 {sum}\n{json}\n")
}

/// Options with a clock that a test moves.
pub(crate) fn movable() -> (fencelock::object_store::ObjectOptions, Clock) {
    let clock = Clock::adjustable();
    (BucketStore::options().clock(clock.clone()), clock)
}

/// What `work` yields, and how long it took; fails where it does not end in time.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> (T, Duration) {
    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    let started = Instant::now();
    let done = tokio::time::timeout(END, work).await;
    (done.expect("it ends within 10 s"), started.elapsed())
}

/// An error in all its forms, with its causes.
pub(crate) fn whole(error: &Error) -> String {
    let mut text = format!("{error} / {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(" / {error} / {error:?}");
        cause = error.source();
    }
    text
}
