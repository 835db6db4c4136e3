//! `fencelock raise`: moves the watermark up and reads, in one step. The start of every
//! read-modify-write (S6).

use serde_json::json;

use super::get::write_out;
use super::{Destination, Shown};
use crate::exit_codes;
use crate::failure::Result;
use crate::output;

/// Raises, and writes the present value's bytes to standard output. That there is no value yet is
/// no failure: the raise is done.
pub(crate) async fn raise(dest: &str, shown: &Shown, json: bool) -> Result<u8> {
    let destination = Destination::open(dest).await?;
    let raised = destination
        .storage
        .raise(&destination.resource, shown.fence())
        .await;
    let snapshot = match raised {
        Ok(snapshot) => snapshot,
        Err(error) => return Err(shown.refused(&destination, error).await),
    };
    if json {
        output::object(&json!({
            "resource": destination.resource.as_str(),
            "token": output::token(shown.token()),
            "watermark": output::token_or_null(snapshot.watermark.map(|w| w.token)),
            "applied": true,
        }))?;
    } else if let Some(value) = snapshot.value {
        write_out(value)?;
    }
    Ok(exit_codes::OK)
}
