//! Hints for waiters: one connection listens for all of them.
//!
//! A notification is sent by the function that releases, at its commit. The connection is made for
//! the first waiter, and made again when it is lost; then all waiters look once, since something
//! may have been missed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sha2::{Digest as _, Sha256};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_postgres::types::Type;

use super::connect::{OnNotification, Session, Target};
use super::database::{Database, Lane};
use super::sql::Schema;
use crate::backoff::Backoff;
use crate::error::Result;
use crate::fence::hex;
use crate::lease::Watch;
use crate::name::LockName;
use crate::random;

/// How long a LISTEN may take. A waiter that is not heard by then polls until it is.
const LISTEN_LIMIT: Duration = Duration::from_secs(2);

/// How long a notification to ourselves may take at the opening, after its commit was answered.
/// Behind a pooler this is waited out, unless `listen=false` says so beforehand.
const HEARD_LIMIT: Duration = Duration::from_secs(1);

/// The pauses between tries to connect.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Listens on one connection for all waiters of a store.
pub(super) struct Listener {
    target: Target,
    schema: Schema,
    channels: Arc<Channels>,
    /// To the task that has the connection; closed where there is none.
    orders: Mutex<mpsc::UnboundedSender<Order>>,
}

/// Who waits on which channel.
#[derive(Default)]
struct Channels(Mutex<HashMap<String, watch::Sender<()>>>);

enum Order {
    /// Listen on this channel, and say when that is so.
    Listen(String, oneshot::Sender<()>),
    /// Nobody waits on it any more.
    Unlisten(String),
}

/// One waiter.
pub(super) struct PostgresWatch {
    listener: Arc<Listener>,
    channel: String,
    /// `None` only while it is dropped.
    changes: Option<watch::Receiver<()>>,
}

impl Listener {
    pub(super) fn new(target: Target, schema: Schema) -> Arc<Self> {
        // Its receiver is gone: the first order starts the task.
        let (orders, _) = mpsc::unbounded_channel();
        Arc::new(Self {
            target,
            schema,
            channels: Arc::default(),
            orders: Mutex::new(orders),
        })
    }

    /// True where a notification reaches us. Behind a pooler that shares connections, LISTEN
    /// succeeds on a connection that is another client's a moment later.
    pub(super) async fn hears(self: &Arc<Self>, database: &Database) -> Result<bool> {
        let channel = format!("fencelock_probe_{}", hex(&random::id()));
        let mut probe = self.watch_channel(channel.clone()).await;
        database
            .query(
                Lane::Ask,
                "SELECT pg_notify($1, '')",
                &[(&channel, Type::TEXT)],
            )
            .await?;
        Ok(tokio::time::timeout(HEARD_LIMIT, probe.heard())
            .await
            .is_ok())
    }

    /// A watch on a lock. Where listening cannot be confirmed in time it is made all the same, and
    /// answers once it is.
    pub(super) async fn watch(self: &Arc<Self>, name: &LockName) -> PostgresWatch {
        self.watch_channel(channel(&self.schema, name)).await
    }

    async fn watch_channel(self: &Arc<Self>, channel: String) -> PostgresWatch {
        let (confirm, confirmed) = oneshot::channel();
        let mut changes = {
            // Both under one lock, so that orders come in the order of the map's changes.
            let mut channels = self.channels.lock();
            let changes = channels
                .entry(channel.clone())
                .or_insert_with(|| watch::channel(()).0)
                .subscribe();
            self.order(Order::Listen(channel.clone(), confirm));
            changes
        };
        if let Ok(Ok(())) = tokio::time::timeout(LISTEN_LIMIT, confirmed).await {
            // From here on nothing is missed, and what was before is seen by the next attempt.
            changes.mark_unchanged();
        }
        PostgresWatch {
            listener: Arc::clone(self),
            channel,
            changes: Some(changes),
        }
    }

    /// Drops the connection, so that the next one belongs to whichever runtime asks for it.
    pub(super) fn forget_connection(&self) {
        let (closed, _) = mpsc::unbounded_channel();
        *self.orders() = closed;
    }

    fn order(&self, order: Order) {
        let mut orders = self.orders();
        if let Err(mpsc::error::SendError(order)) = orders.send(order) {
            let (sender, receiver) = mpsc::unbounded_channel();
            // The receiver lives in the task that starts now.
            let _ = sender.send(order);
            *orders = sender;
            let task = Task {
                target: self.target.clone(),
                channels: Arc::clone(&self.channels),
                orders: receiver,
                unconfirmed: Vec::new(),
            };
            tokio::spawn(task.run());
        }
    }

