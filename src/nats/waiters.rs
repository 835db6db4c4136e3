//! Who waits for which lock. Whoever gives a lock up says so at a subject of its own, once the
//! record is stored: what subscribers of the record itself hear comes before that, and before it is
//! known whether it is taken at all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Subscriber;
use async_trait::async_trait;
use futures_util::StreamExt as _;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::connect::Link;
use crate::backoff::Backoff;
use crate::lease::Watch;

/// The pauses between tries to listen.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The names that are waited for, each with those who wait.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    names: Arc<Mutex<HashMap<String, Waited>>>,
}

#[derive(Debug)]
struct Waited {
    changes: watch::Sender<()>,
    listening: AbortHandle,
}

impl Waiters {
    /// A waiter, who hears of whatever is said at the subject once this has returned.
    pub(super) async fn join(&self, link: &Arc<Link>, subject: String) -> NatsWatch {
        let joined = locked(&self.names)
            .get(&subject)
            .map(|waited| waited.changes.subscribe());
        let changes = match joined {
            Some(changes) => changes,
            None => {
                let first = link.listen(&subject).await.ok();
                self.listen(link, &subject, first)
            }
        };
        NatsWatch {
            names: Arc::clone(&self.names),
            subject,
            changes: Some(changes),
        }
    }

    fn listen(
        &self,
        link: &Arc<Link>,
        subject: &str,
        first: Option<Subscriber>,
    ) -> watch::Receiver<()> {
        let mut names = locked(&self.names);
        if let Some(waited) = names.get(subject) {
            // Somebody else was faster.
            return waited.changes.subscribe();
        }
        let (sender, receiver) = watch::channel(());
        let task = listen(Arc::clone(link), subject.to_owned(), sender.clone(), first);
        let waited = Waited {
            changes: sender,
            listening: tokio::spawn(task).abort_handle(),
        };
        names.insert(subject.to_owned(), waited);
        receiver
    }
}

/// Until it is aborted.
async fn listen(
    link: Arc<Link>,
    subject: String,
    changes: watch::Sender<()>,
    mut subscriber: Option<Subscriber>,
) {
    let mut backoff = Backoff::new(RETRY.0, RETRY.1);
    loop {
        if let Some(mut heard) = subscriber.take() {
            while heard.next().await.is_some() {
                backoff.reset();
                changes.send_replace(());
            }
        }
        tokio::time::sleep(backoff.next()).await;
        match link.listen(&subject).await {
            Ok(heard) => subscriber = Some(heard),
            Err(failure) => {
                let error = crate::Error::from(failure);
                tracing::debug!(%error, "cannot listen; waiting by polling");
            }
        }
        // Whatever was missed is found by asking.
        changes.send_replace(());
    }
}

fn locked(names: &Mutex<HashMap<String, Waited>>) -> MutexGuard<'_, HashMap<String, Waited>> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One waiter.
#[derive(Debug)]
pub(super) struct NatsWatch {
    names: Arc<Mutex<HashMap<String, Waited>>>,
    subject: String,
    /// `None` only while it is dropped.
    changes: Option<watch::Receiver<()>>,
}

#[async_trait]
impl Watch for NatsWatch {
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

impl Drop for NatsWatch {
    fn drop(&mut self) {
        let mut names = locked(&self.names);
        // Under the lock, as receivers are made: of two that leave at once, the second sees that
        // it is the last.
        self.changes = None;
        if let Some(waited) = names.get(&self.subject)
            && waited.changes.receiver_count() == 0
        {
            waited.listening.abort();
            names.remove(&self.subject);
        }
    }
}
