//! `fencelock delete`: removes the value and keeps the watermark.

use super::{Destination, Shown};
use crate::exit_codes;
use crate::failure::Result;

/// Removes the value.
pub(crate) async fn delete(dest: &str, shown: &Shown, json: bool) -> Result<u8> {
    let destination = Destination::open(dest).await?;
    match destination
        .storage
        .delete(&destination.resource, shown.fence())
        .await
    {
        Ok(written) => destination.report(shown, &written, json)?,
        Err(error) => return Err(shown.refused(&destination, error).await),
    }
    Ok(exit_codes::OK)
}
