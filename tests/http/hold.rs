//! Hold mode: one request at a time at each resource, whatever becomes of handlers and clients.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::State;
use axum::http::Method;
use axum::routing::any;
use axum::{Extension, Router};
use fencelock::body::Body;
use fencelock::fence::{Snapshot, Written};
use fencelock::http::{FencingLayer, ShownFence, http, writes_by_path};
use fencelock::lease::Finding;
use fencelock::memory::FencedMemory;
use fencelock::{ErrorKind, Fence, Fenced, FencedStore, ResourceName, Result};
use http_body_util::BodyExt as _;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use crate::lab::*;

/// What a handler is told to do, by its path's last part.
#[derive(Clone)]
struct Desk {
    log: Arc<Mutex<Vec<String>>>,
    /// Lets a handler of `/…/gated` go on.
    gate: Arc<Notify>,
    /// Hears of every request that reaches the layer, and of every handler that starts.
    arrived: mpsc::UnboundedSender<String>,
}

impl Desk {
    fn note(&self, what: String) {
        self.log.lock().unwrap().push(what.clone());
        let _ = self.arrived.send(what);
    }
}

/// Notes the end of a handler, however it ends.
struct Leaves(Desk, u64);

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.note(format!("{} out", self.1));
    }
}

async fn handler(
    State(desk): State<Desk>,
    Extension(shown): Extension<ShownFence>,
    request: axum::extract::Request,
) -> String {
    let number = shown.fence().token().get();
    desk.note(format!("{number} in"));
    let leaves = Leaves(desk.clone(), number);
    let how = request.uri().query().unwrap_or_default().to_owned();
    match how.as_str() {
        "gated" => desk.gate.notified().await,
        "panic" => panic!("a handler of this test panics"),
        "spawn" => {
            let kept = shown.keep().unwrap();
            tokio::spawn(async move {
                desk.gate.notified().await;
                desk.note("spawned work done".to_owned());
                drop(kept);
            });
        }
        _ => {}
    }
    drop(leaves);
    format!("{number}")
}

struct Lab {
    server: Server,
    client: Client,
    desk: Desk,
    events: mpsc::UnboundedReceiver<String>,
}

impl Lab {
    async fn new(layer: impl FnOnce(FencingLayer) -> FencingLayer) -> Self {
        Self::over(Fenced::new(FencedMemory::new()), layer).await
    }

    async fn over(store: Fenced, layer: impl FnOnce(FencingLayer) -> FencingLayer) -> Self {
        let (arrived, events) = mpsc::unbounded_channel();
        let desk = Desk {
            log: Arc::default(),
            gate: Arc::default(),
            arrived: arrived.clone(),
        };
        let hold = FencingLayer::hold(store, move |parts| {
            let token = parts.headers["fencing-token"].to_str().unwrap();
            let _ = arrived.send(format!("{token} arrived"));
            writes_by_path(parts)
        });
        let app = Router::new()
            .fallback(any(handler))
            .layer(layer(hold))
            .with_state(desk.clone());
        let server = Server::start(app).await;
        let client = Client::of(&server);
        Self {
            server,
            client,
            desk,
            events,
        }
    }

    /// Sends a request from a task, over a connection of its own.
    fn send(&self, path: &'static str, number: u64) -> tokio::task::JoinHandle<Option<Answer>> {
        let client = Client::of(&self.server);
        tokio::spawn(async move {
            let headers = shown(fence(1, number));
            client.try_send(Method::PUT, path, headers, "").await.ok()
        })
    }

    async fn until(&mut self, event: &str) {
        in_time(async { while self.events.recv().await.unwrap() != event {} }).await;
    }

    fn log(&self) -> Vec<String> {
        self.desk.log.lock().unwrap().clone()
    }

