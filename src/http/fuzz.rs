//! What fuzzing asks of what comes in over HTTP.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};

use super::headers::{FENCING_LOCK, FENCING_TOKEN, FENCING_WATERMARK, fence_of, number};
use super::problem::Problem;
use super::resource::writes_by_path;
use crate::error::ErrorKind;
use crate::fuzzing::split_line;

/// The input is a path, and headers after it, a line each.
pub(crate) fn headers(bytes: &[u8]) {
    let (path, mut rest) = split_line(bytes);
    if let Ok(request) = Request::builder().method("PUT").uri(path).body(()) {
        let (parts, ()) = request.into_parts();
        if let Ok(resource) = writes_by_path(&parts) {
            assert!(resource.is_some(), "a write is for a resource");
        }
    }
    let mut headers = HeaderMap::new();
    while !rest.is_empty() {
        let (line, more) = split_line(rest);
        let mut parts = line.splitn(2, |byte| *byte == b':');
        let (name, value) = (parts.next(), parts.next().unwrap_or_default());
        if let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(name.unwrap_or_default()),
            HeaderValue::from_bytes(value.trim_ascii()),
        ) {
            headers.append(name, value);
        }
        rest = more;
    }
    let _ = number(&headers, &FENCING_WATERMARK);
    match fence_of(&headers) {
        Ok(None) => {
            // Whoever shows a fence and is not understood is refused, not let in without one.
            assert!(!headers.contains_key(&FENCING_TOKEN) && !headers.contains_key(&FENCING_LOCK));
        }
        Ok(Some(fence)) => {
            let of = |name: &HeaderName| -> Vec<_> { headers.get_all(name).iter().collect() };
            assert_eq!(of(&FENCING_TOKEN), [fence.token().to_string().as_str()]);
            if let Some(lock) = headers.get(&FENCING_LOCK) {
                assert_eq!(lock, fence.to_string().as_str());
            }
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid),
    }
}

/// The input is the body of an answer, with the media type of a problem.
pub(crate) fn problem(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/problem+json"),
    );
    let parsed = Problem::parse(StatusCode::PRECONDITION_FAILED, &headers, bytes);
    let Some(error) = parsed else { return };
    // A refusal says by what (S10).
    let numbers = (error.token(), error.watermark());
    assert_eq!(
        error.kind() == ErrorKind::Fenced,
        numbers.0.is_some() && numbers.1.is_some()
    );
    let answer = Problem::of(&error).response::<Bytes>();
    let (parts, body) = answer.into_parts();
    let again = Problem::parse(parts.status, &parts.headers, &body);
    if error.kind() == ErrorKind::Fenced && body.len() <= 16 << 10 {
        let again = again.map(|again| (again.kind(), again.token(), again.watermark()));
        assert_eq!(again, Some((error.kind(), numbers.0, numbers.1)));
    }
}
