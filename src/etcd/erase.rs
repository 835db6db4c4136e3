//! Removing what a trial left in a cluster.

use etcd_client::{DeleteOptions, Txn, TxnOp};

use super::connect::write_within;
use super::lease::EtcdStore;
use crate::error::Result;

impl EtcdStore {
    /// Removes every key that begins with `mark`, which nobody's but a trial's does.
    pub(crate) async fn erase(&self, mark: &str) -> Result<()> {
        let all = DeleteOptions::new().with_prefix();
        let txn = Txn::new().and_then([TxnOp::delete(mark, Some(all))]);
        write_within(async {
            self.inner.link.write(txn).await?;
            Ok(())
        })
        .await
    }
}
