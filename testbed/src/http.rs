//! An HTTP/1.1 proxy that meddles with chosen requests: what a network and a server under load do
//! to a conditional write.
//!
//! One request a connection, which is enough for a test and leaves no state behind.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::port::Port;

/// What becomes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not delivered; the client is answered with this status.
    Answer(u16),
    /// It is delivered, and its answer replaced by this status: a lost answer.
    AnswerAfter(u16),
    /// It is delivered, and the connection closed without an answer.
    Hang,
    /// It is delivered twice; the second answer counts.
    Twice,
    /// It is delivered after this long, and the client gets no answer before.
    Late(Duration),
}

/// The proxy. Ends when it is dropped.
#[derive(Debug)]
pub struct Meddler {
    port: Port,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Header names, lowercase, that no request keeps.
    stripped: Vec<String>,
    /// The next requests whose head holds the text meet the fault.
    ambushes: Vec<(String, Fault, u32)>,
    heads: Vec<String>,
    closing: bool,
}

struct Request {
    head: Vec<String>,
    body: Vec<u8>,
}

impl Meddler {
    /// A proxy in front of `to` that passes everything.
    ///
    /// # Panics
    /// Where it cannot listen.
    #[must_use]
    pub fn start(to: SocketAddr) -> Self {
        let port = Port::free();
        let shared = Arc::new(Shared {
            to,
            state: Mutex::default(),
        });
        let listener = TcpListener::bind(("127.0.0.1", port.number())).expect("a listener");
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if accepting.state(|state| state.closing) {
                    return;
                }
                let serving = Arc::clone(&accepting);
                thread::spawn(move || {
                    // A client that went away is no matter of the test.
                    let _ = serving.serve(client);
                });
            }
        });
        Self { port, shared }
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port.number()))
    }

    /// Takes this header out of every request from now on.
    pub fn strip(&self, header: &str) {
        let header = header.to_ascii_lowercase();
        self.shared.state(|state| state.stripped.push(header));
    }

    /// The next `times` requests whose head, in lowercase, holds `text` meet the fault.
    pub fn ambush(&self, text: &str, fault: Fault, times: u32) {
        let text = text.to_ascii_lowercase();
        self.shared
            .state(|state| state.ambushes.push((text, fault, times)));
    }

    /// How many requests came whose head, in lowercase, holds `text`.
    #[must_use]
    pub fn count(&self, text: &str) -> usize {
        let text = text.to_ascii_lowercase();
        self.shared.state(|state| {
            state
                .heads
                .iter()
                .filter(|head| head.contains(&text))
                .count()
        })
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.shared.state(|state| state.closing = true);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address());
    }
}

impl Shared {
    fn state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn serve(&self, mut client: TcpStream) -> std::io::Result<()> {
        let request = Request::read(&mut client)?;
        let head = request.head.join("\n").to_ascii_lowercase();
        let (stripped, fault) = self.state(|state| {
            state.heads.push(head.clone());
            let at = state
                .ambushes
                .iter()
                .position(|(text, ..)| head.contains(text));
            let fault = at.map(|at| {
                let ambush = &mut state.ambushes[at];
                ambush.2 -= 1;
                let fault = ambush.1;
                if ambush.2 == 0 {
                    state.ambushes.remove(at);
                }
                fault
            });
            (state.stripped.clone(), fault)
        });
        let deliver = || request.deliver(self.to, &stripped);
        let answer = match fault {
            None => deliver()?,
            Some(Fault::Answer(status)) => own_answer(status),
            Some(Fault::AnswerAfter(status)) => {
                deliver()?;
                own_answer(status)
            }
            Some(Fault::Hang) => {
                deliver()?;
                return Ok(());
            }
            Some(Fault::Twice) => {
                deliver()?;
                deliver()?
            }
            Some(Fault::Late(delay)) => {
                thread::sleep(delay);
                deliver()?
            }
        };
        client.write_all(&answer)
    }
}

impl Request {
    fn read(client: &mut TcpStream) -> std::io::Result<Self> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            head.push(line);
        }
        let value = |name: &str| {
            head.iter().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name)
                    .then(|| value.trim().to_owned())
            })
        };
        if value("expect").is_some() {
            client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        let length = value("content-length").and_then(|v| v.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        Ok(Self { head, body })
    }

    fn deliver(&self, to: SocketAddr, stripped: &[String]) -> std::io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(to)?;
        let mut bytes = Vec::new();
        for line in &self.head {
            let name = line
                .split(':')
                .next()
                .unwrap_or_default()
                .to_ascii_lowercase();
            if name != "connection" && !stripped.contains(&name) {
                bytes.extend_from_slice(line.as_bytes());
                bytes.extend_from_slice(b"\r\n");
            }
        }
        bytes.extend_from_slice(b"Connection: close\r\n\r\n");
        bytes.extend_from_slice(&self.body);
        server.write_all(&bytes)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        Ok(answer)
    }
}

fn own_answer(status: u16) -> Vec<u8> {
    let body = "<Error><Code>Meddled</Code><Message>by the test</Message></Error>";
    format!(
        "HTTP/1.1 {status} Meddled\r\nContent-Type: application/xml\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}
