// Included into each variant: small programs of two to four threads over its queue, held lease and
// keeper. A deadlock is found by shuttle, everything else is asserted.

pub mod models {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use fencelock::lease::{HolderId, LeaseRef, Renewal, Ttl};
    use fencelock::{FencingToken, LockName};
    use shuttle::future::block_on;
    use shuttle::thread;

    use super::held::{Granted, Held, LostReason};
    use super::keeper::Keeper;
    use super::queue::Queues;
    use crate::clock::Tick;
    use crate::driver::Driver;
    use crate::runtime::Time;
    use crate::store::Agreeable;

    const TTL: Duration = Duration::from_millis(300);

    fn name(name: &str) -> LockName {
        name.parse().unwrap()
    }

    fn held(of: &str, ttl: Duration, time: &Time) -> Arc<Held> {
        let now = time.clock().now();
        let token = FencingToken::MIN;
        Arc::new(Held::new(Granted {
            lease: LeaseRef {
                name: name(of),
                holder: HolderId::from_bytes([1; 16]),
                token: Some(token),
            },
            token,
            ttl: Ttl::new(ttl).unwrap(),
            sent: now,
            answered: now,
            renews: true,
            min_hold: Duration::ZERO,
            max_hold: None,
            pid: 1,
        }))
    }

    fn keeper(awaited: &str, time: &Time) -> (Arc<Keeper>, Arc<Agreeable>) {
        let store = Agreeable::new(&name(awaited));
        let keeper = Keeper::new(
            Arc::clone(&store) as _,
            time.clock(),
            Duration::from_secs(4),
        );
        (Arc::new(keeper), store)
    }

    /// Only one of a name has its turn, and nothing is left of a line that all have left.
    pub fn turns_are_taken_one_at_a_time() {
        let queues = Arc::new(Queues::new());
        let busy = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (queues, busy) = (Arc::clone(&queues), Arc::clone(&busy));
                thread::spawn(move || {
                    let place = queues.join(&name("a"));
                    block_on(async {
                        let _turn = place.turn().await.unwrap();
                        assert!(!busy.swap(true, Ordering::SeqCst), "two have their turn");
                        shuttle::future::yield_now().await;
                        busy.store(false, Ordering::SeqCst);
                    });
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(queues.load(), (0, 0));
        assert!(!queues.has_waiters(&name("a")));
    }

    /// Whoever waits for a lock that is given up in the same process hears of it.
    pub fn a_freed_lock_finds_its_waiter() {
        let queues = Arc::new(Queues::new());
        let taken = Arc::new(shuttle::sync::Mutex::new(true));
        let (theirs, lock) = (Arc::clone(&queues), Arc::clone(&taken));
        let holder = thread::spawn(move || {
            *lock.lock().unwrap() = false;
            theirs.freed(&name("a"));
        });
        block_on(async {
            let place = queues.join(&name("a"));
            let _turn = place.turn().await.unwrap();
            while std::mem::replace(&mut *taken.lock().unwrap(), true) {
                // The answer that it is still held takes its time.
                shuttle::future::yield_now().await;
                place.freed().await;
            }
        });
        holder.join().unwrap();
        assert_eq!(queues.load(), (0, 0));
    }

    /// Whoever waits for the loss of a lease hears of it, whoever declares it first; and what is lost
    /// is not found again by an answer that comes late (L5).
    pub fn a_loss_is_heard_and_final() {
        let time = Time::begin();
        let held = held("a", TTL, &time);
        let clock = time.clock();
        let (theirs, now) = (Arc::clone(&held), clock.clone());
        let waits = thread::spawn(move || {
            block_on(theirs.lost().cancelled());
            assert!(theirs.check(&now).is_err());
        });
        let (theirs, now) = (Arc::clone(&held), clock.clone());
        let renews = thread::spawn(move || {
            if theirs.begin_renewal(Tick::NEVER) {
                let sent = now.now();
                thread::yield_now();
                theirs.end_renewal(&Renewal::Renewed, sent, now.now());
            }
        });
        time.pass(TTL * 2);
        let lost = held.check(&clock).is_err();
        held.lose(LostReason::NotHeld);
        assert!(held.check(&clock).is_err());
        assert!(!lost || held.lost_reason() == Some(LostReason::Unconfirmed));
        renews.join().unwrap();
        waits.join().unwrap();
        assert!(held.check(&clock).is_err(), "a lost lease is good again");
        assert_eq!(held.next_event(), Tick::NEVER);
    }

    /// One of several that end a lease ends it, and hears how it stood.
    pub fn a_lease_ends_once() {
        let time = Time::begin();
        let held = held("a", TTL, &time);
        let ended = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (held, ended) = (Arc::clone(&held), Arc::clone(&ended));
                thread::spawn(move || {
                    if held.end().is_some() {
                        ended.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        held.lose(LostReason::NotHeld);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        assert!(held.check(&time.clock()).is_err());
    }

    /// `drained` returns when, and only when, nothing is left in the background.
    pub fn draining_ends() {
        let time = Time::begin();
        let (keeper, _) = keeper("a", &time);
        let freed = Arc::new(AtomicUsize::new(0));
        for of in ["a", "b"] {
            let lease = held(of, TTL, &time).lease().clone();
            let freed = Arc::clone(&freed);
            let lapses = time.clock().now().after(TTL);
            keeper.release_later(&Driver, lease, Duration::ZERO, lapses, move |_| {
                freed.fetch_add(1, Ordering::SeqCst);
            });
        }
        let twin = Arc::clone(&keeper);
        let other = thread::spawn(move || block_on(twin.drained()));
        block_on(keeper.drained());
        assert_eq!(freed.load(Ordering::SeqCst), 2, "drained too early");
        other.join().unwrap();
        assert_eq!(keeper.load(), (0, 0));
    }

    /// A lease that is taken into care is renewed in time, whatever the keeper is doing meanwhile.
    pub fn a_new_lease_is_renewed_in_time() {
        let time = Time::begin();
        let (keeper, store) = keeper("new", &time);
        let old = held("old", Duration::from_secs(600), &time);
        keeper.keep(&Driver, &old).unwrap();
        // The nap that the keeper takes, or is about to take, is over.
        time.pass(Duration::from_secs(1));
        let new = held("new", TTL, &time);
        keeper.keep(&Driver, &new).unwrap();
        time.pass(TTL / 3);
        block_on(store.renewed.notified());
        keeper.forget(&new);
        keeper.forget(&old);
        keeper.stop();
        assert_eq!(keeper.load().0, 0);
    }

    /// A guard that ends while its renewal is under way leaves nothing in care.
    pub fn an_ended_lease_is_forgotten() {
        let time = Time::begin();
        let (keeper, _) = keeper("a", &time);
        let held = held("a", TTL, &time);
        keeper.keep(&Driver, &held).unwrap();
        time.pass(TTL / 3);
        let (theirs, guard) = (Arc::clone(&keeper), Arc::clone(&held));
        let drops = thread::spawn(move || {
            assert_eq!(guard.end(), Some(None));
            theirs.forget(&guard);
        });
        drops.join().unwrap();
        keeper.stop();
        assert_eq!(keeper.load(), (0, 0));
        assert_eq!(held.next_event(), Tick::NEVER);
    }
}
