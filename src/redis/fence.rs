//! Placeholder.
use super::connect::Link;
use super::options::RedisOptions;
use crate::error::Result;
/// x
#[derive(Debug)]
pub struct FencedRedis;
impl FencedRedis {
    pub(super) async fn start(_: &RedisOptions, _: Link) -> Result<Self> {
        Ok(Self)
    }
}
