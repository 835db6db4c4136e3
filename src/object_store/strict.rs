//! The strict layout: a pointer object per resource that changes only by compare-and-swap.
//!
//! A value goes into the pointer where it is small. A large one is written first, as an object under
//! a key of its own, and the swap of the pointer is what makes it the value. So one conditional write
//! is check and effect in one (S2), whatever the size.
//!
//! # When a data object may be removed
//!
//! Without clocks and grace periods, by two facts. Pointers never repeat ([`Pointer`]'s nonce), and a
//! swap names the version that its writer judged. So
//!
//! 1. an object that a pointer named and its successor does not name is never named again: a swap
//!    either keeps what it saw or brings an object of its own;
//! 2. once a pointer has the watermark `w`, an object of a token below `w` that it does not name is
//!    never named: its writer would have to pass the judgement against this pointer or a later one,
//!    whose watermark is no smaller, and a swap that names an earlier version is refused.
//!
//! A writer that was paused between its upload and its swap is covered by the second: either its
//! object is kept, because its token is not below the watermark, or its swap cannot succeed.

use std::time::Duration;

use ::object_store::path::Path;
use bytes::Bytes;

use super::connect::{Link, Swap, Version};
use super::data;
use super::pointer::{DataName, Pointer, Value, ValuePlace, mark};
use crate::backoff::Backoff;
use crate::body::Body;
use crate::clock::{Clock, Tick, unix_micros};
use crate::driver::off_thread;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, Snapshot, Written};
use crate::known::Known;
use crate::name::ResourceName;
use crate::random;
use crate::token::{Admission, FencingToken, Intent, Watermark, judge};

/// The largest value that is kept in the pointer, in bytes: a write of it is one request, and so is
/// a read.
pub const INLINE_MAX_BYTES: u64 = 64 * 1024;

/// What the folder of a resource's data objects ends with.
const FOLDER: &str = ".fencelock";

/// The longest key that S3 takes, in bytes.
const KEY_MAX_BYTES: usize = 1024;

/// How long after its beginning an operation begins another try, of two requests.
const TRY_LIMIT: Duration = Duration::from_secs(5);

/// Pauses between tries: others write too, or the store has said that it is busy.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(400));

/// How many times a reader follows a pointer that changes under it.
const FOLLOW_MAX: u32 = 20;

/// How many objects one write removes of those that older holders left.
const SWEEP_MAX: usize = 1000;

#[derive(Debug)]
pub(super) struct Strict {
    link: Link,
    clock: Clock,
    known: Known<State>,
}

/// A pointer as it was seen at some time.
#[derive(Clone, Debug)]
struct State {
    /// `None` where there was no object.
    seen: Option<(Version, Pointer)>,
    /// Its inline bytes may be missing, and it may be superseded.
    cached: bool,
}

/// Where a resource's objects are.
struct Keys<'a> {
    resource: &'a ResourceName,
    pointer: Path,
    /// When no further try begins.
    give_up: Tick,
}

/// What an operation makes of a pointer.
enum Change {
    /// Another value, `None` for a deletion.
    Value(Option<(u64, ValuePlace)>),
    /// The same value under another watermark.
    Watermark,
}

/// How an operation ended.
enum Outcome {
    Applied(Pointer),
    Repeated(Watermark),
}

impl State {
    fn watermark(&self) -> Option<&Watermark> {
        self.seen.as_ref().map(|(_, pointer)| &pointer.watermark)
    }

    fn version(&self) -> Option<&Version> {
        self.seen.as_ref().map(|(version, _)| version)
    }

    fn pointer(&self) -> Option<&Pointer> {
        self.seen.as_ref().map(|(_, pointer)| pointer)
    }
}

