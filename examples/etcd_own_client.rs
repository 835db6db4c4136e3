//! Locks and a fenced value over an etcd client of your own, in one transaction with your keys.
//!
//! ```sh
//! cargo run --features etcd --example etcd_own_client -- 127.0.0.1:2379
//! ```

use fencelock::Locks;
use fencelock::etcd::client::{Client, Txn, TxnOp};
use fencelock::etcd::{EtcdStore, FencedEtcd};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1);
    let address = address.unwrap_or_else(|| "127.0.0.1:2379".to_owned());
    let mut client = Client::connect([address], None).await?;

    let locks = Locks::new(EtcdStore::from_client(client.clone()).await?);
    let store = FencedEtcd::from_client(client.clone()).await?;

    let guard = locks.acquire("payment-export").await?;
    loop {
        // Judged here, and compared once more where it counts: inside the transaction.
        let admitted = store.admit("exports/today", &guard).await?;
        let mut operations = admitted.operations;
        operations.push(TxnOp::put("exports/today", "data", None));
        operations.push(TxnOp::put("exports/index", "today", None));
        let txn = Txn::new().when(admitted.compares).and_then(operations);
        if client.txn(txn).await?.succeeded() {
            break;
        }
    }
    let mut out = std::io::stdout();
    std::io::Write::write_fmt(&mut out, format_args!("written with {}\n", guard.token()))?;
    guard.release().await?;
    Ok(())
}
