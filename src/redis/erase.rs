//! Removing what a trial left in a server.

use super::answer;
use super::lease::RedisStore;
use super::scan::SCAN_COUNT;
use crate::error::Result;

impl RedisStore {
    /// Removes every key that holds `mark`, which nobody's but a trial's does.
    pub(crate) async fn erase(&self, mark: &str) -> Result<()> {
        let link = &self.inner.link;
        let pattern = format!("*{mark}*");
        for master in link.masters().await? {
            let mut cursor = "0".to_owned();
            loop {
                let mut scan = redis::cmd("SCAN");
                scan.arg(&cursor).arg("MATCH").arg(&pattern);
                scan.arg("COUNT").arg(SCAN_COUNT);
                let answer = link.command_at(master.as_ref(), &scan).await?;
                let (next, keys): (String, Vec<Vec<u8>>) = answer::parse(answer)?;
                for key in keys {
                    let mut unlink = redis::cmd("UNLINK");
                    unlink.arg(key);
                    link.command_at(master.as_ref(), &unlink).await?;
                }
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(())
    }
}