impl Strict {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            clock: Clock::system(),
            known: Known::new(),
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    pub(super) async fn put(
        &self,
        resource: &ResourceName,
        body: Body,
        fence: &Fence,
    ) -> Result<Written> {
        let mut keys = self.keys(resource)?;
        let nonce = random::id();
        let size = body.len();
        if size > data::VALUE_MAX_BYTES {
            return Err(
                Error::invalid("the value is larger than an object store holds")
                    .with("bytes", size)
                    .with("limit_bytes", data::VALUE_MAX_BYTES),
            );
        }
        if size <= INLINE_MAX_BYTES {
            let bytes = if body.in_memory() {
                body.into_bytes(INLINE_MAX_BYTES)?
            } else {
                off_thread(move || body.into_bytes(INLINE_MAX_BYTES)).await??
            };
            let change = Change::Value(Some((size, ValuePlace::Inline(bytes))));
            let state = self.start(&keys).await?;
            return self.write(&keys, state, nonce, change, fence).await;
        }
        // Refused before anything is sent, where that is known already.
        let mut state = self.start(&keys).await?;
        let mut said = judge(state.watermark(), fence, Intent::Write, unix_micros());
        if state.cached && !matches!(said, Ok(Admission::Apply(_))) {
            state = self.look(&keys).await?;
            said = judge(state.watermark(), fence, Intent::Write, unix_micros());
        }
        if let Admission::Repeat(watermark) = said.map_err(|error| named(error, resource))? {
            return Ok(Written::repeated(watermark));
        }
        let name = DataName::new(fence.token(), &nonce);
        let path = keys.data(&name)?;
        data::upload(&self.link, &path, body).await?;
        // That took as long as the value is large.
        keys.give_up = self.give_up();
        let change = Change::Value(Some((size, ValuePlace::Data(name))));
        let written = self.write(&keys, state, nonce, change, fence).await;
        let unused = match &written {
            Ok(written) => !written.applied,
            Err(error) => error.kind() != ErrorKind::Indeterminate,
        };
        if unused {
            self.remove(&path).await;
        }
        written
    }

