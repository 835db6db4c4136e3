//! Hints for waiters: inotify for what other processes write, and a look now and then for what
//! makes no event, such as a death or a lapse.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::file::engine::Engine;
use crate::lease::Watch;
use crate::name::LockName;

/// How often a waiter looks at the record itself: so soon a holder that was killed is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What a waiter sees of a record: its version, and how many of its grants are good. `None` for no
/// record.
pub(crate) type Glimpse = Option<((u64, u64), usize)>;

/// A [`Watch`] on one lock.
#[derive(Debug)]
pub(crate) struct FileWatch {
    engine: Arc<Engine>,
    name: LockName,
    seen: Option<Glimpse>,
    told: Option<Subscription>,
}

impl FileWatch {
    pub(crate) fn new(engine: Arc<Engine>, name: LockName) -> Self {
        let told = engine.notifier.subscribe(&name.encoded());
        Self::with(engine, name, told)
    }

    fn with(engine: Arc<Engine>, name: LockName, told: Option<Subscription>) -> Self {
        // Subscribed before the look, so that nothing falls between the two.
        let seen = engine.glimpse(&name);
        Self {
            engine,
            name,
            seen,
            told,
        }
    }
}

#[async_trait]
impl Watch for FileWatch {
    /// Cancel safe: what was seen is noted only when the answer is given.
    async fn changed(&mut self) {
        loop {
            let told = tokio::select! {
                told = next(&mut self.told) => told,
                () = tokio::time::sleep(LOOK_EVERY) => false,
            };
            // A record that is busy just now will be looked at again, or tells by itself.
            let glimpse = self.engine.glimpse(&self.name);
            let differs = glimpse.is_some() && glimpse != self.seen;
            if told || differs {
                if glimpse.is_some() {
                    self.seen = glimpse;
                }
                return;
            }
        }
    }
}

async fn next(told: &mut Option<Subscription>) -> bool {
    if let Some(subscription) = told {
        if subscription.receiver.changed().await.is_ok() {
            return true;
        }
        *told = None;
    }
    std::future::pending().await
}

/// A waiter's place at the [`Notifier`].
#[derive(Debug)]
pub(crate) struct Subscription {
    key: String,
    receiver: watch::Receiver<()>,
    hub: Arc<Hub>,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.leave(&self.key);
    }
}

/// One inotify instance and one thread of a store, made when somebody first waits.
#[derive(Debug)]
pub(crate) struct Notifier {
    dir: PathBuf,
    hub: Mutex<Option<Started>>,
}

/// The outcome of the first attempt to start. It is not tried again: where the system has no
/// instance to spare, waiters go on by looking.
#[derive(Debug)]
enum Started {
    Running { hub: Arc<Hub>, pid: u32 },
    Failed,
}

impl Notifier {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            hub: Mutex::new(None),
        }
    }

    /// Asks to be told of changes to the file `key`; `None` where the system cannot.
    fn subscribe(&self, key: &str) -> Option<Subscription> {
        let mut started = lock(&self.hub);
        let started = started.get_or_insert_with(|| match Hub::start(&self.dir) {
            Some(hub) => Started::Running {
                hub,
                pid: std::process::id(),
            },
            None => Started::Failed,
        });
        match started {
            // A forked child has no such thread.
            Started::Running { hub, pid } if *pid == std::process::id() => Hub::join(hub, key),
            _ => None,
        }
    }

    /// True where inotify works here.
    pub(crate) fn is_available(&self) -> bool {
        self.subscribe(".probe").is_some()
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if let Some(Started::Running { hub, pid }) = lock(&self.hub).as_ref()
            && *pid == std::process::id()
        {
            hub.stop();
        }
    }
}

/// What the notifier's thread and the waiters share.
#[derive(Debug)]
pub(crate) struct Hub {
    dir: PathBuf,
    system: system::System,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// For each file who is told, and how many wait.
    by_key: HashMap<String, (watch::Sender<()>, usize)>,
    /// The watch on the directory, there only while somebody waits: a busy store makes many events.
    watch: Option<system::WatchId>,
}

impl Hub {
    fn start(dir: &Path) -> Option<Arc<Self>> {
        let hub = Arc::new(Self {
            dir: dir.to_owned(),
            system: system::System::new()?,
            waiting: Mutex::default(),
        });
        let of_thread = Arc::clone(&hub);
        std::thread::Builder::new()
            .name("fencelock-watch".to_owned())
            .spawn(move || of_thread.system.run(|key| of_thread.tell(key)))
            .ok()?;
        Some(hub)
    }

    fn stop(&self) {
        self.system.stop();
    }

    fn join(self: &Arc<Self>, key: &str) -> Option<Subscription> {
        let mut waiting = lock(&self.waiting);
        if waiting.watch.is_none() {
            waiting.watch = Some(self.system.watch(&self.dir)?);
        }
        let (sender, count) = waiting
            .by_key
            .entry(key.to_owned())
            .or_insert_with(|| (watch::Sender::new(()), 0));
        *count += 1;
        Some(Subscription {
            key: key.to_owned(),
            receiver: sender.subscribe(),
            hub: Arc::clone(self),
        })
    }

