//! A network between a client and its server that fails on demand.
//!
//! ```no_run
//! # use fencelock_testbed::{proxy::Proxy, redis::Redis};
//! let server = Redis::start();
//! let proxy = Proxy::start(server.address());
//! // … the client connects to proxy.port() …
//! proxy.swallow_answer(b"EVALSHA"); // the next such request is applied, its answer lost
//! ```

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::Deadline;
use crate::port::Port;

const CHUNK_BYTES: usize = 64 * 1024;

/// A TCP proxy in front of one server. Ends, with its connections, when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: Port,
    shared: Arc<Shared>,
}

/// What went over the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Times that a client spoke after its server, or first: a pipeline is one.
    pub trips: u64,
    /// Bytes from clients.
    pub sent_bytes: u64,
    /// Bytes from the server.
    pub received_bytes: u64,
    /// Connections that clients opened.
    pub connections: u64,
}

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    port: u16,
    state: Mutex<State>,
    changed: Condvar,
    trips: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    connections: AtomicU64,
    swallowed: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    mode: Mode,
    delay: Duration,
    ambush: Option<Ambush>,
    open: Vec<Arc<Connection>>,
    closing: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    Pass,
    Refuse,
    Hold,
    BlackHole,
}

#[derive(Debug)]
struct Ambush {
    pattern: Vec<u8>,
    spring: Spring,
}

/// What becomes of a request that was waited for, and of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spring {
    SwallowAnswer,
    SwallowRequest,
    HoldAnswer,
    HoldRequest,
}

#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// The client spoke last.
    asked: AtomicBool,
    /// Whatever the server says next is dropped, and the connection cut.
    swallows: AtomicBool,
    /// Bytes were dropped, so the stream makes no sense any more.
    torn: AtomicBool,
    /// What the client says does not arrive yet.
    holds_requests: AtomicBool,
    /// What the server says does not arrive yet.
    holds_answers: AtomicBool,
}

impl Proxy {
    /// A proxy in front of `to` that passes everything.
    ///
    /// # Panics
    /// Where it cannot listen.
    #[must_use]
    pub fn start(to: SocketAddr) -> Self {
        let port = Port::free();
        let shared = Arc::new(Shared {
            to,
            port: port.number(),
            state: Mutex::default(),
            changed: Condvar::new(),
            trips: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            swallowed: AtomicU64::new(0),
        });
        let listener = TcpListener::bind(("127.0.0.1", port.number())).expect("a listener");
        let accepting = Arc::clone(&shared);
        thread::spawn(move || accepting.accept(listener));
        Self { port, shared }
    }

