//! The whole list of storage cases, spoken over HTTP to a server that keeps the values: the fence
//! travels in the headers, and every refusal comes back as a problem.

use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{DefaultBodyLimit, Path};
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use axum::routing::{post, put};
use axum::{Extension, Router};
use fencelock::body::Body;
use fencelock::conformance::FenceHarness;
use fencelock::fence::{Snapshot, Written};
use fencelock::http::headers::fence_of;
use fencelock::http::{FencingLayer, Problem, ShownFence, http};
use fencelock::lease::{Finding, Severity};
use fencelock::memory::FencedMemory;
use fencelock::token::Watermark;
use fencelock::{Error, Fence, Fenced, FencedStore, ResourceName, Result};

use crate::lab::{Answer, Client, Server, shown};

fn hex(text: &str) -> String {
    text.bytes().map(|b| format!("{b:02x}")).collect()
}

fn unhex(hex: &str) -> Result<ResourceName> {
    let digits: Vec<char> = hex.chars().collect();
    let byte = |pair: &[char]| u8::from_str_radix(&String::from_iter(pair), 16).unwrap();
    let bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
    ResourceName::try_from(String::from_utf8(bytes).unwrap())
}

/// What the server keeps of a watermark, in headers.
fn told(answer: &mut HeaderMap, watermark: Option<&Watermark>) {
    let Some(watermark) = watermark else { return };
    let mut tell = |name: &'static str, value: String| {
        answer.insert(name, value.parse().unwrap());
    };
    tell("x-token", watermark.token.to_string());
    tell("x-seq", watermark.seq.to_string());
    if let Some(holder) = watermark.holder {
        tell("x-holder", holder.to_string());
    }
    if let Some(domain) = &watermark.domain {
        tell("x-domain", domain.to_string());
    }
}

fn header<T: std::str::FromStr>(headers: &HeaderMap, name: &str) -> Option<T> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

fn heard(headers: &HeaderMap) -> Option<Watermark> {
    Some(Watermark {
        token: header(headers, "x-token")?,
        holder: header(headers, "x-holder"),
        seq: header(headers, "x-seq")?,
        domain: header(headers, "x-domain"),
    })
}

type Made = axum::http::Response<axum::body::Body>;

fn written(answer: Result<Written>) -> Made {
    match answer {
        Ok(written) => {
            let mut response = Response::default();
            told(response.headers_mut(), Some(&written.watermark));
            let applied = written.applied.to_string().parse().unwrap();
            response.headers_mut().insert("x-applied", applied);
            response
        }
        Err(error) => Problem::of(&error).response(),
    }
}

fn snapshot(answer: Result<Snapshot>) -> Made {
    match answer {
        Ok(snapshot) => {
            let mut response = Made::default();
            told(response.headers_mut(), snapshot.watermark.as_ref());
            if let Some(writer) = snapshot.writer {
                let writer = writer.to_string().parse().unwrap();
                response.headers_mut().insert("x-writer", writer);
            }
            if let Some(value) = snapshot.value {
                response.headers_mut().insert("x-value", 1.into());
                *response.body_mut() = value.into_bytes(1 << 30).unwrap().into();
            }
            response
        }
        Err(error) => Problem::of(&error).response(),
    }
}

/// A server that keeps values, as somebody would write it.
fn app(values: Fenced, layer: FencingLayer) -> Router {
    let store = values.clone();
    let save = |Extension(shown): Extension<ShownFence>, body: bytes::Bytes| async move {
        written(store.put(shown.resource(), body, &shown).await)
    };
    let store = values.clone();
    let load = |Path(key): Path<String>| async move {
        match unhex(&key) {
            Ok(resource) => snapshot(store.get(&resource).await),
            Err(error) => Problem::of(&error).response(),
        }
    };
    let store = values.clone();
    let remove = |Extension(shown): Extension<ShownFence>| async move {
        written(store.delete(shown.resource(), &shown).await)
    };
    let store = values.clone();
    let raise = |Extension(shown): Extension<ShownFence>| async move {
        snapshot(store.raise(shown.resource(), &shown).await)
    };
    // Not behind the fence: it is for the lock that the resource is *not* bound to.
    let rebind = |Path(key): Path<String>, headers: HeaderMap| async move {
        let fence = fence_of(&headers).unwrap().unwrap();
        written(values.rebind(&unhex(&key).unwrap(), &fence).await)
    };
    Router::new()
        .route("/values/{key}", put(save).get(load).delete(remove))
        .route("/raise/{key}", post(raise))
        .layer(layer)
        .route("/rebind/{key}", post(rebind))
        .layer(DefaultBodyLimit::disable())
}

