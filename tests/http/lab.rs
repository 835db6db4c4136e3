//! What these tests share: a server on a free port, a client, and storages that fail.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use fencelock::body::Body;
use fencelock::fence::{Domain, HolderTag, Snapshot, Written};
use fencelock::http::http::{HeaderMap, Method, Request, StatusCode};
use fencelock::http::show;
use fencelock::lease::Finding;
use fencelock::{Error, ErrorKind, Fence, FencedStore, Fencing, FencingToken, ResourceName};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinHandle;

/// Everything has to end within this time.
pub(crate) const END: Duration = Duration::from_secs(20);

/// An axum server, which ends with this value.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(app: Router) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, serving }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Client {
    hyper: Hyper<HttpConnector, Full<bytes::Bytes>>,
    address: SocketAddr,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: bytes::Bytes,
}

impl Client {
    pub(crate) fn of(server: &Server) -> Self {
        Self {
            hyper: Hyper::builder(TokioExecutor::new()).build_http(),
            address: server.address,
        }
    }

    /// One request; the error is one of the connection.
    pub(crate) async fn try_send(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
        body: impl Into<bytes::Bytes>,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .body(Full::new(body.into()))?;
        request.headers_mut().extend(headers);
        let response = self.hyper.request(request).await?;
        let (parts, body) = response.into_parts();
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body: body.collect().await?.to_bytes(),
        })
    }

    pub(crate) async fn send(&self, method: Method, path: &str, headers: HeaderMap) -> Answer {
        in_time(self.try_send(method, path, headers, ""))
            .await
            .unwrap()
    }

    /// A PUT that shows a fence.
    pub(crate) async fn put(&self, path: &str, fence: impl Fencing) -> Answer {
        self.send(Method::PUT, path, shown(fence)).await
    }
}

impl Answer {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.headers["content-type"], "application/problem+json");
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The refusal that the client makes of it.
    pub(crate) fn refusal(&self) -> Option<Error> {
        fencelock::http::refusal(self.status, &self.headers, &self.body)
    }

    #[track_caller]
    pub(crate) fn assert_refused(&self, status: u16, kind: ErrorKind) -> Error {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        let error = self.refusal().expect("a refusal");
        assert_eq!(error.kind(), kind, "{self:?}");
        error
    }
}

pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(END, work)
        .await
        .expect("it ends in time")
}

pub(crate) fn shown(fence: impl Fencing) -> HeaderMap {
    let mut headers = HeaderMap::new();
    show(&mut headers, fence).unwrap();
    headers
}

pub(crate) fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

pub(crate) fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

/// A fence of one of several holders of a lock.
pub(crate) fn fence(holder: u8, number: u64) -> Fence {
    of_lock("lock", holder, number)
}

pub(crate) fn of_lock(lock: &str, holder: u8, number: u64) -> Fence {
    let domain = Domain::new("test", "r0", &lock.parse().unwrap());
    Fence::new(token(number), HolderTag::from_bytes([holder; 16]), domain)
}

/// A storage whose every answer is an error of this kind, or that never answers.
#[derive(Debug)]
pub(crate) struct Failing(pub(crate) Option<ErrorKind>);

impl Failing {
    async fn fail<T>(&self) -> fencelock::Result<T> {
        match self.0 {
            Some(kind) => Err(Error::new(kind, "SECRET words of the storage")),
            None => std::future::pending().await,
        }
    }
}

#[async_trait]
impl FencedStore for Failing {
    async fn put(&self, _: &ResourceName, _: Body, _: &Fence) -> fencelock::Result<Written> {
        self.fail().await
    }
    async fn get(&self, _: &ResourceName) -> fencelock::Result<Snapshot> {
        self.fail().await
    }
    async fn raise(&self, _: &ResourceName, _: &Fence) -> fencelock::Result<Snapshot> {
        self.fail().await
    }
    async fn delete(&self, _: &ResourceName, _: &Fence) -> fencelock::Result<Written> {
        self.fail().await
    }
    async fn rebind(&self, _: &ResourceName, _: &Fence) -> fencelock::Result<Written> {
        self.fail().await
    }
    async fn probe(&self) -> fencelock::Result<Vec<Finding>> {
        self.fail().await
    }
}