    pub(super) async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let keys = self.keys(resource)?;
        let state = self.start(&keys).await?;
        let nonce = random::id();
        self.write(&keys, state, nonce, Change::Value(None), fence)
            .await
    }

    pub(super) async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let keys = self.keys(resource)?;
        let state = self.look(&keys).await?;
        let (change, nonce) = (Change::Watermark, random::id());
        let outcome = self
            .swap(&keys, state, nonce, &change, Intent::Rebind, fence)
            .await
            .map_err(|error| named(error, resource))?;
        Ok(match outcome {
            Outcome::Applied(pointer) => Written::applied(pointer.watermark),
            Outcome::Repeated(watermark) => Written::repeated(watermark),
        })
    }

    pub(super) async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let keys = self.keys(resource)?;
        for _ in 0..FOLLOW_MAX {
            let state = self.look(&keys).await?;
            let (change, nonce) = (Change::Watermark, random::id());
            let outcome = self
                .swap(&keys, state, nonce, &change, Intent::Raise, fence)
                .await
                .map_err(|error| named(error, resource))?;
            let Outcome::Applied(pointer) = outcome else {
                return Err(Error::corrupt("a raise was taken for a repeated write"));
            };
            // Whoever superseded the value since showed a token of at least ours: raise again, and
            // be refused or see the newer value.
            if let Some(snapshot) = self.follow(&keys, pointer).await? {
                return Ok(snapshot);
            }
        }
        Err(self.restless(resource))
    }

    pub(super) async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let keys = self.keys(resource)?;
        let mut missing = None;
        for _ in 0..FOLLOW_MAX {
            let Some((_, pointer)) = self.look(&keys).await?.seen else {
                return Ok(Snapshot::new(None, None, None));
            };
            let name = pointer.data().cloned();
            if let Some(snapshot) = self.follow(&keys, pointer).await? {
                return Ok(snapshot);
            }
            if missing.is_some() && missing == name {
                return Err(Error::corrupt(
                    "the data object that the resource's pointer names is gone; write the value anew",
                )
                .with("resource", resource));
            }
            missing = name;
        }
        Err(self.restless(resource))
    }

    /// The value that a pointer names; `None` where its data object is gone.
    async fn follow(&self, keys: &Keys<'_>, pointer: Pointer) -> Result<Option<Snapshot>> {
        let (body, writer) = match pointer.value {
            None => (None, None),
            Some(value) => {
                let body = match value.place {
                    ValuePlace::Inline(bytes) => Some(Body::from(bytes)),
                    ValuePlace::Data(name) => {
                        let path = keys.data(&name)?;
                        data::download(&self.link, &path, value.size_bytes).await?
                    }
                };
                if body.is_none() {
                    return Ok(None);
                }
                (body, Some(value.writer))
            }
        };
        Ok(Some(Snapshot::new(body, Some(pointer.watermark), writer)))
    }

    fn restless(&self, resource: &ResourceName) -> Error {
        self.link.named(
            Error::unavailable("the resource is written faster than it can be read")
                .with("resource", resource),
        )
    }

    /// Replaces or deletes the value, and removes what nobody is pointed to any more.
    async fn write(
        &self,
        keys: &Keys<'_>,
        state: State,
        nonce: [u8; 16],
        change: Change,
        fence: &Fence,
    ) -> Result<Written> {
        let deletes = matches!(change, Change::Value(None));
        let dead = state.pointer().cloned();
        let ends_with = match deletes {
            true => state.pointer().and_then(Pointer::data).cloned(),
            false => None,
        };
        let swapping = self.swap(keys, state, nonce, &change, Intent::Write, fence);
        let cleaning = async {
            if let Some(pointer) = &dead {
                self.clean(keys, pointer, fence.token()).await;
            }
        };
        // At the same time: what is removed is dead whatever becomes of the swap.
        let (outcome, ()) = futures_util::future::join(swapping, cleaning).await;
        match outcome.map_err(|error| named(error, keys.resource))? {
            Outcome::Repeated(watermark) => Ok(Written::repeated(watermark)),
            Outcome::Applied(pointer) => {
                // Nothing is kept of a deleted value. It is dead only if ours is what replaced it.
                if let Some(name) = ends_with.filter(|_| pointer.value.is_none()) {
                    self.remove_data(keys, &name).await;
                }
                Ok(Written::applied(pointer.watermark))
            }
        }
    }

    /// The one way in which a pointer changes.
    async fn swap(
        &self,
        keys: &Keys<'_>,
        mut state: State,
        nonce: [u8; 16],
        change: &Change,
        intent: Intent,
        fence: &Fence,
    ) -> Result<Outcome> {
        let mut backoff = Backoff::new(PAUSE.0, PAUSE.1);
        let mut sent: Option<Sent> = None;
        loop {
            match trace(&state, &nonce, sent.as_ref()) {
                Trace::There(pointer) => {
                    self.remember(keys.resource, &state);
                    return Ok(Outcome::Applied(pointer));
                }
                // A raise has something to read: it goes on.
                Trace::Passed(pointer) if intent != Intent::Raise => {
                    return Ok(Outcome::Applied(pointer));
                }
                Trace::Never => sent = None,
                Trace::Passed(_) | Trace::Open => {}
            }
            // A request that was refused is over, where nothing shows that it was sent twice.
            sent = sent.filter(|sent| sent.unknown);
            let said = judge(state.watermark(), fence, intent, unix_micros());
            if state.cached && !matches!(said, Ok(Admission::Apply(_))) {
                state = self.look(keys).await?;
                continue;
            }
            let watermark = match said {
                Ok(Admission::Apply(watermark)) => watermark,
                Ok(Admission::Repeat(watermark)) => return Ok(Outcome::Repeated(watermark)),
                Err(error) if is_unknown(sent.as_ref()) => {
                    // It may have been applied, and superseded since.
                    return Err(error.into_kind(ErrorKind::Indeterminate));
                }
                Err(error) => return Err(error),
            };
            if intent == Intent::Raise
                && let Some((_, pointer)) = &state.seen
                && pointer.watermark == watermark
            {
                return Ok(Outcome::Applied(pointer.clone()));
            }
            if let Some(sent) = sent.as_ref().filter(|sent| sent.unknown)
                && sent.asked.version() != state.version()
                && intent != Intent::Raise
            {
                return Err(Error::indeterminate(
                    "the write's answer was lost, and so many writes came since that it cannot be told whether it was applied before them",
                ));
            }
            let next = self.next(keys, &state, nonce, change, watermark)?;
            let swapped = self
                .link
                .swap(&keys.pointer, next.encode()?, state.version())
                .await;
            match swapped {
                Ok(Swap::Done(version)) => {
                    let done = State {
                        seen: Some((version, next.clone())),
                        cached: false,
                    };
                    self.remember(keys.resource, &done);
                    return Ok(Outcome::Applied(next));
                }
                Ok(Swap::Refused) => {
                    // A proxy may have sent it twice: then this is the answer to the second.
                    sent.get_or_insert(Sent {
                        written: next,
                        asked: state.clone(),
                        unknown: false,
                    });
                }
                Err(error) if error.kind() == ErrorKind::Indeterminate => {
                    tracing::debug!(resource = %keys.resource, %error, "swap unconfirmed; looking again");
                    sent = Some(Sent {
                        written: next,
                        asked: state.clone(),
                        unknown: true,
                    });
                }
                Err(error) if is_unknown(sent.as_ref()) => {
                    return Err(error.into_kind(ErrorKind::Indeterminate));
                }
                Err(error) => return Err(error),
            }
            self.known.forget(keys.resource);
            state = self
                .look_again(keys, &mut backoff, is_unknown(sent.as_ref()))
                .await?;
        }
    }

    /// Looks after a pause, and for as long as the outcome of a request is unknown also again.
    async fn look_again(
        &self,
        keys: &Keys<'_>,
        backoff: &mut Backoff,
        unknown: bool,
    ) -> Result<State> {
        loop {
            let pause = backoff.next();
            if self.clock.now().after(pause) >= keys.give_up {
                let error = if unknown {
                    Error::indeterminate(
                        "the object store confirmed neither that the write was applied nor that it was not",
                    )
                } else {
                    Error::unavailable(
                        "too many others write at the same time; nothing was applied",
                    )
                };
                return Err(self.link.named(error));
            }
            tokio::time::sleep(pause).await;
            match self.look(keys).await {
                Ok(state) => return Ok(state),
                Err(error) if unknown && error.kind() == ErrorKind::Unavailable => {
                    tracing::debug!(resource = %keys.resource, %error, "cannot look; trying again");
                }
                Err(error) if unknown => return Err(error.into_kind(ErrorKind::Indeterminate)),
                Err(error) => return Err(error),
            }
        }
    }

    fn next(
        &self,
        keys: &Keys<'_>,
        state: &State,
        nonce: [u8; 16],
        change: &Change,
        watermark: Watermark,
    ) -> Result<Pointer> {
        let pointer = state.pointer();
        let (value, before) = match change {
            Change::Watermark => (
                pointer.and_then(|p| p.value.clone()),
                pointer.and_then(|p| p.before.clone()),
            ),
            Change::Value(None) => (None, None),
            Change::Value(Some((size_bytes, place))) => (
                Some(Value {
                    writer: watermark.token,
                    size_bytes: *size_bytes,
                    place: place.clone(),
                }),
                pointer.and_then(Pointer::data).cloned(),
            ),
        };
        Ok(Pointer {
            key: keys.pointer.to_string(),
            nonce,
            generation: pointer.map_or(0, |p| p.generation).saturating_add(1),
            trail: pointer.map(Pointer::next_trail).unwrap_or_default(),
            first: pointer.map_or_else(|| mark(&nonce), |p| p.first),
            watermark,
            value,
            before,
        })
    }

    /// The pointer as it is remembered, or as it is.
    async fn start(&self, keys: &Keys<'_>) -> Result<State> {
        match self.known.recall(keys.resource) {
            Some(state) => Ok(state),
            None => self.look(keys).await,
        }
    }

    /// The pointer as it is.
    async fn look(&self, keys: &Keys<'_>) -> Result<State> {
        let seen = match self.link.read(&keys.pointer).await? {
            None => None,
            Some(found) => {
                let pointer = Pointer::decode(&found.body, keys.pointer.as_ref())?;
                Some((found.version, pointer))
            }
        };
        let state = State {
            seen,
            cached: false,
        };
        Ok(state)
    }

    /// Remembers a pointer, without the value's bytes, which the next write replaces.
    fn remember(&self, resource: &ResourceName, state: &State) {
        let mut remembered = state.clone();
        remembered.cached = true;
        if let Some((_, pointer)) = &mut remembered.seen
            && let Some(value) = &mut pointer.value
            && let ValuePlace::Inline(bytes) = &mut value.place
        {
            *bytes = Bytes::new();
        }
        self.known.remember(resource, remembered);
    }

    /// Removes what a pointer that was seen shows to be dead: what was kept for readers of the value
    /// before its own, and at the first write under a new token what older holders left.
    async fn clean(&self, keys: &Keys<'_>, pointer: &Pointer, token: FencingToken) {
        if let Some(before) = &pointer.before
            && Some(before) != pointer.data()
        {
            self.remove_data(keys, before).await;
        }
        let first = pointer
            .value
            .as_ref()
            .is_none_or(|value| value.writer != token);
        if !first {
            return;
        }
        if let Err(error) = self.sweep(keys, pointer).await {
            tracing::debug!(resource = %keys.resource, %error, "old data objects not looked for");
        }
    }

    /// Removes the objects of tokens below the watermark that the pointer does not name.
    async fn sweep(&self, keys: &Keys<'_>, pointer: &Pointer) -> Result<()> {
        let all = self.link.list(&keys.folder()?).await?;
        let dead = all.into_iter().filter(|listed| {
            let name = listed.path.filename().and_then(DataName::parse);
            name.is_some_and(|name| is_dead(&name, pointer))
        });
        for listed in dead.take(SWEEP_MAX) {
            tracing::debug!(object = %listed.path, "removing what an older holder left");
            self.remove(&listed.path).await;
        }
        Ok(())
    }

    async fn remove_data(&self, keys: &Keys<'_>, name: &DataName) {
        match keys.data(name) {
            Ok(path) => self.remove(&path).await,
            Err(error) => tracing::debug!(%error, "not removed"),
        }
    }

    /// Best effort: what is left is removed by a later holder's first write.
    async fn remove(&self, path: &Path) {
        if let Err(error) = self.link.remove(path).await {
            tracing::debug!(object = %path, %error, "not removed");
        }
    }

    fn give_up(&self) -> Tick {
        self.clock.now().after(TRY_LIMIT)
    }

    fn keys<'a>(&self, resource: &'a ResourceName) -> Result<Keys<'a>> {
        let name = resource.as_str();
        let reserved = |part: &str| part.ends_with(FOLDER) || part.starts_with(".fencelock-");
        if name.split('/').any(reserved) {
            return Err(Error::invalid(
                "resource name has a part that is reserved for data objects; choose another",
            )
            .with("resource", resource));
        }
        let keys = Keys {
            resource,
            pointer: self.link.path(name)?,
            give_up: self.give_up(),
        };
        let longest = DataName::new(FencingToken::MAX, &[0; 16]);
        if keys.data(&longest)?.as_ref().len() > KEY_MAX_BYTES {
            return Err(
                Error::invalid("the object's key is too long, with what is added to it")
                    .with("resource", resource)
                    .with("limit_bytes", KEY_MAX_BYTES),
            );
        }
        Ok(keys)
    }
}