    /// A request at another resource goes through meanwhile, which gives a waiter that should wait
    /// every chance not to.
    async fn others_go_through(&self) {
        for _ in 0..20 {
            assert_eq!(self.client.put("/other", fence(1, 7)).await.status, 200);
        }
        self.desk
            .log
            .lock()
            .unwrap()
            .retain(|line| !line.starts_with("7 "));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_request_starts_once_the_older_ones_effect_is_there() {
    let mut lab = Lab::new(|layer| layer).await;
    let old = lab.send("/r?gated", 33);
    lab.until("33 in").await;
    let new = lab.send("/r", 34);
    lab.until("34 arrived").await;
    lab.others_go_through().await;
    assert_eq!(lab.log(), ["33 in"]);
    lab.desk.gate.notify_one();
    assert_eq!(in_time(old).await.unwrap().unwrap().text(), "33");
    assert_eq!(in_time(new).await.unwrap().unwrap().text(), "34");
    assert_eq!(lab.log(), ["33 in", "33 out", "34 in", "34 out"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_request_that_waited_behind_a_newer_one_never_starts() {
    let mut lab = Lab::new(|layer| layer).await;
    let new = lab.send("/r?gated", 34);
    lab.until("34 in").await;
    let old = lab.send("/r", 33);
    lab.until("33 arrived").await;
    lab.others_go_through().await;
    lab.desk.gate.notify_one();
    assert_eq!(in_time(new).await.unwrap().unwrap().text(), "34");
    let refused = in_time(old).await.unwrap().unwrap();
    let error = refused.assert_refused(412, ErrorKind::Fenced);
    assert_eq!(error.watermark(), Some(token(34)));
    assert_eq!(lab.log(), ["34 in", "34 out"]);
}

/// Judged by what it meets after its wait, not by what it met before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_requests_that_wait_the_older_is_refused_once_the_newer_was_in() {
    let mut lab = Lab::new(|layer| layer).await;
    let first = lab.send("/r?gated", 32);
    lab.until("32 in").await;
    let new = lab.send("/r", 34);
    lab.until("34 arrived").await;
    lab.others_go_through().await;
    let old = lab.send("/r", 33);
    lab.until("33 arrived").await;
    lab.others_go_through().await;
    lab.desk.gate.notify_one();
    assert_eq!(in_time(first).await.unwrap().unwrap().status, 200);
    assert_eq!(in_time(new).await.unwrap().unwrap().status, 200);
    let refused = in_time(old).await.unwrap().unwrap();
    refused.assert_refused(412, ErrorKind::Fenced);
}

/// Values in memory, whose answer to a raise with 33 is late: the raise itself is done.
#[derive(Debug)]
struct LateAnswer(FencedMemory, Arc<Notify>);

#[async_trait::async_trait]
impl FencedStore for LateAnswer {
    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let answer = self.0.raise(resource, fence).await;
        if fence.token().get() == 33 {
            self.1.notified().await;
        }
        answer
    }
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        self.0.put(resource, body, fence).await
    }
    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        self.0.get(resource).await
    }
    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.0.delete(resource, fence).await
    }
    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.0.rebind(resource, fence).await
    }
    async fn probe(&self) -> Result<Vec<Finding>> {
        self.0.probe().await
    }
}

