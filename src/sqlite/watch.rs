//! Hints for waiters: SQLite tells nobody of anything, so a waiter looks, often at first.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::database::{Database, Lane};
use super::record::{Moment, Record};
use crate::backoff::Backoff;
use crate::lease::Watch;
use crate::name::LockName;
use crate::token::FencingToken;

/// The pauses between two looks. A look is a read of two rows, which neither waits for a writer nor
/// holds one up.
const LOOK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(50));

/// What a waiter sees of a lock: the last token, and the tokens of the grants that are good.
type Glimpse = Option<(Option<FencingToken>, Vec<FencingToken>)>;

/// A [`Watch`] on one lock.
pub(super) struct SqliteWatch {
    database: Arc<Database>,
    name: LockName,
    /// `None` where it could not be read.
    seen: Option<Glimpse>,
}

impl SqliteWatch {
    pub(super) async fn new(database: Arc<Database>, name: LockName) -> Self {
        let seen = glimpse(&database, &name).await;
        Self {
            database,
            name,
            seen,
        }
    }
}

#[async_trait]
impl Watch for SqliteWatch {
    /// Cancel safe: what was seen is noted only when the answer is given.
    async fn changed(&mut self) {
        let mut pauses = Backoff::new(LOOK.0, LOOK.1);
        loop {
            tokio::time::sleep(pauses.next()).await;
            let glimpse = glimpse(&self.database, &self.name).await;
            if glimpse.is_some() && glimpse != self.seen {
                self.seen = glimpse;
                return;
            }
        }
    }
}

async fn glimpse(database: &Arc<Database>, name: &LockName) -> Option<Glimpse> {
    let name = name.clone();
    let look = database.read(Lane::Look, move |step| {
        let Some(mut record) = Record::read(step, &name)? else {
            return Ok(None);
        };
        record.see_good(Moment::of(step));
        let tokens = record.holders.iter().map(|holder| holder.token).collect();
        Ok(Some((record.last, tokens)))
    });
    look.await.ok()
}
