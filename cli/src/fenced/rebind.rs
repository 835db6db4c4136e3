//! `fencelock rebind`: binds a resource to another lock (S9).

use super::{Destination, Shown};
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// Binds the resource to the lock of the fence, whose token has to be larger than the watermark.
pub(crate) async fn rebind(dest: &str, shown: &Shown, json: bool) -> Result<u8> {
    if shown.fence().domain().is_none() {
        // A bare number of no lock would leave the resource open to the tokens of any (S9).
        return Err(Failure::usage(
            "rebind needs a whole fence, as a bare token does not say of which lock it is; run this under `fencelock run NAME -- …`, or give --fence TEXT",
        ));
    }
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
