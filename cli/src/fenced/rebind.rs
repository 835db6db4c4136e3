//! `fencelock rebind`: binds a resource to another lock (S9).

use super::{Destination, Shown};
use crate::exit_codes;
use crate::failure::Result;

/// Binds the resource to the lock of the fence, whose token has to be larger than the watermark.
pub(crate) async fn rebind(dest: &str, shown: &Shown, json: bool) -> Result<u8> {
    let destination = Destination::open(dest).await?;
    match destination
        .storage
        .rebind(&destination.resource, shown.fence())
        .await
    {
        Ok(written) => destination.report(shown, &written, json)?,
        Err(error) => return Err(shown.refused(&destination, error).await),
    }
    Ok(exit_codes::OK)
}
