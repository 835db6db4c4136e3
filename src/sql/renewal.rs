//! A batch of renewals, of which some may meet a row that is in use.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::lease::{LeaseRef, Renewal, Ttl};

/// How often a renewal that met a row in use is sent again, and after which pause.
const BUSY_RETRIES: u32 = 8;
const BUSY_PAUSE: Duration = Duration::from_millis(30);

/// Where batches are sent.
#[async_trait]
pub(crate) trait Batches: Sync {
    /// Where an operator finds out who uses a row for so long.
    const BUSY: &'static str;

    /// One request for all leases, and an answer for each; `None` where a row was in use.
    async fn renew_batch(&self, batch: &[&(LeaseRef, Ttl)]) -> Result<Vec<Option<Renewal>>>;
}

/// Renews all, and asks again for those whose row was in use.
pub(crate) async fn renew<B: Batches>(server: &B, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
    let mut answers: Vec<Option<Renewal>> = leases.iter().map(|_| None).collect();
    for round in 0..=BUSY_RETRIES {
        let left: Vec<usize> = (0..leases.len())
            .filter(|i| matches!(answers.get(*i), Some(None)))
            .collect();
        if left.is_empty() {
            break;
        }
        if round > 0 {
            tokio::time::sleep(BUSY_PAUSE).await;
        }
        let batch: Vec<_> = left.iter().filter_map(|i| leases.get(*i)).collect();
        match server.renew_batch(&batch).await {
            Ok(found) => {
                for (i, found) in left.into_iter().zip(found) {
                    if let Some(answer) = answers.get_mut(i) {
                        *answer = found;
                    }
                }
            }
            Err(error) => {
                let mut first = Some(error);
                for i in left {
                    let error = first.take().unwrap_or_else(|| {
                        Error::indeterminate("the renewal's batch failed as a whole")
                    });
                    if let Some(answer) = answers.get_mut(i) {
                        *answer = Some(Renewal::Unknown(error));
                    }
                }
            }
        }
    }
    answers
        .into_iter()
        .map(|answer| answer.unwrap_or_else(|| Renewal::Unknown(Error::unavailable(B::BUSY))))
        .collect()
}
