//! Who waits for which lock: all of a store on its one connection.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::lease::Watch;

/// The channels that are listened to, each with those who wait on it.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    channels: HashMap<String, watch::Sender<()>>,
    /// Channels whose last waiter has gone. A destructor cannot ask the server, so the next
    /// subscription gives them up.
    left: Vec<String>,
}

impl Waiters {
    /// A waiter on a channel. Hears of what is published once the channel is subscribed.
    pub(super) fn join(self: &Arc<Self>, channel: &str) -> RedisWatch {
        let mut state = self.lock();
        state.left.retain(|left| left != channel);
        let changes = match state.channels.entry(channel.to_owned()) {
            Entry::Occupied(entry) => entry.get().subscribe(),
            Entry::Vacant(entry) => entry.insert(watch::channel(()).0).subscribe(),
        };
        RedisWatch {
            waiters: Arc::clone(self),
            channel: channel.to_owned(),
            changes: Some(changes),
        }
    }

    pub(super) fn wake(&self, channel: &[u8]) {
        let channel = String::from_utf8_lossy(channel);
        if let Some(changes) = self.lock().channels.get(channel.as_ref()) {
            changes.send_replace(());
        }
    }

    /// A connection was lost, and with it whatever was published in the meantime.
    pub(super) fn wake_all(&self) {
        for changes in self.lock().channels.values() {
            changes.send_replace(());
        }
    }

    /// The channels that a new connection has to subscribe.
    pub(super) fn channels(&self) -> Vec<String> {
        self.lock().channels.keys().cloned().collect()
    }

    /// The channels to give up.
    pub(super) fn take_left(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().left)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The maps are whole at every unlock, so a panic elsewhere does not spoil them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter.
#[derive(Debug)]
pub(super) struct RedisWatch {
    waiters: Arc<Waiters>,
    channel: String,
    /// `None` only while it is dropped.
    changes: Option<watch::Receiver<()>>,
}

#[async_trait]
impl Watch for RedisWatch {
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

impl Drop for RedisWatch {
    fn drop(&mut self) {
        let mut state = self.waiters.lock();
        // Under the lock, as receivers are made: of two that leave at once, the second sees that
        // it is the last.
        self.changes = None;
        if let Some(sender) = state.channels.get(&self.channel)
            && sender.receiver_count() == 0
        {
            state.channels.remove(&self.channel);
            state.left.push(std::mem::take(&mut self.channel));
        }
    }
}
