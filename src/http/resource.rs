//! Which resource a request is for.

use http::request::Parts;
use percent_encoding::percent_decode_str;

use crate::error::{Error, Result};
use crate::name::ResourceName;

/// The path is the resource, for methods that change something; GET, HEAD, OPTIONS and TRACE are not
/// fenced.
///
/// The path counts as it reads once percent-decoded, since that is what handlers get: were `/a` and
/// `/%61` two resources, a stale writer would pass by the other spelling. `/a%2Fb` and `/a/b` are one
/// resource here, which errs on the safe side. The query does not count. In a router that is nested
/// into another, the path lacks the outer prefix; and in gRPC the path is the method. Write a
/// function of your own there.
///
/// # Errors
/// `Invalid` for a path that is not UTF-8 or has more than 512 bytes once decoded.
pub fn writes_by_path(parts: &Parts) -> Result<Option<ResourceName>> {
    if parts.method.is_safe() {
        return Ok(None);
    }
    let path = percent_decode_str(parts.uri.path())
        .decode_utf8()
        .map_err(|_| Error::invalid("the path is not UTF-8 once percent-decoded"))?;
    ResourceName::new(&path).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn resource(method: &str, uri: &str) -> Result<Option<String>> {
        let request = Request::builder().method(method).uri(uri).body(()).unwrap();
        let (parts, ()) = request.into_parts();
        Ok(writes_by_path(&parts)?.map(|name| name.as_str().to_owned()))
    }

    #[test]
    fn spellings_of_a_path_are_one_resource() {
        for uri in ["/r/a", "/r/%61", "/%72/a?x=1", "http://h/r/a"] {
            assert_eq!(resource("PUT", uri).unwrap().as_deref(), Some("/r/a"));
        }
        for method in ["PUT", "POST", "DELETE", "PATCH", "PURGE"] {
            assert!(resource(method, "/r/a").unwrap().is_some());
        }
        for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
            assert!(resource(method, "/r/a").unwrap().is_none());
        }
        assert!(resource("PUT", "/r/%ff").is_err());
        assert!(resource("PUT", &format!("/{}", "x".repeat(512))).is_err());
    }
}
