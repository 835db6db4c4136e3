//! TLS, with the feature `etcd-tls`; without it, a URL that asks for it says so.

#[cfg(feature = "etcd-tls")]
#[tokio::test]
async fn certificates_are_verified_both_ways() {
    use fencelock::Locks;
    use fencelock_testbed::etcd::Etcd;
    use fencelock_testbed::skip;

    use crate::lab::chain;

    skip!("etcd");
    let etcd = Etcd::with_tls();
    let files = etcd.certificates();
    let (ca, cert, key) = (files.authority(), files.certificate(), files.key());
    let (ca, cert, key) = (ca.display(), cert.display(), key.display());
    let address = etcd.address();
    for (options, said) in [
        (String::new(), "cannot be reached"),
        ("tls=true".to_owned(), "ca=/path/to/ca.pem"),
        (format!("ca={ca}"), "cannot be reached"),
        (
            format!("ca=/nowhere&cert={cert}&cert_key={key}"),
            "/nowhere",
        ),
    ] {
        let url = format!("etcd://{address}?{options}");
        let error = Locks::open(&url).await.unwrap_err();
        let text = chain(&error);
        assert!(text.contains(said), "{options}: {text}");
    }
    let url = format!("etcd://{address}?ca={ca}&cert={cert}&cert_key={key}");
    let locks = Locks::open(&url).await.unwrap();
    let guard = locks.acquire("secret").await.unwrap();
    guard.release().await.unwrap();
}

#[cfg(not(feature = "etcd-tls"))]
#[tokio::test]
async fn a_build_without_tls_says_which_feature_it_needs() {
    use fencelock::ErrorKind;
    use fencelock::etcd::EtcdStore;

    let error = EtcdStore::open("etcd://127.0.0.1?tls=true").await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("etcd-tls"), "{error}");
}
