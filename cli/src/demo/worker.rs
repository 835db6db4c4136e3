//! A process of the demo: takes the lock, waits for the word, writes. It knows nothing of the other
//! process, and it does what a careful program does: it looks at its lock before it writes. It is
//! paused after that look.

use std::ffi::OsString;
use std::io::{self, BufRead as _, Write as _};
use std::time::Duration;

use fencelock::{ErrorKind, Fence, LockGuard, LockName};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::{Report, TTL};
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::fenced::Destination;
use crate::store::StoreUrl;

/// The hidden first argument that makes the executable be this process.
pub(crate) const ARG: &str = "__demo-worker";

/// How long a worker waits for the lock.
const WAIT: Duration = Duration::from_secs(10);

/// What a worker is told on its command line. The store comes through the environment, as its URL
/// may hold a password.
#[derive(Debug)]
struct Orders {
    name: LockName,
    dest: String,
    value: String,
    checked: bool,
}

/// Is a worker. The arguments are the lock, the destination, the value, and `checked` or
/// `unchecked`.
pub(crate) fn main(args: impl Iterator<Item = OsString>) -> Failure {
    match start(args) {
        Ok(()) => Failure::quiet(exit_codes::OK),
        Err(failure) => failure,
    }
}

fn start(mut args: impl Iterator<Item = OsString>) -> Result<()> {
    // A demo that is interrupted leaves nobody behind, paused or not.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::system("the death signal cannot be set", e))?;
    let mut text = || args.next().and_then(|arg| arg.into_string().ok());
    let (Some(name), Some(dest), Some(value), Some(checked)) = (text(), text(), text(), text())
    else {
        return Err(Failure::usage(format!(
            "{ARG} is internal to fencelock demo"
        )));
    };
    let orders = Orders {
        name: LockName::new(&name)?,
        dest,
        value,
        checked: checked == "checked",
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("the runtime cannot be started", e))?;
    runtime.block_on(work(&orders))
}

async fn work(orders: &Orders) -> Result<()> {
    let locks = StoreUrl::resolve(env::text(env::STORE)?.as_deref())?
        .open()
        .await?;
    let guard = locks.acquire(&orders.name).ttl(TTL).wait(WAIT).await?;
    // The look before the write. It succeeds; what comes after it is the pause.
    guard.check()?;
    let fence = guard.fence();
    tell(&Report::Acquired(guard.token()))?;
    wait_for_the_word()?;
    tell(&write(orders, &fence).await?)?;
    wait_for_the_word()?;
    end(guard).await;
    Ok(())
}

async fn write(orders: &Orders, fence: &Fence) -> Result<Report> {
    if !orders.checked {
        std::fs::write(&orders.dest, &orders.value)
            .map_err(|e| Failure::system(&orders.dest, e))?;
        return Ok(Report::Unchecked);
    }
    let destination = Destination::open(&orders.dest).await?;
    match destination.put(orders.value.clone(), fence).await {
        Ok(written) => Ok(Report::Accepted(written.watermark.token)),
        Err(error) => match (error.kind(), error.watermark()) {
            (ErrorKind::Fenced, Some(watermark)) => Ok(Report::Refused(watermark)),
            _ => Err(error.into()),
        },
    }
}

/// A guard that was lost, as A's was, has nothing to release.
async fn end(guard: LockGuard) {
    let _ = guard.release().await;
}

fn tell(report: &Report) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{report}")?;
    out.flush()?;
    Ok(())
}

fn wait_for_the_word() -> Result<()> {
    let mut line = String::new();
    io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|e| Failure::system("standard input", e))?;
    Ok(())
}
