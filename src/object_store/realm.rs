//! The identity of a prefix's locks, which one object keeps.

use super::connect::{Link, Swap};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{hex, unhex};
use crate::random;

const KEY: &str = "realm";

/// How often a lost race or a lost answer is looked up.
const LOOKS_MAX: usize = 5;

/// The realm that the store holds, or a new one that it holds from now on.
pub(super) async fn find(link: &Link) -> Result<String> {
    for _ in 0..LOOKS_MAX {
        if let Some(realm) = read(link).await? {
            return Ok(realm);
        }
        let realm = hex(&random::id());
        match link
            .swap(&link.path(KEY)?, realm.clone().into(), None)
            .await
        {
            Ok(Swap::Done(_)) => return Ok(realm),
            // Whoever was first has it.
            Ok(Swap::Refused) => {}
            Err(error) if error.kind() == ErrorKind::Indeterminate => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::unavailable(
        "the object store does not keep the locks' realm",
    ))
}

/// The realm that the store holds, if any.
pub(super) async fn read(link: &Link) -> Result<Option<String>> {
    let Some(found) = link.read(&link.path(KEY)?).await? else {
        return Ok(None);
    };
    let text = std::str::from_utf8(&found.body).unwrap_or_default();
    if unhex::<16>(text).is_none() {
        return Err(Error::corrupt(
            "the object that names the locks' realm is damaged; write the former realm back, or remove it and rebind what is fenced",
        )
        .with("object", KEY));
    }
    Ok(Some(text.to_owned()))
}