    fn leave(&self, key: &str) {
        let mut waiting = lock(&self.waiting);
        if let Some((_, count)) = waiting.by_key.get_mut(key) {
            *count -= 1;
        }
        waiting.by_key.retain(|_, (_, count)| *count > 0);
        if waiting.by_key.is_empty()
            && let Some(watch) = waiting.watch.take()
        {
            self.system.unwatch(watch);
        }
    }

    /// Wakes those who wait for `key`; all where events were lost.
    fn tell(&self, key: Option<&str>) {
        let waiting = lock(&self.waiting);
        match key {
            Some(key) => {
                if let Some((sender, _)) = waiting.by_key.get(key) {
                    sender.send_replace(());
                }
            }
            None => waiting.by_key.values().for_each(|(sender, _)| {
                sender.send_replace(());
            }),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod system {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    use rustix::fs::inotify::{
        CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch,
    };
    use rustix::io::Errno;

    /// Room for many events of the longest key.
    const BUFFER_BYTES: usize = 16 * 1024;

    pub(super) type WatchId = i32;

    /// An inotify instance, and an event by which its thread is stopped.
    #[derive(Debug)]
    pub(super) struct System {
        inotify: OwnedFd,
        stop: OwnedFd,
    }

    impl System {
        pub(super) fn new() -> Option<Self> {
            Some(Self {
                inotify: init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?,
                stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?,
            })
        }

        /// Not a close: each attempt closes the file, and waiters would wake each other for ever.
        pub(super) fn watch(&self, dir: &Path) -> Option<WatchId> {
            let changes =
                WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_TO;
            add_watch(&self.inotify, dir, changes | WatchFlags::ONLYDIR).ok()
        }

        pub(super) fn unwatch(&self, watch: WatchId) {
            // It is gone already where the directory is.
            let _ = remove_watch(&self.inotify, watch);
        }

        pub(super) fn stop(&self) {
            // Fails only where it is signalled already.
            let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        }

        /// Passes on events until [`stop`](Self::stop) is called or the system fails.
        pub(super) fn run(&self, tell: impl Fn(Option<&str>)) {
            let mut buffer = [MaybeUninit::uninit(); BUFFER_BYTES];
            loop {
                let mut fds = [
                    PollFd::new(&self.inotify, PollFlags::IN),
                    PollFd::new(&self.stop, PollFlags::IN),
                ];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(_) => return,
                }
                let [_, stop] = &fds;
                if !stop.revents().is_empty() {
                    return;
                }
                let mut events = Reader::new(&self.inotify, &mut buffer);
                while let Ok(event) = events.next() {
                    if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                        tell(None);
                    } else if let Some(key) = event.file_name().and_then(|key| key.to_str().ok()) {
                        tell(Some(key));
                    }
                }
            }
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod system {
    use std::path::Path;

    pub(super) type WatchId = ();

    /// No notifications here.
    #[derive(Debug)]
    pub(super) struct System;

    impl System {
        pub(super) fn new() -> Option<Self> {
            None
        }

        pub(super) fn watch(&self, _: &Path) -> Option<WatchId> {
            None
        }

        pub(super) fn unwatch(&self, (): WatchId) {}

        pub(super) fn stop(&self) {}

        pub(super) fn run(&self, _: impl Fn(Option<&str>)) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileStore;
    use crate::lease::{AcquireRequest, LeaseStore as _, Ttl};

    #[tokio::test]
    async fn a_waiter_without_notifications_sees_a_change_by_looking() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let name: LockName = "a".parse().unwrap();
        let mut watch = FileWatch::with(store.shared(), name.clone(), None);
        for _ in 0..2 {
            let request = AcquireRequest::new(name.clone(), Ttl::DEFAULT);
            store.acquire(&request).await.unwrap();
            let changed = tokio::time::timeout(Duration::from_secs(20), watch.changed());
            changed.await.expect("no look was taken");
            store.break_lock(&name).await.unwrap();
        }
    }

    #[test]
    fn a_notifier_stops_its_thread_and_forgets_who_left() {
        let dir = tempfile::tempdir().unwrap();
        let notifier = Notifier::new(dir.path().to_owned());
        let (first, second) = (
            notifier.subscribe("a").unwrap(),
            notifier.subscribe("a").unwrap(),
        );
        let hub = Arc::clone(&first.hub);
        drop(first);
        assert!(lock(&hub.waiting).watch.is_some());
        drop(second);
        assert!(lock(&hub.waiting).watch.is_none());
        assert!(lock(&hub.waiting).by_key.is_empty());
        drop(notifier);
        // The thread lets go of the hub when it ends.
        while Arc::strong_count(&hub) > 1 {
            std::thread::yield_now();
        }
    }
}
