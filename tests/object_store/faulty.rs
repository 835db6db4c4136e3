//! A store in memory that fails, stops and counts on demand, request by request.

use std::fmt;
use std::sync::{Arc, Mutex};

use fencelock::object_store::client::memory::InMemory;
use fencelock::object_store::client::path::Path;
use fencelock::object_store::client::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use tokio::sync::Notify;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Put,
    Get,
    Delete,
    List,
}

/// What becomes of one request.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// It is applied, and its answer lost.
    LoseAnswer,
    /// It is not applied, and nobody says so.
    LoseRequest,
    /// It waits before its effect.
    Stop(Arc<Stop>),
    /// It waits after its effect, and its answer is lost.
    StopThenLose(Arc<Stop>),
}

/// A request that was reached, and goes on when it is told.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    pub(crate) reached: Notify,
    pub(crate) go: Notify,
}

#[derive(Debug, Default)]
pub(crate) struct Faulty {
    pub(crate) inner: InMemory,
    rules: Mutex<Vec<(Op, String, Act)>>,
    asked: Mutex<Vec<(Op, String)>>,
}

impl Faulty {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The next such request whose key ends with or holds `key` meets the act.
    pub(crate) fn next(&self, op: Op, key: &str, act: Act) {
        self.rules.lock().unwrap().push((op, key.to_owned(), act));
    }

    /// Stops the next such request.
    pub(crate) fn stop(&self, op: Op, key: &str) -> Arc<Stop> {
        let stop = Arc::new(Stop::default());
        self.next(op, key, Act::Stop(Arc::clone(&stop)));
        stop
    }

    /// Nothing meets anything any more.
    pub(crate) fn calm(&self) {
        self.rules.lock().unwrap().clear();
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<(Op, String)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    fn meet(&self, op: Op, path: &Path) -> Option<Act> {
        let key = path.as_ref();
        self.asked.lock().unwrap().push((op, key.to_owned()));
        let mut rules = self.rules.lock().unwrap();
        let folder = |text: &str| text.ends_with('/');
        let at = rules.iter().position(|(on, text, _)| {
            *on == op
                && (key.ends_with(text.as_str()) || folder(text) && key.contains(text.as_str()))
        });
        at.map(|at| rules.remove(at).2)
    }
}

fn lost() -> Error {
    Error::Generic {
        store: "faulty",
        source: "the answer was lost".into(),
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        path: &Path,
        body: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        match self.meet(Op::Put, path) {
            None => self.inner.put_opts(path, body, options).await,
            Some(Act::LoseRequest) => Err(lost()),
            Some(Act::LoseAnswer) => {
                self.inner.put_opts(path, body, options).await.map(drop)?;
                Err(lost())
            }
            Some(Act::Stop(stop)) => {
                stop.reached.notify_one();
                stop.go.notified().await;
                self.inner.put_opts(path, body, options).await
            }
            Some(Act::StopThenLose(stop)) => {
                self.inner.put_opts(path, body, options).await.map(drop)?;
                stop.reached.notify_one();
                stop.go.notified().await;
                Err(lost())
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        match self.meet(Op::Get, path) {
            None => {}
            Some(Act::Stop(stop)) => {
                stop.reached.notify_one();
                stop.go.notified().await;
            }
            Some(_) => return Err(lost()),
        }
        self.inner.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let asked: Vec<Path> = pollster::block_on(paths.map(|path| path.unwrap()).collect());
        for path in &asked {
            if self.meet(Op::Delete, path).is_some() {
                return futures_util::stream::once(async { Err(lost()) }).boxed();
            }
        }
        let paths = futures_util::stream::iter(asked.into_iter().map(Ok)).boxed();
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let _ = self.meet(Op::List, prefix.unwrap_or(&Path::ROOT));
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
