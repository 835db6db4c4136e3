//! Who waits for which lock: all of a store on one watch stream.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{
    WatchFilterType, WatchOptions, WatchRequestSender, WatchResponse, WatchResponseStream,
};
use tokio::sync::{mpsc, watch};

use super::connect::Link;
use super::failure::Failure;
use crate::backoff::Backoff;
use crate::lease::Watch;

/// The pauses between tries to have a stream.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The names that are waited for, each with those who wait.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// By the key under which a name's holders are.
    names: HashMap<String, Waited>,
    last_id: i64,
    /// To the task that has the stream; `None` before the first waiter.
    orders: Option<mpsc::UnboundedSender<Order>>,
}

#[derive(Debug)]
struct Waited {
    id: i64,
    changes: watch::Sender<()>,
}

#[derive(Debug)]
enum Order {
    Watch { id: i64, key: String, from: i64 },
    Leave { id: i64 },
}

impl Waiters {
    /// A waiter on a name's holders. It hears of whoever goes after the revision that the store
    /// knows now, whenever the stream comes to be.
    pub(super) fn join(&self, link: &Arc<Link>, key: String) -> EtcdWatch {
        let mut state = locked(&self.state);
        let from = link.revision() + 1;
        let changes = if let Some(waited) = state.names.get(&key) {
            waited.changes.subscribe()
        } else {
            state.last_id += 1;
            let id = state.last_id;
            let (sender, receiver) = watch::channel(());
            let waited = Waited {
                id,
                changes: sender,
            };
            state.names.insert(key.clone(), waited);
            let order = Order::Watch {
                id,
                key: key.clone(),
                from,
            };
            // A task that ended with its runtime is replaced; it begins with all that is waited
            // for.
            let unsent = match &state.orders {
                Some(orders) => orders.send(order).is_err(),
                None => true,
            };
            if unsent {
                let (sender, orders) = mpsc::unbounded_channel();
                state.orders = Some(sender);
                let task = Task {
                    link: Arc::clone(link),
                    state: Arc::clone(&self.state),
                };
                tokio::spawn(task.run(orders, from));
            }
            receiver
        };
        EtcdWatch {
            state: Arc::clone(&self.state),
            key,
            changes: Some(changes),
        }
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        // The task ends with its orders, though watches still share the state.
        locked(&self.state).orders = None;
    }
}

struct Task {
    link: Arc<Link>,
    state: Arc<Mutex<State>>,
}

impl Task {
    async fn run(self, mut orders: mpsc::UnboundedReceiver<Order>, mut from: i64) {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        loop {
            if self.is_idle() {
                // No stream for nobody.
                match orders.recv().await {
                    None => return,
                    Some(Order::Leave { .. }) => continue,
                    Some(Order::Watch { from: since, .. }) => from = since,
                }
            }
            match self.open(from).await {
                Ok((sender, stream)) => {
                    backoff.reset();
                    // What changed before the stream was there is replayed from `from`, unless
                    // that is compacted.
                    if self.serve(&mut orders, sender, stream).await.is_none() {
                        return;
                    }
                    self.link.discard().await;
                }
                Err(failure) => {
                    let error = crate::Error::from(failure);
                    tracing::debug!(%error, "no watch stream; waiting by polling");
                }
            }
            from = self.link.revision() + 1;
            // Whatever was missed is found by asking.
            self.wake_all();
            tokio::time::sleep(backoff.next()).await;
            if orders.is_closed() {
                return;
            }
        }
    }

    /// A stream with all that is waited for.
    async fn open(&self, from: i64) -> Result<(WatchRequestSender, WatchResponseStream), Failure> {
        let client = self.link.client().await?;
        let waited: Vec<(i64, String)> = {
            let state = locked(&self.state);
            let all = state.names.iter();
            all.map(|(key, waited)| (waited.id, key.clone())).collect()
        };
        let mut waited = waited.into_iter();
        let Some((id, key)) = waited.next() else {
            return Err(Failure::silent(Duration::ZERO));
        };
        let limit = Duration::from_secs(3);
        let mut watches = client.watch_client();
        let stream = watches.watch(key, Some(options(id, from)));
        let stream = match tokio::time::timeout(limit, stream).await {
            Ok(stream) => stream.map_err(Failure::answering)?,
            Err(_) => return Err(Failure::silent(limit)),
        };
        let (mut sender, stream) = stream.split();
        for (id, key) in waited {
            let asked = sender.watch(key, Some(options(id, from))).await;
            asked.map_err(Failure::answering)?;
        }
        Ok((sender, stream))
    }

    /// Until the stream breaks; `None` where nobody needs it any more.
    async fn serve(
        &self,
        orders: &mut mpsc::UnboundedReceiver<Order>,
        mut sender: WatchRequestSender,
        mut stream: WatchResponseStream,
    ) -> Option<()> {
        loop {
            tokio::select! {
                order = orders.recv() => {
                    let sent = match order? {
                        Order::Watch { id, key, from } => {
                            sender.watch(key, Some(options(id, from))).await
                        }
                        Order::Leave { id } => sender.cancel(id).await,
                    };
                    if sent.is_err() {
                        return Some(());
                    }
                }
                message = stream.message() => match message {
                    Ok(Some(message)) => {
                        if let Some((id, key)) = self.hear(&message) {
                            let from = message.compact_revision();
                            if sender.watch(key, Some(options(id, from))).await.is_err() {
                                return Some(());
                            }
                        }
                    }
                    Ok(None) | Err(_) => return Some(()),
                },
            }
        }
    }

    /// Wakes whom a message concerns, and says what has to be watched anew.
    fn hear(&self, message: &WatchResponse) -> Option<(i64, String)> {
        if message.events().is_empty() && !message.canceled() {
            return None;
        }
        let mut state = locked(&self.state);
        let next_id = state.last_id + 1;
        let (key, waited) = state
            .names
            .iter_mut()
            .find(|(_, waited)| waited.id == message.watch_id())?;
        waited.changes.send_replace(());
        if message.compact_revision() == 0 {
            return None;
        }
        // A server takes no id twice on one stream, not even that of a watch that it ended.
        waited.id = next_id;
        let anew = (next_id, key.clone());
        state.last_id = next_id;
        Some(anew)
    }

    fn wake_all(&self) {
        for waited in locked(&self.state).names.values() {
            waited.changes.send_replace(());
        }
    }

    fn is_idle(&self) -> bool {
        locked(&self.state).names.is_empty()
    }
}

/// Only the end of a holder makes room.
fn options(id: i64, from: i64) -> WatchOptions {
    WatchOptions::new()
        .with_prefix()
        .with_watch_id(id)
        .with_start_revision(from)
        .with_filters([WatchFilterType::NoPut])
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One waiter.
#[derive(Debug)]
pub(super) struct EtcdWatch {
    state: Arc<Mutex<State>>,
    key: String,
    /// `None` only while it is dropped.
    changes: Option<watch::Receiver<()>>,
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn changed(&mut self) {
        // The channel counts versions, so a change between two calls is seen by the second.
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}

impl Drop for EtcdWatch {
    fn drop(&mut self) {
        let mut state = locked(&self.state);
        // Under the lock, as receivers are made: of two that leave at once, the second sees that
        // it is the last.
        self.changes = None;
        if let Some(waited) = state.names.get(&self.key)
            && waited.changes.receiver_count() == 0
        {
            let id = waited.id;
            state.names.remove(&self.key);
            if let Some(orders) = &state.orders {
                // Nobody needs it cancelled where the task has ended.
                let _ = orders.send(Order::Leave { id });
            }
        }
    }
}
