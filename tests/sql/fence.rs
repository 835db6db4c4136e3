//! Values for scripts: the same on every server.

use fencelock::fence::{Domain, HolderTag};
use fencelock::{ErrorKind, Fence};
use fencelock_testbed::proxy::Proxy;

use crate::lab::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_is_opened_by_its_url_and_shares_its_watermark_with_admit() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let url = format!("{}?key=today%2Fcsv&{NAMESPACE}=values", server.url());
    let (fenced, key) = fencelock::open::destination(&url).await.unwrap();
    assert_eq!(key.as_str(), "today/csv");
    fenced.put(&key, "v34", token(34)).await.unwrap();
    admit_once(&server.url(), "values", "today/csv", token(35)).await;
    let refused = fenced.put(&key, "again", token(34)).await.unwrap_err();
    assert_eq!(refused.watermark(), Some(token(35)));
    let seen = fenced.get(&key).await.unwrap();
    assert_eq!(seen.writer, Some(token(34)));
    assert_eq!(seen.value.unwrap().into_bytes(10).unwrap(), "v34");
    let keyless = fencelock::open::destination(&server.url())
        .await
        .unwrap_err();
    assert!(keyless.to_string().contains("?key=NAME"), "{keyless}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_of_writes_are_indeterminate_and_applied_once() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let proxy = Proxy::start(server.address());
    let values = values(&url_at(proxy.address())).await;
    let tag = HolderTag::from_bytes([1; 16]);
    let domain = Domain::new(SERVER, "r", &"a".parse().unwrap());
    let fence = Fence::new(token(5), tag, domain).with_seq(1);
    proxy.swallow_answer(WRITE);
    let (answer, _) = in_time(values.put("k", "the value", fence.clone())).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
    proxy.await_swallowed(END);
    let again = values.put("k", "the value", fence).await.unwrap();
    assert!(!again.applied);
}
