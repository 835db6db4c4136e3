//! `fencelock get`: reads a resource, with no token and never refused.

use std::io::{self, Write as _};

use fencelock::body::Body;
use serde_json::json;

use super::Destination;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::output;

/// Writes the value's bytes to standard output, or says with `json` what there is.
pub(crate) async fn get(dest: &str, json: bool) -> Result<u8> {
    let destination = Destination::open(dest).await?;
    let snapshot = destination
        .storage
        .get(&destination.resource)
        .await
        .map_err(|error| destination.failed(error))?;
    if json {
        output::object(&json!({
            "resource": destination.resource.as_str(),
            "token": output::token_or_null(snapshot.writer),
            "watermark": output::token_or_null(snapshot.watermark.map(|w| w.token)),
            "size": snapshot.value.as_ref().map(Body::len),
        }))?;
        return Ok(exit_codes::OK);
    }
    let Some(value) = snapshot.value else {
        return Err(Failure::new(
            exit_codes::NO_VALUE,
            format!("{}: there is no value", destination.shown),
        ));
    };
    write_out(value)?;
    Ok(exit_codes::OK)
}

/// Copies a value to standard output.
pub(super) fn write_out(value: Body) -> Result<()> {
    let mut out = io::stdout().lock();
    value.copy_to(&mut out)?;
    out.flush()?;
    Ok(())
}
