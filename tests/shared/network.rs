//! What tests of several engines do to the network between a store and its server.

use std::time::Duration;

use fencelock_testbed::proxy::Proxy;

/// Runs `work` and loses its answer: the network is slow, and is cut once the effect shows, while
/// the answer is still on its way. (The first thing that a server sends after a request need not be
/// its answer, so that a cut at that moment may come before the effect.)
pub(crate) async fn lose_answer<T>(
    proxy: &Proxy,
    work: impl Future<Output = T>,
    happened: impl AsyncFn() -> bool,
) -> T {
    proxy.delay(Duration::from_millis(700));
    let cut = async {
        while !happened().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        proxy.cut();
    };
    let (answer, ()) = tokio::join!(work, cut);
    proxy.delay(Duration::ZERO);
    answer
}
