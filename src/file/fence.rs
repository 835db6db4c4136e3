//! Fenced values as plain files of one host.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::body::Body;
use crate::clock;
use crate::driver::off_thread;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::file::place::Place;
use crate::file::safe::{self, io_error, shown};
use crate::file::sidecar::{Access, Change, Peek, Sidecar};
use crate::file::temp::Temp;
use crate::file::{doctor, faults};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::netfs;
use crate::token::{Admission, Intent, Watermark, judge};

/// How long an operation waits for a fence file's kernel lock where nothing is said.
const LOCK_WAIT_DEFAULT: Duration = Duration::from_secs(30);

/// How often a read without the lock starts again because a writer came in between.
const READ_TRIES_MAX: u32 = 10;

/// Plain files below one directory that refuse a stale token.
///
/// The value of `payments/today.csv` is the file of that name, which anything may read. Beside it
/// lies `.today.csv.fence`, which holds the watermark and is never removed. A write streams to a
/// temporary file, and then, under the exclusive kernel lock of the fence file, compares the token
/// with the watermark, stores the raised watermark durably, and renames. So the check and the write
/// are one step among all fenced writers of the host (S2), a reader of the plain file sees the old
/// value or the new one and never a part, and an `Ok` survives power loss (S10).
///
/// Resource names are relative paths with `/` between components. Missing directories below the
/// root are created on writes, unless [`create_parents`](FencedFilesOptions::create_parents) says
/// otherwise. The root itself has to exist.
///
/// Whoever can write to the directory can go around the fence: a plain `mv` or an editor is not
/// refused. A value that was changed so is read as written by nobody.
///
/// Cheap to clone. All I/O runs on the thread pool of the `blocking` crate, on any runtime or none.
/// An operation whose future is dropped either never starts or goes on to its end.
///
/// ```
/// use fencelock::{Fenced, FencingToken, file::FencedFiles};
/// # let dir = std::env::temp_dir().join(format!("fencelock-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir).unwrap();
/// # pollster::block_on(async {
/// let store = Fenced::new(FencedFiles::open(&dir)?);
/// store.put("payments/today.csv", "new data", FencingToken::new(34)?).await?;
/// let refused = store.put("payments/today.csv", "old data", FencingToken::new(33)?).await;
/// assert_eq!(refused.unwrap_err().kind(), fencelock::ErrorKind::Fenced);
/// assert_eq!(std::fs::read(dir.join("payments/today.csv")).unwrap(), b"new data");
/// # Ok::<(), fencelock::Error>(()) }).unwrap();
/// # std::fs::remove_dir_all(&dir).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct FencedFiles {
    root: Arc<Root>,
}

/// How [`FencedFiles`] are opened.
#[derive(Clone, Debug)]
pub struct FencedFilesOptions {
    create_parents: bool,
    allow_network_fs: bool,
    check_owner: bool,
    lock_wait: Duration,
}

impl Default for FencedFilesOptions {
    fn default() -> Self {
        Self {
            create_parents: true,
            allow_network_fs: false,
            check_owner: true,
            lock_wait: LOCK_WAIT_DEFAULT,
        }
    }
}

impl FencedFilesOptions {
    /// Create missing directories below the root on writes (the default), or refuse the write as
    /// `Invalid`.
    #[must_use]
    pub fn create_parents(mut self, create: bool) -> Self {
        self.create_parents = create;
        self
    }

    /// Take a network or user-space file system, which is refused by default. Only where its kernel
    /// locks exclude writers on **all** hosts, or where only one host ever writes.
    #[must_use]
    pub fn allow_network_fs(mut self, allow: bool) -> Self {
        self.allow_network_fs = allow;
        self
    }

    /// Refuse a fence file that another user owns (the default), which may have been planted; or
    /// take it, for a directory that several users write to and trust each other in.
    #[must_use]
    pub fn check_owner(mut self, check: bool) -> Self {
        self.check_owner = check;
        self
    }

    /// How long an operation waits for a fence file's kernel lock before it is `Unavailable`; 30 s
    /// by default. The lock is held for a few disk writes, never while a body is streamed.
    #[must_use]
    pub fn lock_wait(mut self, wait: Duration) -> Self {
        self.lock_wait = wait;
        self
    }

    /// The files below `dir`. Reads the directory's metadata and nothing else.
    ///
    /// # Errors
    /// `Invalid` where there is no such directory, or not for this user, or it is none;
    /// `Unsupported` where it lies on a network file system; `Unavailable` where the disk fails.
    pub fn open(self, dir: impl AsRef<Path>) -> Result<FencedFiles> {
        self.open_there(dir.as_ref()).map_err(safe::while_opening)
    }