    fn orders(&self) -> MutexGuard<'_, mpsc::UnboundedSender<Order>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channels {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<()>>> {
        // Each change is one insertion or removal, so a panic elsewhere does not spoil the map.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, channel: &str) {
        if let Some(changes) = self.lock().get(channel) {
            changes.send_replace(());
        }
    }

    fn wake_all(&self) {
        for changes in self.lock().values() {
            changes.send_replace(());
        }
    }
}

/// What has the connection.
struct Task {
    target: Target,
    channels: Arc<Channels>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// Who is to be told once the connection is there.
    unconfirmed: Vec<oneshot::Sender<()>>,
}

impl Task {
    /// Runs until the last order-giver is gone.
    async fn run(mut self) {
        let mut backoff = Backoff::new(RECONNECT.0, RECONNECT.1);
        loop {
            let channels = Arc::clone(&self.channels);
            let hear: OnNotification = Arc::new(move |channel| channels.wake(channel));
            match self.target.connect(Some(hear)).await {
                Ok(session) => {
                    backoff.reset();
                    if self.serve(&session).await {
                        return;
                    }
                    session.cut();
                }
                Err(error) => {
                    tracing::debug!(%error, "no connection to listen on; waiters poll meanwhile");
                }
            }
            // Orders wait in the map; only the end of all order-givers matters here.
            let pause = tokio::time::sleep(backoff.next());
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    order = self.orders.recv() => match order {
                        Some(Order::Listen(_, confirm)) => self.unconfirmed.push(confirm),
                        Some(Order::Unlisten(_)) => {}
                        None => return,
                    }
                }
            }
        }
    }

    /// Listens on one connection; false where it was lost.
    async fn serve(&mut self, session: &Session) -> bool {
        let mut listening = HashSet::new();
        let known: Vec<String> = self.channels.lock().keys().cloned().collect();
        for channel in known {
            if !listen(session, &channel).await {
                return false;
            }
            listening.insert(channel);
        }
        for confirm in self.unconfirmed.drain(..) {
            let _ = confirm.send(());
        }
        self.channels.wake_all();
        loop {
            let order = tokio::select! {
                order = self.orders.recv() => order,
                () = session.ended() => return false,
            };
            match order {
                None => return true,
                Some(Order::Listen(channel, confirm)) => {
                    if !listening.contains(&channel) {
                        if !listen(session, &channel).await {
                            self.unconfirmed.push(confirm);
                            return false;
                        }
                        listening.insert(channel);
                    }
                    let _ = confirm.send(());
                }
                Some(Order::Unlisten(channel)) => {
                    let unlisten = format!("UNLISTEN \"{channel}\"");
                    if listening.remove(&channel) && !execute(session, &unlisten).await {
                        return false;
                    }
                }
            }
        }
    }
}

/// Channel names are of our own making: a prefix and hexadecimal digits.
async fn listen(session: &Session, channel: &str) -> bool {
    execute(session, &format!("LISTEN \"{channel}\"")).await
}

async fn execute(session: &Session, sql: &str) -> bool {
    let done = tokio::time::timeout(LISTEN_LIMIT, session.client.batch_execute(sql)).await;
    match done {
        Ok(Ok(())) => true,
        Ok(Err(error)) => {
            tracing::debug!(%error, "cannot listen");
            false
        }
        Err(_) => false,
    }
}

/// The channel of a lock, as the function `channel` names it.
fn channel(schema: &Schema, name: &LockName) -> String {
    let mut hash = Sha256::new();
    hash.update(schema.as_str().as_bytes());
    hash.update(b"/");
    hash.update(name.as_str().as_bytes());
    let digest = hex(&hash.finalize());
    format!("fencelock_{}", digest.get(..40).unwrap_or_default())
}

impl PostgresWatch {
    async fn heard(&mut self) {
        // The channel counts versions, so a change between two calls is seen by the second.
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}

#[async_trait]
impl Watch for PostgresWatch {
    async fn changed(&mut self) {
        self.heard().await;
    }
}

impl Drop for PostgresWatch {
    fn drop(&mut self) {
        let mut channels = self.listener.channels.lock();
        // Under the lock, as receivers are made: of two waiters that leave at once, the second
        // sees that it is the last.
        self.changes = None;
        if let Some(sender) = channels.get(&self.channel)
            && sender.receiver_count() == 0
        {
            channels.remove(&self.channel);
            // A task that is not there needs no order: it begins with what the map says.
            let _ = self
                .listener
                .orders()
                .send(Order::Unlisten(self.channel.clone()));
        }
    }
}
