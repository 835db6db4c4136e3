//! stub
pub(crate) mod worker;
use crate::failure::Result;
pub(crate) async fn demo(_: Option<&str>, _: &crate::cli::DemoArgs) -> Result<u8> { Ok(0) }