    fn open_there(self, dir: &Path) -> Result<FencedFiles> {
        // Absolute, so that a later change of the working directory does not move the files.
        let root = std::fs::canonicalize(dir)
            .map_err(|e| io_error(e, "a directory of fenced files cannot be opened", dir))?;
        if !root.is_dir() {
            return Err(
                Error::invalid("expected a directory of fenced files, found a file")
                    .with("path", shown(&root)),
            );
        }
        netfs::refuse_network(&root, self.allow_network_fs)?;
        Ok(FencedFiles {
            root: Arc::new(Root {
                dir: root,
                options: self,
            }),
        })
    }
}

impl FencedFiles {
    /// The files below `dir`, with the default options.
    ///
    /// # Errors
    /// As [`FencedFilesOptions::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(dir)
    }

    /// Options, to [open](FencedFilesOptions::open) with.
    #[must_use]
    pub fn options() -> FencedFilesOptions {
        FencedFilesOptions::default()
    }

    /// Runs one operation on the thread pool. Once begun it goes on to its end, whether or not
    /// anybody waits for it.
    async fn run<T: Send + 'static>(
        &self,
        resource: &ResourceName,
        work: impl FnOnce(&Root, Place) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let place = Place::new(&self.root.dir, resource)?;
        let root = Arc::clone(&self.root);
        off_thread(move || work(&root, place)).await?
    }
}

#[async_trait]
impl FencedStore for FencedFiles {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        let fence = fence.clone();
        self.run(resource, move |root, place| root.put(&place, body, &fence))
            .await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        self.run(resource, |root, place| root.get(&place)).await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let fence = fence.clone();
        self.run(resource, move |root, place| root.raise(&place, &fence))
            .await
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let fence = fence.clone();
        self.run(resource, move |root, place| root.delete(&place, &fence))
            .await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let fence = fence.clone();
        self.run(resource, move |root, place| root.rebind(&place, &fence))
            .await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let root = Arc::clone(&self.root);
        off_thread(move || doctor::examine(&root.dir, root.access())).await
    }
}

#[derive(Debug)]
struct Root {
    dir: PathBuf,
    options: FencedFilesOptions,
}

impl Root {
    fn put(&self, place: &Place, body: Body, fence: &Fence) -> Result<Written> {
        place.look()?;
        self.refuse_early(place, fence)?;
        self.create_parents(place)?;
        let mut temp = Temp::create(place)?;
        temp.fill(body, place)?;
        let mut sidecar = Sidecar::exclusive(place, self.access())?;
        let watermark = match admit(&sidecar, fence, Intent::Write)? {
            Admission::Repeat(watermark) => return Ok(Written::repeated(watermark)),
            Admission::Apply(watermark) => watermark,
        };
        // A rename would replace a symlink or a pipe, and not what the caller named.
        place.look()?;
        let stamp = temp.stamp()?;
        let number = temp.number();
        sidecar.announce(
            &watermark,
            Change::Put {
                temp: number,
                stamp,
            },
        )?;
        if let Err(e) = temp.publish(place, &stamp) {
            return Err(not_changed(&mut sidecar, e));
        }
        finish(place, &mut sidecar)?;
        Ok(Written::applied(watermark))
    }

    fn delete(&self, place: &Place, fence: &Fence) -> Result<Written> {
        place.look()?;
        self.refuse_early(place, fence)?;
        self.create_parents(place)?;
        let mut sidecar = Sidecar::exclusive(place, self.access())?;
        let watermark = match admit(&sidecar, fence, Intent::Write)? {
            Admission::Repeat(watermark) => return Ok(Written::repeated(watermark)),
            Admission::Apply(watermark) => watermark,
        };
        place.look()?;
        sidecar.announce(&watermark, Change::Delete)?;
        let removed = faults::step("unlink").and_then(|()| std::fs::remove_file(&place.data));
        if let Err(e) = removed
            && e.kind() != io::ErrorKind::NotFound
        {
            let e = io_error(e, "a value cannot be removed", &place.data);
            return Err(not_changed(&mut sidecar, e));
        }
        finish(place, &mut sidecar)?;
        Ok(Written::applied(watermark))
    }

    fn raise(&self, place: &Place, fence: &Fence) -> Result<Snapshot> {
        place.look()?;
        self.create_parents(place)?;
        let mut sidecar = Sidecar::exclusive(place, self.access())?;
        let (Admission::Apply(watermark) | Admission::Repeat(watermark)) =
            admit(&sidecar, fence, Intent::Raise)?;
        sidecar.raise(watermark)?;
        // Under the same lock: what is read here is what the next writer has to go past (S5).
        sidecar.snapshot()
    }

