//! The places of the clients, and the processes that fill them.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Pid;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use super::super::client;
use super::super::plan::{Fault, Lane, Orders};
use super::super::proxy::Proxy;
use super::super::route::Route;
use super::{Due, Play, Told, micros};
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// How long a client that ended waits for its next life, and one that could not begin.
const REBIRTH: Duration = Duration::from_millis(100);
const REBIRTH_FAILED: Duration = Duration::from_millis(500);

/// A client's place, which several processes fill one after another.
pub(super) struct Seat {
    pub(super) process: Option<Child>,
    /// Kept open until the run is over.
    pub(super) input: Option<ChildStdin>,
    pub(super) pid: Option<Pid>,
    pub(super) life: u32,
    pub(super) sections: u64,
    pub(super) nap: Option<Nap>,
    /// Stopped by us until its `Rouse`.
    pub(super) stopped: bool,
    pub(super) proxies: Vec<Proxy>,
    /// What its proxies did, and how much they had harmed before.
    pub(super) trouble: Option<(Fault, u64)>,
}

/// A pause that a client took by itself, and has not told to be over.
#[derive(Clone, Copy)]
pub(super) struct Nap {
    pub(super) lane: Lane,
    pub(super) set: u32,
    pub(super) token: u64,
    /// When it may be woken at the earliest.
    pub(super) ripe_us: u64,
    /// Wake it between the next holder's reading and writing.
    pub(super) is_hunting: bool,
}

impl Play<'_> {
    /// Starts the next process of a seat.
    pub(super) async fn bear(&mut self, at: usize) -> Result<()> {
        let cannot = |e: io::Error| Failure::system("a client cannot be started", e);
        let plan = self.stage.plan;
        let Some(seat) = self.seats.get_mut(at) else {
            return Ok(());
        };
        let mut store = self.stage.store.clone();
        let mut storages = self.stage.storages.clone();
        for (server, proxy) in self.route.servers().iter().zip(&seat.proxies) {
            store = Route::through(&store, server, proxy.port());
            for storage in &mut storages {
                storage.dest = Route::through(&storage.dest, server, proxy.port());
            }
        }
        let orders = Orders {
            client: u32::try_from(at).unwrap_or(u32::MAX),
            life: seat.life,
            seed: plan.seed,
            start_nanos: self.stage.watch.start_nanos(),
            until_us: micros(plan.duration),
            ttl_us: micros(plan.ttl),
            sections: seat.sections,
            arms: plan.arms.clone(),
            lanes: plan.lanes.clone(),
            faults: plan.faults.clone(),
            store,
            locks: self.stage.locks.clone(),
            sets: plan.locks,
            storages,
        };
        // On the main thread: the death signal follows the thread that spawned.
        let mut process = Command::new("/proc/self/exe")
            .arg0("fencelock")
            .arg(client::ARG)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A terminal's signals are for us, who end the run in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(cannot)?;
        let (Some(mut input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Failure::new(
                exit_codes::INDETERMINATE,
                "a client has no pipes",
            ));
        };
        let mut line = serde_json::to_vec(&orders).map_err(|e| cannot(io::Error::other(e)))?;
        line.push(b'\n');
        // One that dies at once is noticed by its end.
        let _ = input.write_all(&line).await;
        seat.pid = process
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        seat.process = Some(process);
        seat.input = Some(input);
        seat.nap = None;
        seat.stopped = false;
        let (life, teller) = (seat.life, self.teller.clone());
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(event) = serde_json::from_str(&line) {
                    let event = Some(event);
                    let seat = at;
                    let _ = teller.send(Told { seat, life, event });
                }
            }
            let _ = teller.send(Told {
                seat: at,
                life,
                event: None,
            });
        });
        Ok(())
    }

    /// A process of a seat has ended.
    pub(super) async fn mourn(&mut self, at: usize) -> Result<()> {
        let Some(seat) = self.seats.get_mut(at) else {
            return Ok(());
        };
        if let Some(mut process) = seat.process.take() {
            process
                .wait()
                .await
                .map_err(|e| Failure::system("a client cannot be waited for", e))?;
        }
        seat.pid = None;
        seat.input = None;
        seat.nap = None;
        seat.life += 1;
        let is_late = self.stage.watch.now() >= micros(self.stage.plan.duration);
        if self.is_ending || is_late || seat.sections == 0 {
            return Ok(());
        }
        let rest = match self.failure {
            Some(_) => REBIRTH_FAILED,
            None => REBIRTH,
        };
        self.after(rest, Due::Bear(at));
        Ok(())
    }
}
