//! A client process: its hands enter critical sections, and tell its parent what they do before and
//! after they do it. It is a careful program, which looks at its lock right before it writes;
//! whatever overtakes it does so after that look.
//!
//! All hands are on one thread, each in a set of locks of its own. So one pause of the process strikes
//! as many holders as hold something.

mod hand;
mod update;

use std::ffi::OsString;
use std::io::{self, BufRead as _, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fencelock::{Fenced, Locks};
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::task::JoinSet;

use self::hand::Hand;
pub(crate) use self::update::{halves, measured};
use super::history::{Event, LINE_MAX_BYTES, Op, Watch};
use super::plan::Orders;
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The hidden first argument that makes the executable be a client.
pub(crate) const ARG: &str = "__torture-client";

/// The longest value that is read: far more than a page of a lock comes to.
pub(crate) const VALUE_MAX_BYTES: u64 = 8 << 20;

/// How long what is left to the background may take at the end.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// Is a client.
pub(crate) fn main(_: impl Iterator<Item = OsString>) -> Failure {
    match start() {
        Ok(()) => Failure::quiet(exit_codes::OK),
        Err(failure) => failure,
    }
}

fn start() -> Result<()> {
    // A run that is killed leaves no client behind, stopped or not.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::system("the death signal cannot be set", e))?;
    let mut line = String::new();
    io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|e| Failure::system("standard input", e))?;
    let orders: Orders = serde_json::from_str(&line)
        .map_err(|_| Failure::usage(format!("{ARG} is internal to fencelock torture")))?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    // The parent closes our input when the run is over.
    std::thread::spawn(move || {
        let _ = io::stdin().lock().read_to_end(&mut Vec::new());
        stopped.store(true, Ordering::Relaxed);
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("the runtime cannot be started", e))?;
    runtime.block_on(async {
        let watch = Watch::started_at(orders.start_nanos);
        match Client::open(orders, watch.clone(), stop).await {
            Ok(client) => run(client).await,
            Err(failure) => tell(
                0,
                &Event::Failed {
                    t: watch.now(),
                    message: failure.to_string(),
                },
            ),
        }
    })
}

/// What the hands of a process share.
struct Client {
    orders: Orders,
    watch: Watch,
    locks: Locks,
    storages: Vec<Fenced>,
    /// How many updates this life has begun.
    updates: AtomicU64,
    /// How many sections it has begun.
    sections: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl Client {
    async fn open(orders: Orders, watch: Watch, stop: Arc<AtomicBool>) -> Result<Self> {
        let locks = Locks::open(&orders.store).await?;
        let mut storages = Vec::new();
        for storage in &orders.storages {
            storages.push(fencelock::open::destination(&storage.dest).await?.0);
        }
        Ok(Self {
            orders,
            watch,
            locks,
            storages,
            updates: AtomicU64::new(0),
            sections: AtomicU64::new(0),
            stop,
        })
    }

    /// True where another section may begin, which it does.
    fn may_begin(&self) -> bool {
        let is_over = self.stop.load(Ordering::Relaxed) || self.watch.now() >= self.orders.until_us;
        !is_over && self.sections.fetch_add(1, Ordering::Relaxed) < self.orders.sections
    }

    /// The id of a new update.
    fn update(&self) -> Op {
        Op {
            client: self.orders.client,
            life: self.orders.life,
            // Leaves a number for a second update of the same section.
            number: (self.updates.fetch_add(1, Ordering::Relaxed) + 1) * 2,
        }
    }
}

async fn run(client: Client) -> Result<()> {
    tell(
        0,
        &Event::Ready {
            t: client.watch.now(),
        },
    )?;
    let client = Arc::new(client);
    let mut hands = JoinSet::new();
    for set in 0..client.orders.sets {
        hands.spawn(Hand::new(Arc::clone(&client), set).run());
    }
    while let Some(ended) = hands.join_next().await {
        ended.map_err(|e| Failure::system("a hand of the client", io::Error::other(e)))??;
    }
    // What is not given back lapses.
    let _ = tokio::time::timeout(DRAIN_LIMIT, client.locks.drain()).await;
    Ok(())
}

/// One line to the parent, in one piece.
fn tell(page: u32, event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(&(page, event))
        .map_err(|e| Failure::system("an event cannot be told", io::Error::other(e)))?;
    line.push(b'\n');
    if line.len() > LINE_MAX_BYTES {
        return Err(Failure::new(
            exit_codes::INDETERMINATE,
            format!(
                "an event is too long to be told in one piece: {} bytes",
                line.len()
            ),
        ));
    }
    loop {
        match rustix::io::write(io::stdout(), &line) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::system("standard output", error)),
        }
    }
}
