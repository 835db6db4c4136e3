//! What lies between a process and the stores: a network that is late, loses answers, refuses, and
//! delivers twice. A request that was sent goes on whatever becomes of its sender.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use fencelock::body::Body;
use fencelock::fence::{Fence, FencedStore, Snapshot, Written};
use fencelock::lease::{
    AcquireRequest, Attempt, Finding, LeaseRef, LockState, NoWatch, Pruned, Release, Renewal,
    StoreProfile, Ttl, Watch,
};
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{Error, FencingToken, LeaseStore, LockName, ResourceName, Result};
use tokio::sync::oneshot;

use crate::oracle::{Oracle, Shared};
use crate::world::{NETWORK, World};

#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) world: Arc<World>,
    pub(crate) oracle: Shared,
    pub(crate) locks: MemoryStore,
    pub(crate) values: FencedMemory,
    /// One request in how many goes wrong.
    pub(crate) odds: u64,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

/// The memory stores answer at once.
pub(crate) fn at_once<T>(work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the memory stores answer at once"),
    }
}

pub(crate) fn encode(value: &[u32]) -> Vec<u8> {
    value.iter().flat_map(|id| id.to_le_bytes()).collect()
}

pub(crate) fn decode(bytes: &[u8]) -> Vec<u32> {
    let ids = bytes.chunks_exact(4);
    ids.map(|id| u32::from_le_bytes(id.try_into().unwrap()))
        .collect()
}

impl Link {
    /// Sends a request; `effect` is what it does where it arrives.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        effect: impl Fn(&Self, &mut Oracle) -> T + Send + Sync + 'static,
    ) -> Result<T> {
        let world = &self.world;
        let fault = if !world.is_calm() && world.chance(self.odds) {
            world.below(6)
        } else if world.chance(4) {
            // As quick as a store in memory: no pause, no task.
            return Ok(effect(self, &mut self.oracle.lock().unwrap()));
        } else {
            6
        };
        let (mut there, back) = (world.millis(4), world.millis(4));
        match fault {
            0 => {
                world.sleep(there).await;
                world.note("refused");
                return Err(Error::unavailable("refused"));
            }
            1 => there = world.millis(200),
            2 => there = world.millis(3_000),
            _ => {}
        }
        let effect = Arc::new(effect);
        if fault == 3 {
            let (late, link, again) = (there + world.millis(2_000), self.clone(), effect.clone());
            world.spawn_on(
                NETWORK,
                Box::pin(async move {
                    link.world.sleep_on(NETWORK, late).await;
                    link.world.note("delivered twice");
                    again(&link, &mut link.oracle.lock().unwrap());
                }),
            );
        }
        let (sender, answer) = oneshot::channel();
        let link = self.clone();
        world.spawn_on(
            NETWORK,
            Box::pin(async move {
                link.world.sleep_on(NETWORK, there).await;
                let value = effect(&link, &mut link.oracle.lock().unwrap());
                link.world.sleep_on(NETWORK, back).await;
                match fault {
                    4 => link.world.note("answer lost"),
                    5 => {
                        link.world.note("answer late");
                        let late = link.world.millis(4_000);
                        link.world.sleep_on(NETWORK, late).await;
                        let _ = sender.send(value);
                    }
                    _ => drop(sender.send(value)),
                }
            }),
        );
        answer
            .await
            .map_err(|_| Error::indeterminate("the answer was lost"))
    }
}

#[async_trait]
impl LeaseStore for Link {
    fn profile(&self) -> &StoreProfile {
        self.locks.profile()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let holder = request.holder;
        let request = request.clone();
        let answer = self.call(move |link, oracle| {
            let answer = at_once(link.locks.acquire(&request));
            oracle.acquired(&link.world, &request, &answer);
            answer
        });
        let answer = answer.await?;
        if matches!(answer, Ok(Attempt::Held(_))) {
            // An earlier try of the same request may still be on its way. What it is granted then, when
            // nobody waits for it any more, lapses: no release can be sure to come after it.
            self.oracle.lock().unwrap().heard(&holder);
        }
        answer
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        for (lease, _) in leases {
            self.oracle.lock().unwrap().renewing(&self.world, lease);
        }
        let leases = leases.to_vec();
        let sent = leases.len();
        let answers = self.call(move |link, oracle| {
            let answers = at_once(link.locks.renew(&leases));
            for ((lease, ttl), answer) in leases.iter().zip(&answers) {
                oracle.renewed(&link.world, lease, *ttl, answer);
            }
            answers
        });
        match answers.await {
            Ok(answers) => answers,
            Err(error) => (0..sent)
                .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
                .collect(),
        }
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let lease = lease.clone();
        self.oracle.lock().unwrap().giving_back(&lease);
        self.call(move |link, oracle| {
            let answer = at_once(link.locks.release(&lease, linger));
            oracle.released(&link.world, &lease, linger, &answer);
            answer
        })
        .await?
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        // One in eight never hears a hint.
        if self.world.chance(8) {
            return Ok(Box::new(NoWatch));
        }
        self.locks.watch(name).await
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        self.locks.inspect(name).await
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        self.locks.list(prefix, after, limit).await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.call(move |link, oracle| {
            oracle.broke(&link.world, name.as_str());
            at_once(link.locks.break_lock(&name))
        })
        .await?
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let name = name.clone();
        self.call(move |link, oracle| {
            let answer = at_once(link.locks.raise_floor(&name, floor, mend));
            if answer.is_ok() {
                oracle.floor_raised(&link.world, name.as_str(), floor.get());
            }
            answer
        })
        .await?
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        self.call(move |link, _| at_once(link.locks.prune(idle)))
            .await?
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        self.locks.probe().await
    }
}

#[async_trait]
impl FencedStore for Link {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        let (resource, fence) = (resource.clone(), fence.clone());
        let bytes = body.into_bytes(1 << 20)?;
        self.call(move |link, oracle| {
            let body = Body::from(Bytes::clone(&bytes));
            let answer = at_once(link.values.put(&resource, body, &fence));
            let value = decode(&bytes);
            oracle.put(&link.world, resource.as_str(), &value, &fence, &answer);
            answer
        })
        .await?
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        self.values.get(resource).await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let (resource, fence) = (resource.clone(), fence.clone());
        self.call(move |link, oracle| {
            let answer = at_once(link.values.raise(&resource, &fence));
            oracle.raised(&link.world, resource.as_str(), &fence, &answer);
            let Ok(mut snapshot) = answer else {
                return answer;
            };
            let bytes = match snapshot.value.take() {
                Some(body) => body.into_bytes(1 << 20).unwrap(),
                None => Bytes::new(),
            };
            oracle.read(&link.world, resource.as_str(), &decode(&bytes));
            snapshot.value = Some(bytes.into());
            Ok(snapshot)
        })
        .await?
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.values.delete(resource, fence).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.values.rebind(resource, fence).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        FencedStore::probe(&self.values).await
    }
}
