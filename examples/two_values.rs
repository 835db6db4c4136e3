//! A job that changes two values under one lock, and loses nothing when one of two runs is paused
//! beyond its lease: on any store and storage, by their URLs.
//!
//! 1. **Raise all before reading any**: from then on no older holder can write to either.
//! 2. Read, which a raise does in the same step, and compute.
//! 3. Put. A holder that was overtaken in between is refused.
//!
//! What fencing does not give is all-or-nothing over the two: a holder that dies between its puts
//! leaves the first. So this one writes down what it is about to do, together with the first value,
//! and whoever comes next finishes it.
//!
//! `cargo run --example two_values --all-features -- STORE FROM TO AMOUNT`, as in
//! `… -- file:///tmp/locks /tmp/alice /tmp/bob 5`

use fencelock::fence::Snapshot;
use fencelock::{ErrorKind, Fenced, LockGuard, Locks, ResourceName};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A fenced value: a storage, and a name in it.
struct Account {
    storage: Fenced,
    name: ResourceName,
}

/// What an account holds: its balance, the number of transfers that it has seen, and one that is
/// under way from here.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
struct State {
    balance: i64,
    transfers: u64,
    sends: i64,
}

impl Account {
    async fn open(destination: &str) -> Outcome<Self> {
        let (storage, name) = fencelock::open::destination(destination).await?;
        Ok(Self { storage, name })
    }

    /// Lets no older holder write here any more, and reads.
    async fn raise(&self, guard: &LockGuard) -> Outcome<State> {
        let Snapshot { value, .. } = self.storage.raise(&self.name, guard).await?;
        match value {
            None => Ok(State::default()),
            Some(value) => Ok(serde_json::from_slice(&value.into_bytes(4096)?)?),
        }
    }

    async fn put(&self, state: &State, guard: &LockGuard) -> Outcome<()> {
        let text = serde_json::to_string(state)?;
        self.storage.put(&self.name, text, guard).await?;
        Ok(())
    }
}

/// Moves `amount` from one account to the other; true unless somebody newer was faster.
pub(crate) async fn transfer(store: &str, from: &str, to: &str, amount: i64) -> Outcome<bool> {
    let locks = Locks::open(store).await?;
    let (from, to) = (Account::open(from).await?, Account::open(to).await?);
    let guard = locks.acquire("transfers").await?;
    let moved = transfer_under(&guard, &from, &to, amount).await;
    guard.release().await?;
    match moved {
        Ok(()) => Ok(true),
        Err(error) => match error.downcast_ref::<fencelock::Error>() {
            // We were paused, and somebody else has the lock: nothing of ours was written since.
            Some(refusal) if refusal.kind() == ErrorKind::Fenced => Ok(false),
            _ => Err(error),
        },
    }
}

async fn transfer_under(
    guard: &LockGuard,
    from: &Account,
    to: &Account,
    amount: i64,
) -> Outcome<()> {
    // All, before anything is made of what was read.
    let (first, second) = (from.raise(guard).await?, to.raise(guard).await?);
    let (first, second) = finish(guard, from, to, first, second).await?;
    let begun = State {
        balance: first.balance - amount,
        transfers: first.transfers + 1,
        sends: amount,
    };
    from.put(&begun, guard).await?;
    finish(guard, from, to, begun, second).await?;
    Ok(())
}

/// Finishes the transfer that is under way, perhaps one of a holder that died in the middle of it.
async fn finish(
    guard: &LockGuard,
    from: &Account,
    to: &Account,
    mut first: State,
    mut second: State,
) -> Outcome<(State, State)> {
    if first.sends != 0 {
        // It has arrived where the other account has seen as many transfers.
        if second.transfers < first.transfers {
            second.balance += first.sends;
            second.transfers = first.transfers;
            to.put(&second, guard).await?;
        }
        first.sends = 0;
        from.put(&first, guard).await?;
    }
    Ok((first, second))
}

#[tokio::main(flavor = "current_thread")]
#[cfg_attr(test, expect(dead_code, reason = "a test calls what it calls"))]
async fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [store, from, to, amount] = args.as_slice() else {
        return Err("usage: two_values STORE FROM TO AMOUNT".into());
    };
    if !transfer(store, from, to, amount.parse()?).await? {
        return Err("somebody newer has the lock; nothing was moved".into());
    }
    Ok(())
}