fn resource_of(parts: &http::request::Parts) -> Result<Option<ResourceName>> {
    if parts.method.is_safe() {
        return Ok(None);
    }
    let key = parts.uri.path().rsplit('/').next().unwrap_or_default();
    unhex(key).map(Some)
}

/// A storage that lives behind HTTP.
#[derive(Debug)]
struct Remote(Client);

impl Remote {
    async fn ask(
        &self,
        method: Method,
        path: String,
        fence: Option<&Fence>,
        body: bytes::Bytes,
    ) -> Result<Answer> {
        let headers = fence.map(shown).unwrap_or_default();
        let answer = self.0.try_send(method, &path, headers, body).await;
        let answer =
            answer.map_err(|e| Error::indeterminate("the connection was lost").with_source(e))?;
        match answer.refusal() {
            Some(refusal) => Err(refusal),
            None => {
                assert_eq!(answer.status, 200, "{answer:?}");
                Ok(answer)
            }
        }
    }
}

fn read_written(answer: &Answer) -> Written {
    let watermark = heard(&answer.headers).unwrap();
    match header(&answer.headers, "x-applied").unwrap() {
        true => Written::applied(watermark),
        false => Written::repeated(watermark),
    }
}

fn read_snapshot(answer: Answer) -> Snapshot {
    let writer = header(&answer.headers, "x-writer");
    let watermark = heard(&answer.headers);
    let value = answer.headers.contains_key("x-value");
    Snapshot::new(value.then(|| answer.body.into()), watermark, writer)
}

#[async_trait]
impl FencedStore for Remote {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        let (path, body) = (key("values", resource), body.into_bytes(1 << 30)?);
        let answer = self.ask(Method::PUT, path, Some(fence), body).await?;
        Ok(read_written(&answer))
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let path = key("values", resource);
        let answer = self.ask(Method::GET, path, None, "".into()).await?;
        Ok(read_snapshot(answer))
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let path = key("raise", resource);
        let answer = self.ask(Method::POST, path, Some(fence), "".into()).await?;
        Ok(read_snapshot(answer))
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let path = key("values", resource);
        let answer = self
            .ask(Method::DELETE, path, Some(fence), "".into())
            .await?;
        Ok(read_written(&answer))
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let path = key("rebind", resource);
        let answer = self.ask(Method::POST, path, Some(fence), "".into()).await?;
        Ok(read_written(&answer))
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let serves = Finding::new(Severity::Good, "http", "a server that fences its values");
        Ok(vec![serves])
    }
}

fn key(route: &str, resource: &ResourceName) -> String {
    format!("/{route}/{}", hex(resource.as_str()))
}

struct Values {
    _server: Server,
    clients: [Client; 2],
}

impl Values {
    async fn of(mode: impl Fn(Fenced) -> FencingLayer) -> Self {
        let values = Fenced::new(FencedMemory::new());
        let server = Server::start(app(values.clone(), mode(values))).await;
        let clients = [Client::of(&server), Client::of(&server)];
        Self {
            _server: server,
            clients,
        }
    }
}

impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        self.clients
            .clone()
            .map(|client| -> Arc<dyn FencedStore> { Arc::new(Remote(client)) })
    }

    fn skips(&self) -> &'static [&'static str] {
        // The storage behind this server is the memory of its process.
        &["watermarks_survive_a_restart"]
    }
}

mod pass {
    use super::*;
    fencelock::fence_conformance!(Values::of(|_| FencingLayer::pass(resource_of)).await);
}

mod pass_and_raise_first {
    use super::*;
    fencelock::fence_conformance!(
        Values::of(|values| FencingLayer::pass(resource_of).raise_first(values)).await
    );
}

mod hold {
    use super::*;
    fencelock::fence_conformance!(
        Values::of(|values| FencingLayer::hold(values, resource_of)).await
    );
}
