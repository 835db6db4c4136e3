//! Does the store honour the conditions that everything here rests on? Some servers take the
//! headers and ignore them: every lock would be granted to everybody.

use bytes::Bytes;

use super::connect::{Link, Swap};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::random;

/// Writes and removes one small object below the link's prefix.
///
/// # Errors
/// `Unsupported` where a condition is ignored or a write is not seen by the next read;
/// `Unavailable` and `Invalid` as [`Link::swap`] says.
pub(super) async fn conditions(link: &Link) -> Result<()> {
    let id = hex(&random::id());
    let path = link.path(&format!(".fencelock-probe-{id}"))?;
    let probed = probe(link, &path, &id).await;
    if let Err(error) = link.remove(&path).await {
        tracing::debug!(%error, object = %path, "a probe is left behind");
    }
    probed.map_err(|error| match error.kind() {
        ErrorKind::Indeterminate => error.into_kind(ErrorKind::Unavailable),
        _ => error,
    })
}

async fn probe(link: &Link, path: &::object_store::path::Path, id: &str) -> Result<()> {
    let body = |step: &str| Bytes::from(format!("fencelock probe {id} {step}"));
    let ignores = |what: &str| {
        Err(link.named(Error::unsupported(format!(
            "the object store ignores {what} of a write, without which nothing can be fenced"
        ))))
    };
    let Swap::Done(first) = link.swap(path, body("1"), None).await? else {
        return Err(link.named(Error::unsupported(
            "the object store refuses to create an object that is not there",
        )));
    };
    if link.swap(path, body("2"), None).await? != Swap::Refused {
        return ignores("the condition If-None-Match");
    }
    let Swap::Done(second) = link.swap(path, body("3"), Some(&first)).await? else {
        return Err(link.named(Error::unsupported(
            "the object store refuses to replace an object by its present version",
        )));
    };
    if link.swap(path, body("4"), Some(&first)).await? != Swap::Refused {
        return ignores("the condition If-Match");
    }
    match link.read(path).await? {
        Some(found) if found.version == second && found.body == body("3") => Ok(()),
        _ => Err(link.named(Error::unsupported(
            "the object store answered a read with something else than what was written last",
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::options::ObjectOptions;
    use super::super::url;
    use super::*;
    use crate::open::StoreUrl;
    use ::object_store::memory::InMemory;
    use fencelock_testbed::http::Meddler;
    use fencelock_testbed::s3;

    async fn link(url: &str) -> Result<Link> {
        let options = ObjectOptions::default().credentials(s3::KEY, s3::SECRET, None);
        let (options, place) = url::onto(options, StoreUrl::parse(url)?)?;
        options.link(&place).await
    }

    #[tokio::test]
    async fn a_store_that_honours_conditions_is_opened_and_left_empty() {
        let store = Arc::new(InMemory::new());
        let options = ObjectOptions::default();
        let link = options.link_to(store, "a/b").await.unwrap();
        let left = link.list(&link.path("x").unwrap()).await.unwrap();
        assert!(left.is_empty(), "{left:?}");
    }

    #[tokio::test]
    async fn a_server_that_ignores_a_condition_is_refused() {
        fencelock_testbed::skip!("s3");
        link(&s3::S3::seaweed().url("x")).await.unwrap();
        // It checks no signature, of which these headers are a part.
        let server = s3::S3::moto();
        link(&server.url("x")).await.unwrap();
        for header in ["If-None-Match", "If-Match"] {
            let meddler = Meddler::start(server.address());
            meddler.strip(header);
            let error = link(&s3::url(meddler.address(), "x")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
            let said = format!("ignores the condition {header} ");
            assert!(error.to_string().contains(&said), "{error}");
        }
    }
}
