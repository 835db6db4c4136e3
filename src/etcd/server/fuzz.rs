//! What fuzzing asks of what stands in the realm's key.

use super::Stored;
use crate::fence::Domain;
use crate::name::LockName;

pub(crate) fn realm(bytes: &[u8]) {
    let stored = Stored::read(bytes);
    crate::fuzzing::assert_corrupt(&stored);
    let (Ok(stored), Ok(name)) = (stored, LockName::new("payment-export")) else {
        return;
    };
    // Whatever the cluster, fences of its locks can be shown as text (S9).
    for cluster in [0, u64::MAX] {
        let domain = Domain::new("etcd", &stored.in_cluster(cluster), &name);
        assert_eq!(domain.as_str().parse().ok(), Some(domain));
    }
    let again = serde_json::to_vec(&stored).ok();
    let again = again.and_then(|json| Stored::read(&json).ok());
    assert!(again == Some(stored));
}
