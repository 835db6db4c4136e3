//! A proxy in front of an engine, one for each client: it cuts connections, delays what passes, and
//! swallows answers after their requests had their effect.
//!
//! It knows no protocol. What it has torn out of a stream it cannot mend, so a connection of which
//! it swallowed something is cut afterwards.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// How much passes in one step.
const CHUNK_BYTES: usize = 16 * 1024;

/// How long the engine may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// What the proxy does to what passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing.
    Pass,
    /// Holds each chunk for so long, in both directions.
    Delay(Duration),
    /// Lets requests through, and no answer.
    Swallow,
}

#[derive(Clone, Copy, Debug)]
struct Rule {
    mode: Mode,
    /// How often all connections were cut.
    cuts: u64,
}

/// A listening proxy. It ends, with all its connections, when it is dropped.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    rule: watch::Sender<Rule>,
    hits: Arc<AtomicU64>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// A proxy on a free port of the loopback interface, to `host:port`.
    pub(crate) async fn start(host: String, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
        let local = listener.local_addr()?.port();
        let (rule, rules) = watch::channel(Rule {
            mode: Mode::Pass,
            cuts: 0,
        });
        let hits = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&hits);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (host, rules, hits) = (host.clone(), rules.clone(), Arc::clone(&counted));
                tokio::spawn(async move {
                    let connecting = TcpStream::connect((host.as_str(), port));
                    if let Ok(Ok(server)) = tokio::time::timeout(CONNECT_LIMIT, connecting).await {
                        join(client, server, rules, hits).await;
                    }
                });
            }
        });
        Ok(Self {
            port: local,
            rule,
            hits,
            accepting,
        })
    }

    /// The port that clients connect to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// What is done to what passes from now on.
    pub(crate) fn set(&self, mode: Mode) {
        self.rule.send_modify(|rule| rule.mode = mode);
    }

    /// Cuts all connections.
    pub(crate) fn cut(&self) {
        self.rule.send_modify(|rule| rule.cuts += 1);
    }

    /// How many chunks and connections were harmed so far.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn join(
    client: TcpStream,
    server: TcpStream,
    rules: watch::Receiver<Rule>,
    hits: Arc<AtomicU64>,
) {
    // What is small must not wait for more.
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let cuts = rules.borrow().cuts;
    let pump = |from, to, answers| Pump {
        from,
        to,
        rules: rules.clone(),
        cuts,
        answers,
        torn: false,
        hits: Arc::clone(&hits),
    };
    // Where one direction ends, so does the other.
    tokio::select! {
        () = pump(from_client, to_server, false).run() => {}
        () = pump(from_server, to_client, true).run() => {}
    }
}

struct Pump {
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    rules: watch::Receiver<Rule>,
    cuts: u64,
    answers: bool,
    torn: bool,
    hits: Arc<AtomicU64>,
}

impl Pump {
    async fn run(mut self) {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = tokio::select! {
                read = self.from.read(&mut chunk) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(count) => count,
                },
                changed = self.rules.changed() => {
                    if changed.is_err() || self.is_cut() {
                        return;
                    }
                    continue;
                }
            };
            let mode = self.rules.borrow().mode;
            match mode {
                Mode::Pass => {}
                Mode::Delay(delay) => {
                    self.hit();
                    if !self.outlasts(delay).await {
                        return;
                    }
                }
                Mode::Swallow if self.answers => {
                    self.hit();
                    self.torn = true;
                    continue;
                }
                Mode::Swallow => {}
            }
            let Some(bytes) = chunk.get(..count) else {
                return;
            };
            if self.is_cut() || self.to.write_all(bytes).await.is_err() {
                return;
            }
        }
    }

    /// True where the connection was not cut within `delay`.
    async fn outlasts(&mut self, delay: Duration) -> bool {
        let over = tokio::time::sleep(delay);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => return true,
                changed = self.rules.changed() => {
                    if changed.is_err() || self.is_cut() {
                        return false;
                    }
                }
            }
        }
    }

    fn is_cut(&self) -> bool {
        let rule = *self.rules.borrow();
        if rule.cuts != self.cuts {
            // Each connection has two of us.
            if self.answers {
                self.hit();
            }
            return true;
        }
        self.torn && rule.mode != Mode::Swallow
    }

    fn hit(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Echoes bytes, and counts them.
    async fn echo() -> (u16, Arc<AtomicU64>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let counted = Arc::clone(&counted);
                tokio::spawn(async move {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).await.is_ok() {
                        counted.fetch_add(1, Ordering::SeqCst);
                        let _ = stream.write_all(&byte).await;
                    }
                });
            }
        });
        (port, seen)
    }

    async fn ask(stream: &mut TcpStream, limit: Duration) -> Option<u8> {
        stream.write_all(b"a").await.ok()?;
        let mut answer = [0];
        tokio::time::timeout(limit, stream.read_exact(&mut answer))
            .await
            .ok()?
            .ok()?;
        Some(answer[0])
    }

    const LONG: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(100);

    #[tokio::test]
    async fn an_answer_is_swallowed_after_its_effect_and_its_stream_is_cut() {
        let (port, seen) = echo().await;
        let proxy = Proxy::start("127.0.0.1".to_owned(), port).await.unwrap();
        let connect = || TcpStream::connect(("127.0.0.1", proxy.port()));
        let mut stream = connect().await.unwrap();
        assert_eq!(ask(&mut stream, LONG).await, Some(b'a'));
        proxy.set(Mode::Swallow);
        assert_eq!(ask(&mut stream, SHORT).await, None);
        while seen.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        while proxy.hits() == 0 {
            tokio::task::yield_now().await;
        }
        proxy.set(Mode::Pass);
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "it is cut");
        let mut stream = connect().await.unwrap();
        assert_eq!(ask(&mut stream, LONG).await, Some(b'a'));
    }

    #[tokio::test]
    async fn what_is_delayed_comes_late_and_a_cut_connection_ends() {
        let (port, seen) = echo().await;
        let proxy = Proxy::start("127.0.0.1".to_owned(), port).await.unwrap();
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port()))
            .await
            .unwrap();
        proxy.set(Mode::Delay(LONG));
        assert_eq!(ask(&mut stream, SHORT).await, None);
        assert_eq!(seen.load(Ordering::SeqCst), 0, "the request is held");
        proxy.set(Mode::Delay(SHORT / 10));
        proxy.cut();
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port()))
            .await
            .unwrap();
        assert_eq!(ask(&mut stream, LONG).await, Some(b'a'));
        assert!(proxy.hits() >= 3);
    }
}
