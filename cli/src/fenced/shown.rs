//! Which fence a command shows, and what a refusal of it leads to.

use fencelock::fence::HolderTag;
use fencelock::{ErrorKind, Fence, FencingToken, LockName, Locks};

use super::Destination;
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::store::StoreUrl;

/// The fence that a command shows.
#[derive(Debug)]
pub(crate) struct Shown(Fence);

impl Shown {
    /// The fence of `--fence`, of `--token`, or of the surrounding `run`.
    ///
    /// A `--token` that is the surrounding `run`'s stands for its whole fence, which binds the
    /// write to this holder (S8) and to this lock (S9), as a bare number cannot.
    pub(crate) fn resolve(fence: Option<Fence>, token: Option<FencingToken>) -> Result<Self> {
        if let Some(fence) = fence {
            return Ok(Self(fence));
        }
        let surrounding = env::fence()?;
        let fence = match (token, surrounding) {
            (Some(token), Some(fence)) if fence.token() == token => fence,
            (Some(token), _) => token.into(),
            (None, Some(fence)) => fence,
            (None, None) => env::token()?.map(Fence::from).ok_or_else(|| {
                Failure::new(
                    exit_codes::USAGE,
                    "no fencing token: run this under `fencelock run NAME -- …`, or give --token N or --fence TEXT",
                )
            })?,
        };
        Ok(Self(fence))
    }

    /// The fence to show to a storage.
    pub(crate) fn fence(&self) -> &Fence {
        &self.0
    }

    /// Its token.
    pub(crate) fn token(&self) -> FencingToken {
        self.0.token()
    }

    /// Takes an error of an operation with this fence. Where a live holder was refused as stale,
    /// its lock's engine has lost data; then the next grant is made larger than the watermark (L10).
    pub(crate) async fn refused(&self, dest: &Destination, error: fencelock::Error) -> Failure {
        if error.kind() == ErrorKind::Fenced
            && let Some(watermark) = error.watermark()
            && watermark > self.token()
        {
            // The refusal is what the caller has to hear; healing is a courtesy.
            match self.heal(watermark).await {
                Ok(true) => say(&format!(
                    "the lock is held and its token is stale all the same: the next token will be larger than {watermark}"
                )),
                Ok(false) => {}
                Err(failure) => failure
                    .within("the lock's next token could not be made larger than the watermark")
                    .report(),
            }
        }
        dest.failed(error)
    }

    /// True where the lock of the surrounding `run` is held with this very token and was healed.
    async fn heal(&self, watermark: FencingToken) -> Result<bool> {
        let (Some(store), Some(name)) = (env::text(env::STORE)?, env::text(env::NAME)?) else {
            return Ok(false);
        };
        let name = LockName::new(&name)?;
        let store = StoreUrl::resolve(Some(&store))?;
        if store.is_of_one_process() {
            return Ok(false);
        }
        let locks = store.open().await?;
        if !self.is_live(&locks, &name).await? {
            return Ok(false);
        }
        locks.raise_floor(&name, watermark, false).await?;
        Ok(true)
    }

    async fn is_live(&self, locks: &Locks, name: &LockName) -> Result<bool> {
        let state = locks.inspect(name).await?;
        let tag: Option<HolderTag> = self.0.holder();
        // Without a tag we cannot tell this holder from a later one with the same number.
        Ok(tag.is_some()
            && state.is_some_and(|state| {
                state
                    .holders
                    .iter()
                    .any(|holder| holder.token == self.token() && Some(holder.tag) == tag)
            }))
    }
}