    /// The port that clients connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port()))
    }

    /// Passes everything again. What was held arrives now; connections that lost bytes are cut.
    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    /// Refuses new connections; those that are open go on.
    pub fn refuse(&self) {
        self.set(Mode::Refuse);
        // The listener is gone when a connection to it fails.
        crate::eventually("new connections refused", Duration::from_secs(5), || {
            TcpStream::connect(self.address()).is_err()
        });
    }

    /// Holds all bytes, both ways, until [`pass`](Self::pass): a partition that heals, after which
    /// late requests still arrive.
    pub fn hold(&self) {
        self.set(Mode::Hold);
    }

    /// Takes all bytes, both ways, and loses them.
    pub fn black_hole(&self) {
        self.set(Mode::BlackHole);
    }

    /// Delays every piece of data by this much in each direction; zero ends it.
    pub fn delay(&self, delay: Duration) {
        self.shared.lock().delay = delay;
    }

    /// Cuts all open connections.
    pub fn cut(&self) {
        for connection in &self.shared.lock().open {
            connection.cut();
        }
    }

    /// Passes the next request that holds `pattern` on to the server, drops its answer and cuts
    /// the connection: an effect whose answer is lost. An empty pattern takes whatever comes next.
    pub fn swallow_answer(&self, pattern: &[u8]) {
        self.set_ambush(pattern, Spring::SwallowAnswer);
    }

    /// Cuts the connection instead of passing the next request that holds `pattern` on: no effect,
    /// which the client cannot know.
    pub fn swallow_request(&self, pattern: &[u8]) {
        self.set_ambush(pattern, Spring::SwallowRequest);
    }

    /// Holds the next piece of a request that holds `pattern`, and whatever either side of its
    /// connection says after it, until [`pass`](Self::pass): it arrives then, though its client may
    /// be gone. What the client said before it has been delivered; other connections go on.
    pub fn hold_request(&self, pattern: &[u8]) {
        self.set_ambush(pattern, Spring::HoldRequest);
    }

    /// Passes the next request that holds `pattern` on to the server, and holds what the server
    /// says from then on, until [`pass`](Self::pass).
    pub fn hold_answer(&self, pattern: &[u8]) {
        self.set_ambush(pattern, Spring::HoldAnswer);
    }

    /// Waits until the request that was ordered to be swallowed or held has been; where it was to be
    /// swallowed, until its effect has been, too.
    ///
    /// # Panics
    /// Where none comes within `limit`.
    pub fn await_swallowed(&self, limit: Duration) {
        let deadline = Deadline::after(limit);
        let mut state = self.shared.lock();
        while state.ambush.is_some() || self.shared.swallowed.load(Ordering::SeqCst) == 0 {
            assert!(!deadline.passed(), "nothing was swallowed within {limit:?}");
            state = self.shared.wait(state, deadline.left());
        }
        self.shared.swallowed.store(0, Ordering::SeqCst);
    }

    /// What has gone over the wire so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let shared = &self.shared;
        Traffic {
            trips: shared.trips.load(Ordering::SeqCst),
            sent_bytes: shared.sent.load(Ordering::SeqCst),
            received_bytes: shared.received.load(Ordering::SeqCst),
            connections: shared.connections.load(Ordering::SeqCst),
        }
    }

    /// How many connections are open.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.shared.lock().open.len()
    }

    fn set(&self, mode: Mode) {
        let mut state = self.shared.lock();
        state.mode = mode;
        if mode == Mode::Pass {
            for connection in &state.open {
                connection.holds_requests.store(false, Ordering::SeqCst);
                connection.holds_answers.store(false, Ordering::SeqCst);
                if connection.torn.load(Ordering::SeqCst) {
                    connection.cut();
                }
            }
        }
        drop(state);
        self.shared.changed.notify_all();
        if mode == Mode::Refuse {
            // Wakes the accepting thread, which drops the listener.
            let _ = TcpStream::connect(self.address());
        }
    }

    fn set_ambush(&self, pattern: &[u8], spring: Spring) {
        self.shared.lock().ambush = Some(Ambush {
            pattern: pattern.to_vec(),
            spring,
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.cut();
        self.shared.changed.notify_all();
        let _ = TcpStream::connect(self.address());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn accept(self: Arc<Self>, first: TcpListener) {
        let mut listener = Some(first);
        loop {
            let accepted = listener.as_ref().map(TcpListener::accept);
            let mut state = self.lock();
            if state.closing {
                return;
            }
            if state.mode == Mode::Refuse {
                listener = None;
                drop(accepted);
                while state.mode == Mode::Refuse && !state.closing {
                    state = self.wait(state, Duration::from_secs(1));
                }
                continue;
            }
            drop(state);
            match accepted {
                Some(Ok((client, _))) => self.connect(client),
                Some(Err(_)) => {}
                None => listener = TcpListener::bind(("127.0.0.1", self.port)).ok(),
            }
        }
    }

    fn connect(self: &Arc<Self>, client: TcpStream) {
        self.connections.fetch_add(1, Ordering::SeqCst);
        // A server that is down shows as a connection that closes at once.
        let Ok(server) = TcpStream::connect_timeout(&self.to, Duration::from_secs(5)) else {
            return;
        };
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let connection = Arc::new(Connection {
            client,
            server,
            asked: AtomicBool::new(false),
            swallows: AtomicBool::new(false),
            torn: AtomicBool::new(false),
            holds_requests: AtomicBool::new(false),
            holds_answers: AtomicBool::new(false),
        });
        self.lock().open.push(Arc::clone(&connection));
        for upstream in [true, false] {
            let (shared, connection) = (Arc::clone(self), Arc::clone(&connection));
            thread::spawn(move || {
                let line = shared.lay_line(&connection, upstream);
                if upstream {
                    shared.upstream(&connection, &line);
                } else {
                    shared.downstream(&connection, &line);
                }
                line.run_dry();
                connection.cut();
                let mut state = shared.lock();
                state.open.retain(|open| !Arc::ptr_eq(open, &connection));
                drop(state);
                shared.changed.notify_all();
            });
        }
    }

    fn upstream(&self, connection: &Connection, line: &Line) {
        let mut buffer = vec![0; CHUNK_BYTES];
        // The end of the piece before, for a pattern that lies across two.
        let mut seen = Vec::new();
        while let Some(piece) = read(&connection.client, &mut buffer) {
            if !connection.asked.swap(true, Ordering::SeqCst) {
                self.trips.fetch_add(1, Ordering::SeqCst);
            }
            self.sent.fetch_add(piece.len() as u64, Ordering::SeqCst);
            seen.extend_from_slice(piece);
            match self.ambushed(&seen) {
                None => {}
                Some(Spring::SwallowAnswer) => connection.swallows.store(true, Ordering::SeqCst),
                Some(Spring::SwallowRequest) => {
                    connection.cut();
                    self.swallow();
                    return;
                }
                Some(Spring::HoldAnswer) => {
                    connection.holds_answers.store(true, Ordering::SeqCst);
                    self.swallow();
                }
                Some(Spring::HoldRequest) => {
                    // Both: an answer to a client that is gone would end the connection.
                    connection.holds_requests.store(true, Ordering::SeqCst);
                    connection.holds_answers.store(true, Ordering::SeqCst);
                    self.swallow();
                }
            }
            let keep_from = seen.len().saturating_sub(256);
            seen.drain(..keep_from);
            if !line.carry(piece) {
                return;
            }
        }
    }

    fn downstream(&self, connection: &Connection, line: &Line) {
        let mut buffer = vec![0; CHUNK_BYTES];
        while let Some(piece) = read(&connection.server, &mut buffer) {
            if connection.swallows.load(Ordering::SeqCst) {
                connection.cut();
                self.swallow();
                return;
            }
            connection.asked.store(false, Ordering::SeqCst);
            self.received
                .fetch_add(piece.len() as u64, Ordering::SeqCst);
            if !line.carry(piece) {
                return;
            }
        }
    }

    /// Whether an ambush is sprung by `seen`, and then what becomes of the request.
    fn ambushed(&self, seen: &[u8]) -> Option<Spring> {
        let mut state = self.lock();
        let ambush = state.ambush.as_ref()?;
        let pattern = &ambush.pattern;
        let hit = pattern.is_empty() || seen.windows(pattern.len()).any(|part| part == pattern);
        if !hit {
            return None;
        }
        state.ambush.take().map(|ambush| ambush.spring)
    }

    fn swallow(&self) {
        // Under the lock, so that a waiter between its look and its wait does not miss it.
        let state = self.lock();
        self.swallowed.fetch_add(1, Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
    }

    /// A line to the other side of a connection, on which pieces travel without waiting for each
    /// other.
    fn lay_line(self: &Arc<Self>, connection: &Arc<Connection>, upstream: bool) -> Line {
        let (entry, exit) = mpsc::channel::<(Instant, Vec<u8>)>();
        let (shared, connection) = (Arc::clone(self), Arc::clone(connection));
        let carrier = thread::spawn(move || {
            for (sent, piece) in exit {
                if !shared.deliver(&connection, upstream, sent, &piece) {
                    // Nobody hears the rest, so nobody need say it.
                    connection.cut();
                    return;
                }
            }
        });
        Line { entry, carrier }
    }

    /// Passes a piece on as the mode says; false where the connection is over.
    fn deliver(
        &self,
        connection: &Connection,
        upstream: bool,
        sent: Instant,
        piece: &[u8],
    ) -> bool {
        let mut state = self.lock();
        let delay = state.delay;
        drop(state);
        thread::sleep(delay.saturating_sub(sent.elapsed()));
        state = self.lock();
        while (state.mode == Mode::Hold || connection.holds(upstream)) && !state.closing {
            state = self.wait(state, Duration::from_secs(1));
        }
        if state.mode == Mode::BlackHole {
            connection.torn.store(true, Ordering::SeqCst);
            return true;
        }
        drop(state);
        let mut to = if upstream {
            &connection.server
        } else {
            &connection.client
        };
        to.write_all(piece).is_ok()
    }
}

/// One direction of a connection.
struct Line {
    entry: mpsc::Sender<(Instant, Vec<u8>)>,
    carrier: thread::JoinHandle<()>,
}

impl Line {
    /// Sends a piece on its way; false where the connection is over.
    fn carry(&self, piece: &[u8]) -> bool {
        self.entry.send((now(), piece.to_vec())).is_ok()
    }

    /// Waits until all is delivered.
    fn run_dry(self) {
        drop(self.entry);
        let _ = self.carrier.join();
    }
}

#[expect(clippy::disallowed_methods, reason = "a network takes real time")]
fn now() -> Instant {
    Instant::now()
}

impl Connection {
    fn holds(&self, upstream: bool) -> bool {
        let holds = if upstream {
            &self.holds_requests
        } else {
            &self.holds_answers
        };
        holds.load(Ordering::SeqCst)
    }

    fn cut(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

fn read<'b>(mut from: &TcpStream, buffer: &'b mut [u8]) -> Option<&'b [u8]> {
    let length = from.read(buffer).ok().filter(|length| *length > 0)?;
    buffer.get(..length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every byte with itself and counts them.
    fn echo() -> (SocketAddr, Arc<AtomicU64>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let counted = Arc::clone(&counted);
                thread::spawn(move || {
                    let mut byte = [0; 1];
                    while stream.read_exact(&mut byte).is_ok() {
                        counted.fetch_add(1, Ordering::SeqCst);
                        let _ = stream.write_all(&byte);
                    }
                });
            }
        });
        (address, count)
    }

    fn ask(stream: &mut TcpStream, byte: u8) -> Option<u8> {
        stream.write_all(&[byte]).ok()?;
        let mut answer = [0; 1];
        stream.read_exact(&mut answer).ok()?;
        Some(answer[0])
    }

    fn client(proxy: &Proxy) -> TcpStream {
        let stream = TcpStream::connect(proxy.address()).unwrap();
        let limit = Some(Duration::from_millis(300));
        stream.set_read_timeout(limit).unwrap();
        stream
    }

    #[test]
    fn trips_are_counted() {
        let (server, _) = echo();
        let proxy = Proxy::start(server);
        let mut stream = client(&proxy);
        for byte in 0..5 {
            assert_eq!(ask(&mut stream, byte), Some(byte));
        }
        let traffic = proxy.traffic();
        assert_eq!((traffic.trips, traffic.sent_bytes), (5, 5));
    }

    #[test]
    fn an_answer_is_lost_after_its_effect_and_a_request_before_it() {
        let (server, effects) = echo();
        let proxy = Proxy::start(server);
        let mut stream = client(&proxy);
        proxy.swallow_answer(b"x");
        assert_eq!(ask(&mut stream, b'a'), Some(b'a'));
        assert_eq!(ask(&mut stream, b'x'), None);
        proxy.await_swallowed(Duration::from_secs(5));
        assert_eq!(effects.load(Ordering::SeqCst), 2);
        proxy.swallow_request(b"");
        assert_eq!(ask(&mut client(&proxy), b'x'), None);
        proxy.await_swallowed(Duration::from_secs(5));
        assert_eq!(effects.load(Ordering::SeqCst), 2);
        assert_eq!(ask(&mut client(&proxy), b'x'), Some(b'x'));
    }

    #[test]
    fn one_request_is_held_before_its_effect_and_one_answer_after_it() {
        let (server, effects) = echo();
        let proxy = Proxy::start(server);
        let limit = Duration::from_secs(5);
        proxy.hold_request(b"x");
        let mut stream = client(&proxy);
        assert_eq!(ask(&mut stream, b'a'), Some(b'a'));
        assert_eq!(ask(&mut stream, b'x'), None);
        proxy.await_swallowed(limit);
        assert_eq!(ask(&mut client(&proxy), b'x'), Some(b'x'), "others go on");
        assert_eq!(effects.load(Ordering::SeqCst), 2);
        // It arrives, though its client is gone.
        drop(stream);
        proxy.pass();
        crate::eventually("it arrives", limit, || effects.load(Ordering::SeqCst) == 3);
        proxy.hold_answer(b"y");
        let mut stream = client(&proxy);
        assert_eq!(ask(&mut stream, b'y'), None);
        proxy.await_swallowed(limit);
        crate::eventually("its effect", limit, || effects.load(Ordering::SeqCst) == 4);
        proxy.pass();
        let mut late = [0; 1];
        stream.read_exact(&mut late).unwrap();
        assert_eq!(late[0], b'y');
    }

    #[test]
    fn what_is_held_arrives_later_and_what_is_black_holed_never() {
        let (server, effects) = echo();
        let proxy = Proxy::start(server);
        let mut stream = client(&proxy);
        proxy.hold();
        assert_eq!(ask(&mut stream, b'a'), None);
        assert_eq!(effects.load(Ordering::SeqCst), 0);
        proxy.pass();
        let mut late = [0; 1];
        stream.read_exact(&mut late).unwrap();
        assert_eq!(late[0], b'a');
        proxy.black_hole();
        assert_eq!(ask(&mut stream, b'b'), None);
        proxy.pass();
        assert_eq!(effects.load(Ordering::SeqCst), 1);
        assert_eq!(ask(&mut stream, b'c'), None, "a torn stream is cut");
    }

    #[test]
    fn new_connections_are_refused_until_it_passes_again() {
        let (server, _) = echo();
        let proxy = Proxy::start(server);
        let mut open = client(&proxy);
        assert_eq!(ask(&mut open, b'a'), Some(b'a'));
        proxy.refuse();
        assert!(TcpStream::connect(proxy.address()).is_err());
        assert_eq!(ask(&mut open, b'b'), Some(b'b'));
        proxy.pass();
        crate::eventually("connections", Duration::from_secs(5), || {
            TcpStream::connect(proxy.address()).is_ok()
        });
        proxy.cut();
        assert_eq!(ask(&mut open, b'c'), None);
    }
}
