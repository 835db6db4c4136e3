//! `fencelock renew` and `fencelock release`: a lease that another process acquired.

use std::time::Duration;

use fencelock::fence::HolderTag;
use fencelock::lease::{LeaseRef, Release};
use fencelock::{Locks, Ttl};
use serde_json::json;

use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::output;
use crate::store::StoreUrl;

/// Makes a lease last a whole TTL from now: the given one, or its own.
pub(crate) async fn renew(
    store: &StoreUrl,
    lease: &LeaseRef,
    ttl: Option<Ttl>,
    json: bool,
) -> Result<u8> {
    let locks = store.open().await?;
    let ttl = match ttl {
        Some(ttl) => ttl,
        None => own_ttl(&locks, lease).await?,
    };
    locks
        .renew(lease, ttl)
        .await
        .map_err(|error| Failure::from(error.with("name", format_args!("{:?}", lease.name))))?;
    if json {
        output::object(&json!({
            "name": lease.name.as_str(),
            "token": lease.token.map(output::token),
            "ttl_ms": ttl.as_millis(),
        }))?;
    }
    Ok(exit_codes::OK)
}

/// Gives a lease up.
pub(crate) async fn release(store: &StoreUrl, lease: &LeaseRef, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    match locks.release(lease, Duration::ZERO).await? {
        Release::Released => {
            if json {
                output::object(&json!({
                    "name": lease.name.as_str(),
                    "token": lease.token.map(output::token),
                    "released": true,
                }))?;
            }
            Ok(exit_codes::OK)
        }
        Release::NotHeld => Err(not_ours(lease)),
    }
}

/// The TTL with which a lease was granted, so that renewing it never shortens it.
async fn own_ttl(locks: &Locks, lease: &LeaseRef) -> Result<Ttl> {
    let tag = HolderTag::of(&lease.holder);
    let state = locks.inspect(&lease.name).await?;
    state
        .into_iter()
        .flat_map(|state| state.holders)
        .find(|holder| holder.tag == tag && Some(holder.token) == lease.token)
        .map(|holder| holder.ttl)
        .ok_or_else(|| not_ours(lease))
}

fn not_ours(lease: &LeaseRef) -> Failure {
    let token = lease.token.map_or(String::new(), |t| format!(" token={t}"));
    Failure::new(
        exit_codes::LOST,
        format!(
            "there is no such lease: it lapsed, was released or was broken name={:?}{token}",
            lease.name.as_str()
        ),
    )
}