    fn rebind(&self, place: &Place, fence: &Fence) -> Result<Written> {
        place.look()?;
        self.create_parents(place)?;
        let mut sidecar = Sidecar::exclusive(place, self.access())?;
        let (Admission::Apply(watermark) | Admission::Repeat(watermark)) =
            admit(&sidecar, fence, Intent::Rebind)?;
        sidecar.raise(watermark.clone())?;
        Ok(Written::applied(watermark))
    }

    fn get(&self, place: &Place) -> Result<Snapshot> {
        for _ in 0..READ_TRIES_MAX {
            match Sidecar::peek(place, self.access())? {
                Peek::Settled(sidecar) => {
                    let snapshot = sidecar.snapshot()?;
                    if sidecar.is_unchanged()? {
                        return Ok(snapshot);
                    }
                }
                Peek::Unclear => {
                    if let Some(snapshot) = self.get_locked(place)? {
                        return Ok(snapshot);
                    }
                }
                Peek::Missing => {
                    let value = place.open_data()?.map(Body::from_file).transpose()?;
                    // The fence file comes before the first fenced value, so where it is still
                    // missing, the value is no fenced one.
                    if let Peek::Missing = Sidecar::peek(place, self.access())? {
                        return Ok(Snapshot::new(value, None, None));
                    }
                }
            }
        }
        match self.get_locked(place)? {
            Some(snapshot) => Ok(snapshot),
            None => Err(Error::unavailable(
                "the fence file is removed again and again by something else",
            )
            .with("path", shown(&place.fence))),
        }
    }

    /// Reads under the lock, and settles before that what a dead writer left.
    fn get_locked(&self, place: &Place) -> Result<Option<Snapshot>> {
        match Sidecar::shared(place, self.access())? {
            None => return Ok(None),
            Some(sidecar) if sidecar.is_settled() => return sidecar.snapshot().map(Some),
            Some(_) => {}
        }
        // Where this user may only read, the snapshot below comes to the same answer and stores
        // nothing.
        if let Ok(sidecar) = Sidecar::exclusive(place, self.access()) {
            return sidecar.snapshot().map(Some);
        }
        match Sidecar::shared(place, self.access())? {
            Some(sidecar) => sidecar.snapshot().map(Some),
            None => Ok(None),
        }
    }

    /// Refuses before a body is streamed what would be refused after it, since a watermark never
    /// goes down. Where this look is not clear, the one under the lock decides, as it always does
    /// before a write.
    fn refuse_early(&self, place: &Place, fence: &Fence) -> Result<()> {
        if let Peek::Settled(sidecar) = Sidecar::peek(place, self.access())? {
            admit(&sidecar, fence, Intent::Write)?;
        }
        Ok(())
    }

    fn create_parents(&self, place: &Place) -> Result<()> {
        if place.dir.is_dir() {
            return Ok(());
        }
        if !self.options.create_parents {
            return Err(Error::invalid(
                "the directory of the file is not there, and is not to be created; create it, or allow that",
            )
            .with("path", shown(&place.dir)));
        }
        let Ok(below) = place.dir.strip_prefix(&self.dir) else {
            return Ok(());
        };
        let mut dir = self.dir.clone();
        for component in below {
            let parent = dir.clone();
            dir.push(component);
            match std::fs::create_dir(&dir) {
                // Durable before anything in it can be acknowledged, whoever created it.
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => {
                    let error = io_error(e, "a directory cannot be created", &dir);
                    return Err(safe::while_opening(error));
                }
            }
            safe::sync_dir(&parent)?;
        }
        Ok(())
    }

    fn access(&self) -> Access {
        Access {
            check_owner: self.options.check_owner,
            lock_wait: self.options.lock_wait,
        }
    }
}

fn admit(sidecar: &Sidecar<'_>, fence: &Fence, intent: Intent) -> Result<Admission> {
    let current: Option<&Watermark> = sidecar.state().watermark.as_ref();
    judge(current, fence, intent, clock::unix_micros())
}

/// Makes a change durable and records it. It has happened, so every failure is `Indeterminate`: a
/// repeat finds out.
fn finish(place: &Place, sidecar: &mut Sidecar<'_>) -> Result<()> {
    safe::sync_dir(&place.dir)
        .and_then(|()| sidecar.record())
        .map_err(|e| e.into_kind(ErrorKind::Indeterminate))
}

/// The answer where a change was announced and did not happen. The announcement is taken back; where
/// that fails too, the next lock does it.
fn not_changed(sidecar: &mut Sidecar<'_>, error: Error) -> Error {
    let _ = sidecar.settle();
    error
}

#[cfg(test)]
mod tests;