impl Keys<'_> {
    fn folder(&self) -> Result<Path> {
        parse(&format!("{}{FOLDER}", self.pointer))
    }

    fn data(&self, name: &DataName) -> Result<Path> {
        parse(&format!("{}{FOLDER}/{}", self.pointer, name.as_str()))
    }
}

fn parse(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|e| Error::invalid("not an object's key").with_source(e))
}

/// The second fact of this module's documentation.
fn is_dead(name: &DataName, pointer: &Pointer) -> bool {
    let older = name
        .token()
        .is_some_and(|token| token < pointer.watermark.token);
    older && pointer.data() != Some(name) && pointer.before.as_ref() != Some(name)
}

/// A request that was sent and did not say that it was applied.
struct Sent {
    written: Pointer,
    /// What it was to replace.
    asked: State,
    /// No answer says what became of it.
    unknown: bool,
}

fn is_unknown(sent: Option<&Sent>) -> bool {
    sent.is_some_and(|sent| sent.unknown)
}

/// What a pointer tells of a request.
enum Trace {
    /// Nothing: it may still be on its way, or there is no such request.
    Open,
    /// It was applied, and is what there is.
    There(Pointer),
    /// It was applied, and others came after it.
    Passed(Pointer),
    /// It was not applied and never will be: what it was to replace is gone.
    Never,
}

/// Looks for one's own write, which may have been applied although its answer says otherwise or was
/// lost.
fn trace(state: &State, nonce: &[u8; 16], sent: Option<&Sent>) -> Trace {
    let pointer = state.pointer();
    if let Some(pointer) = pointer.filter(|pointer| pointer.nonce == *nonce) {
        return Trace::There(pointer.clone());
    }
    let Some(Sent { written, asked, .. }) = sent else {
        return Trace::Open;
    };
    let Some(pointer) = pointer.filter(|_| asked.version() != state.version()) else {
        return Trace::Open;
    };
    match pointer.follows(written) {
        Some(true) => Trace::Passed(written.clone()),
        Some(false) => Trace::Never,
        None => Trace::Open,
    }
}

fn named(error: Error, resource: &ResourceName) -> Error {
    error.with("resource", resource)
}