/// The older one is in the storage and not yet in its handler, when the newer one comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_the_storage_that_is_late_lets_nobody_overtake() {
    let late = Arc::new(Notify::new());
    let store = LateAnswer(FencedMemory::new(), Arc::clone(&late));
    let mut lab = Lab::over(Fenced::new(store), |layer| layer).await;
    let old = lab.send("/r", 33);
    lab.until("33 arrived").await;
    lab.others_go_through().await;
    let new = lab.send("/r", 34);
    lab.until("34 arrived").await;
    lab.others_go_through().await;
    late.notify_one();
    assert_eq!(in_time(old).await.unwrap().unwrap().status, 200);
    assert_eq!(in_time(new).await.unwrap().unwrap().status, 200);
    assert_eq!(lab.log(), ["33 in", "33 out", "34 in", "34 out"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_panics_gives_the_resource_up() {
    let mut lab = Lab::new(|layer| layer).await;
    let old = lab.send("/r?panic", 33);
    lab.until("33 out").await;
    assert!(in_time(old).await.unwrap().is_none(), "the connection ends");
    assert_eq!(lab.client.put("/r", fence(1, 34)).await.text(), "34");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_cancels_its_handler_and_then_gives_the_resource_up() {
    let mut lab = Lab::new(|layer| layer).await;
    let old = lab.send("/r?gated", 33);
    lab.until("33 in").await;
    let new = lab.send("/r", 34);
    lab.until("34 arrived").await;
    old.abort();
    assert_eq!(in_time(new).await.unwrap().unwrap().text(), "34");
    assert_eq!(lab.log(), ["33 in", "33 out", "34 in", "34 out"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_while_it_waits_keeps_nobody_out() {
    let mut lab = Lab::new(|layer| layer).await;
    let old = lab.send("/r?gated", 33);
    lab.until("33 in").await;
    let gone = lab.send("/r?gated", 34);
    lab.until("34 arrived").await;
    lab.others_go_through().await;
    gone.abort();
    let last = lab.send("/r", 35);
    lab.until("35 arrived").await;
    lab.others_go_through().await;
    lab.desk.gate.notify_one();
    assert_eq!(in_time(old).await.unwrap().unwrap().status, 200);
    assert_eq!(in_time(last).await.unwrap().unwrap().text(), "35");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_a_handler_spawned_keeps_the_resource_if_it_is_given_it() {
    let mut lab = Lab::new(|layer| layer).await;
    let old = lab.send("/r?spawn", 33);
    assert_eq!(in_time(old).await.unwrap().unwrap().status, 200);
    let new = lab.send("/r", 34);
    lab.until("34 arrived").await;
    lab.others_go_through().await;
    assert_eq!(lab.log(), ["33 in", "33 out"]);
    lab.desk.gate.notify_one();
    assert_eq!(in_time(new).await.unwrap().unwrap().status, 200);
    let log = lab.log();
    assert_eq!(log[2..], ["spawned work done", "34 in", "34 out"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_is_bounded_and_ends_with_503() {
    let mut lab = Lab::new(|layer| layer.wait(Duration::from_millis(100))).await;
    let old = lab.send("/r?gated", 33);
    lab.until("33 in").await;
    let answer = lab.client.put("/r", fence(1, 34)).await;
    answer.assert_refused(503, ErrorKind::Timeout);
    assert_eq!(answer.headers["retry-after"], "1");
    lab.others_go_through().await;
    lab.desk.gate.notify_one();
    assert_eq!(in_time(old).await.unwrap().unwrap().status, 200);
    assert_eq!(lab.client.put("/r", fence(1, 34)).await.status, 200);
    // What timed out had not raised.
    assert_eq!(lab.log(), ["33 in", "33 out", "34 in", "34 out"]);
}

/// A body that comes piece by piece.
struct Pieces(mpsc::UnboundedReceiver<&'static str>);

impl http_body::Body for Pieces {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
        let piece = self.0.poll_recv(context);
        piece.map(|piece| piece.map(|text| Ok(http_body::Frame::data(text.into()))))
    }
}

#[tokio::test]
async fn a_resource_is_held_until_the_response_has_ended_or_was_dropped() {
    use tower_service::Service as _;
    let (to_handlers, bodies) = mpsc::unbounded_channel::<Pieces>();
    let bodies = Arc::new(tokio::sync::Mutex::new(bodies));
    let stream = async move || axum::body::Body::new(bodies.lock().await.recv().await.unwrap());
    let store = Fenced::new(FencedMemory::new());
    let layer = FencingLayer::hold(store, writes_by_path).wait(Duration::from_millis(30));
    let mut app: Router = Router::new().fallback(any(stream)).layer(layer);
    let mut call = async |number: u64| {
        let mut request = http::Request::put("/r")
            .body(axum::body::Body::empty())
            .unwrap();
        request.headers_mut().extend(shown(token(number)));
        in_time(app.call(request)).await.unwrap()
    };
    let new_body = || {
        let (sender, pieces) = mpsc::unbounded_channel();
        to_handlers.send(Pieces(pieces)).ok().unwrap();
        sender
    };

    let pieces = new_body();
    let mut first = call(1).await;
    assert_eq!(call(2).await.status(), 503);
    pieces.send("a").unwrap();
    let frame = first.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "a");
    assert_eq!(call(2).await.status(), 503);
    drop(pieces);
    assert!(first.body_mut().frame().await.is_none());
    // Ended, and not yet dropped.
    let _second_pieces = new_body();
    let second = call(2).await;
    assert_eq!(second.status(), 200);
    drop(first);
    assert_eq!(call(3).await.status(), 503);
    drop(second);
    let _third_pieces = new_body();
    assert_eq!(call(3).await.status(), 200);
}

/// The order in which forty holders' effects land, and whether the highest stands.
async fn forty(layer: Option<FencingLayer>) -> Vec<u64> {
    #[derive(Clone, Default)]
    struct Ledger(Arc<Mutex<Vec<u64>>>, Arc<AtomicUsize>);
    let work = async |State(ledger): State<Ledger>, headers: axum::http::HeaderMap| {
        let number: u64 = headers["fencing-token"].to_str().unwrap().parse().unwrap();
        ledger.1.fetch_add(1, Ordering::SeqCst);
        // Stalls between the check and the effect.
        tokio::time::sleep(Duration::from_millis(number % 7)).await;
        ledger.0.lock().unwrap().push(number);
    };
    let ledger = Ledger::default();
    let mut app = Router::new().fallback(any(work)).with_state(ledger.clone());
    if let Some(layer) = layer {
        app = app.layer(layer);
    }
    let server = Server::start(app).await;
    let mut clients = JoinSet::new();
    for i in 0..40_u64 {
        // 17 has no divisor in common with 40: every number once, shuffled.
        let (client, number) = (Client::of(&server), 1 + i * 17 % 40);
        clients.spawn(async move {
            let answer = client
                .put("/r", fence(u8::try_from(number).unwrap(), number))
                .await;
            if answer.status != 200 {
                answer.assert_refused(412, ErrorKind::Fenced);
            }
            answer.status == 200
        });
    }
    let admitted = clients
        .join_all()
        .await
        .into_iter()
        .filter(|ok| *ok)
        .count();
    let landed = ledger.0.lock().unwrap().clone();
    assert_eq!(admitted, landed.len(), "a refused request has no effect");
    landed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_forty_holders_in_any_order_the_highest_stands() {
    let store = Fenced::new(FencedMemory::new());
    let landed = forty(Some(FencingLayer::hold(store, writes_by_path))).await;
    assert!(landed.is_sorted(), "{landed:?}");
    assert_eq!(landed.last(), Some(&40));
    // The same run without the layer proves that this one proved something.
    let unfenced = forty(None).await;
    assert!(!unfenced.is_sorted(), "{unfenced:?}");
}
