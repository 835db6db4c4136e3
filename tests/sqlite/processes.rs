//! Real processes. A child is this test binary again, told by its environment what to do.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::fence::{Domain, HolderTag};
use fencelock::lease::{Attempt, LeaseStore, Renewal, Severity};
use fencelock::sqlite::rusqlite::{Connection, TransactionBehavior};
use fencelock::sqlite::{FencedSqlite, SqliteStore};
use fencelock::{ErrorKind, Fence, FencedStore, Locks, Ttl};
use rustix::process::Signal;
use tokio::task::JoinSet;

use crate::lab::*;
use crate::opening::on_a_full_disk;

pub(crate) struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(dir: &Path, job: &str) -> Self {
        Self::start_under(&[], dir, job)
    }

    /// Starts the child through another program, `under` and its arguments.
    pub(crate) fn start_under(under: &[&str], dir: &Path, job: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = match under.first() {
            Some(first) => Command::new(first),
            None => Command::new(&program),
        };
        if !under.is_empty() {
            command.args(&under[1..]).arg(&program);
        }
        let mut child = command
            .current_dir(dir)
            .args(["--exact", "processes::child_process", "--nocapture"])
            .env("FENCELOCK_TEST_DIR", dir)
            .env("FENCELOCK_TEST_JOB", job)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The next line that the child's job wrote; `None` once it has ended.
    pub(crate) fn listen(&mut self) -> Option<String> {
        loop {
            let line = self.lines.next()?.unwrap();
            if let Some((_, said)) = line.split_once("SAID ") {
                return Some(said.to_owned());
            }
        }
    }

    pub(crate) fn hear(&mut self) -> String {
        self.listen().expect("the child goes on")
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    println!("\nSAID {what}");
}

fn wait_for_a_line() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Not a test of its own: the body of the children.
#[tokio::test]
async fn child_process() {
    let Ok(job) = std::env::var("FENCELOCK_TEST_JOB") else {
        return;
    };
    let dir = PathBuf::from(std::env::var("FENCELOCK_TEST_DIR").unwrap());
    let path = dir.join("app.db");
    match job.split_once(' ').unwrap() {
        ("hold", ms) => {
            let store = SqliteStore::open(&path).await.unwrap();
            let request = request("a", Duration::from_millis(ms.parse().unwrap()));
            let grant = granted(&store, &request).await;
            say(grant.token);
            wait_for_a_line();
            say(format!(
                "{:?}",
                renewal(&store, &lease(&request, &grant)).await
            ));
        }
        ("many", locks) => many(&path, locks.parse().unwrap()).await,
        ("count", rounds) => count(&dir, rounds.parse().unwrap()).await,
        ("spin", size) => spin(&path, size.parse().unwrap()).await,
        ("write", _) => {
            let mut connection = Connection::open(&path).unwrap();
            let transaction = connection
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .unwrap();
            transaction
                .execute_batch("CREATE TABLE mine (x); INSERT INTO mine VALUES (1)")
                .unwrap();
            say("writing");
            wait_for_a_line();
            transaction.commit().unwrap();
            say("committed");
        }
        ("full", _) => {
            on_a_full_disk(&dir.join("disk")).await;
            say("done");
        }
        other => panic!("{other:?}"),
    }
}

/// Holds so many locks while twenty others wait, asks for all of them at once, and says how many
/// connections and threads that took at the most.
async fn many(path: &Path, count: usize) {
    let locks = Locks::new(SqliteStore::open(path).await.unwrap());
    let mut guards = Vec::new();
    for i in 0..count {
        let ttl = Duration::from_secs(3);
        let guard = locks.acquire(format!("many-{i}")).ttl(ttl).await;
        guards.push(guard.unwrap());
    }
    let mut waiters = JoinSet::new();
    for i in 0..20 {
        let locks = locks.clone();
        waiters.spawn(async move {
            let guard = locks.acquire(format!("many-{i}")).await.unwrap();
            let token = guard.token().get();
            guard.release().await.unwrap();
            token
        });
    }
    let (mut connections, mut most_threads) = (0, 0);
    // Renewed a few times over.
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let looks = (0..count).map(|i| {
            let locks = locks.clone();
            async move { locks.inspect(&format!("many-{i}")).await.unwrap().unwrap() }
        });
        let seen = looks.collect::<JoinSet<_>>().join_all().await;
        assert!(seen.iter().all(|state| state.holders.len() == 1));
        connections = connections.max(descriptors_of(path));
        most_threads = most_threads.max(threads());
    }
    for guard in &guards {
        guard.check().unwrap();
    }
    say(format!("{connections} {most_threads}"));
    for guard in guards {
        guard.release().await.unwrap();
    }
    assert!(waiters.join_all().await.iter().all(|token| *token == 2));
    say("done");
}

/// How often this process has the file open: once for each connection.
fn descriptors_of(path: &Path) -> usize {
    let path = path.canonicalize().unwrap();
    let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path))
        .count()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn two_hundred_locks_take_three_connections_and_few_threads() {
    let data = Data::new();
    let mut child = Process::start(data.dir(), "many 200");
    let said = child.hear();
    let (connections, threads) = said.split_once(' ').unwrap();
    let connections: usize = connections.parse().unwrap();
    assert!((1..=3).contains(&connections), "{said}");
    // Those of the test, of fencelock, and for work that waits for files one for each connection, and
    // some that begin while another ends.
    let threads: usize = threads.parse().unwrap();
    assert!((1..=16).contains(&threads), "{said}");
    assert_eq!(child.hear(), "done");
}

async fn count(dir: &Path, rounds: u32) {
    let store = SqliteStore::open(dir.join("app.db")).await.unwrap();
    let mut done = 0;
    while done < rounds {
        let mut watch = store.watch(&name("a")).await.unwrap();
        let request = long("a");
        let Attempt::Granted(grant) = store.acquire(&request).await.unwrap() else {
            watch.changed().await;
            continue;
        };
        // A read, a pause and a write that only the lock makes one step.
        let path = dir.join("counter");
        let before: u64 = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        tokio::task::yield_now().await;
        std::fs::write(&path, (before + 1).to_string()).unwrap();
        let mut log = std::fs::OpenOptions::new()
            .append(true)
            .open(dir.join("log"))
            .unwrap();
        log.write_all(format!("{}\n", grant.token).as_bytes())
            .unwrap();
        let lease = lease(&request, &grant);
        store.release(&lease, Duration::ZERO).await.unwrap();
        done += 1;
    }
    say(&store.profile().realm);
}

/// Takes a lock from whoever has it, writes a value under it, and again.
async fn spin(path: &Path, size: usize) {
    let store = SqliteStore::open(path).await.unwrap();
    let values = FencedSqlite::open(path).await.unwrap();
    loop {
        store.break_lock(&name("a")).await.unwrap();
        let request = long("a");
        let Attempt::Granted(grant) = store.acquire(&request).await.unwrap() else {
            continue;
        };
        say(format_args!("token {}", grant.token));
        let domain = Domain::new("sqlite", &store.profile().realm, &request.name);
        let fence = Fence::new(grant.token, HolderTag::of(&request.holder), domain).with_seq(1);
        match values
            .put(
                &name_of_value(),
                value(grant.token.get(), size).into(),
                &fence,
            )
            .await
        {
            Ok(_) => say(format_args!("put {}", grant.token)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
        }
        let _ = store
            .release(&lease(&request, &grant), Duration::ZERO)
            .await;
    }
}

fn name_of_value() -> fencelock::ResourceName {
    "v".parse().unwrap()
}

/// The token again and again: half of one and half of another cannot pass for a value.
fn value(token: u64, size: usize) -> Vec<u8> {
    token.to_be_bytes().repeat(size / 8)
}

#[tokio::test]
async fn a_killed_holder_is_replaced_when_its_lease_lapses_and_not_before() {
    let data = Data::new();
    let store = data.store().await;
    let mut child = Process::start(data.dir(), "hold 1500");
    let its: u64 = child.hear().parse().unwrap();
    let mut watch = store.watch(&name("a")).await.unwrap();
    child.signal(Signal::KILL);
    let left = held(&store, &long("a")).await.free_in.unwrap();
    let clock = Clock::system();
    let seen = clock.now();
    let grant = loop {
        in_time(watch.changed()).await;
        if let Attempt::Granted(grant) = store.acquire(&long("a")).await.unwrap() {
            break grant;
        }
    };
    assert!(
        clock.now().since(seen) >= left,
        "replaced before its expiry"
    );
    assert!(grant.token.get() > its);
}

#[tokio::test]
async fn a_paused_holder_is_replaced_at_its_expiry_and_then_has_lost() {
    let data = Data::new();
    let store = data.store().await;
    let mut child = Process::start(data.dir(), "hold 1500");
    let its: u64 = child.hear().parse().unwrap();
    child.signal(Signal::STOP);
    let mut watch = store.watch(&name("a")).await.unwrap();
    let grant = loop {
        if let Attempt::Granted(grant) = store.acquire(&long("a")).await.unwrap() {
            break grant;
        }
        in_time(watch.changed()).await;
    };
    assert!(grant.token.get() > its);
    child.signal(Signal::CONT);
    child.tell("renew");
    assert_eq!(child.hear(), "Lost");
    held(&store, &long("a")).await;
}

#[test]
fn processes_that_share_a_lock_lose_no_update_and_repeat_no_token() {
    let data = Data::new();
    std::fs::write(data.dir().join("counter"), "0").unwrap();
    std::fs::write(data.dir().join("log"), "").unwrap();
    let mut children: Vec<_> = (0..6)
        .map(|_| Process::start(data.dir(), "count 40"))
        .collect();
    let realms: HashSet<_> = children.iter_mut().map(Process::hear).collect();
    assert_eq!(realms.len(), 1);
    let counted = std::fs::read_to_string(data.dir().join("counter")).unwrap();
    assert_eq!(counted, "240");
    let log = std::fs::read_to_string(data.dir().join("log")).unwrap();
    let tokens: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 240);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// Four at a time on one database, each killed after a few of its steps and started again: 520
/// kills, of which many strike within a transaction.
#[test]
fn after_520_kills_no_token_was_told_twice_and_no_value_is_half_a_value() {
    const SIZE: usize = 120_000;
    let data = Data::new();
    let told = Mutex::new(Vec::new());
    let put = Mutex::new(0);
    std::thread::scope(|scope| {
        for lane in 0_u64..4 {
            let (data, told, put) = (&data, &told, &put);
            scope.spawn(move || {
                let mut random = lane + 1;
                for _ in 0..130 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let mut child = Process::start(data.dir(), &format!("spin {SIZE}"));
                    for _ in 0..(random >> 33) % 4 + 1 {
                        hear_told(&child.hear(), told, put);
                    }
                    // So that the kill strikes anywhere in what comes next.
                    std::thread::sleep(Duration::from_micros((random >> 40) % 3_000));
                    child.signal(Signal::KILL);
                    // What it still told counts as told.
                    while let Some(said) = child.listen() {
                        hear_told(&said, told, put);
                    }
                }
            });
        }
    });
    let told = told.into_inner().unwrap();
    let unique: HashSet<u64> = told.iter().copied().collect();
    assert_eq!(unique.len(), told.len(), "a token was told twice");
    assert!(told.len() >= 520, "{}", told.len());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = data.store().await;
        store.break_lock(&name("a")).await.unwrap();
        let last = told.iter().max().unwrap();
        assert!(cycle(&store, "a").await > *last);
        let values = data.values().await;
        let seen = values.get(&name_of_value()).await.unwrap();
        let writer = seen.writer.unwrap().get();
        let bytes = seen.value.unwrap().into_bytes(u64::MAX).unwrap();
        assert_eq!(bytes, value(writer, SIZE), "half a value");
        assert!(writer >= put.into_inner().unwrap(), "a put was lost");
        assert_eq!(seen.watermark.unwrap().token.get(), writer);
        let findings = store.probe().await.unwrap();
        assert!(
            findings.iter().all(|f| f.severity < Severity::Bad),
            "{findings:?}"
        );
    });
    let whole: String = data
        .connect()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(whole, "ok");
}

fn hear_told(said: &str, told: &Mutex<Vec<u64>>, put: &Mutex<u64>) {
    // The last line of a killed child may be cut.
    let (what, number) = said.split_once(' ').unwrap_or_default();
    match (what, number.parse::<u64>()) {
        ("token", Ok(number)) => told.lock().unwrap().push(number),
        ("put", Ok(number)) => {
            let mut put = put.lock().unwrap();
            *put = number.max(*put);
        }
        _ => {}
    }
}

#[tokio::test]
async fn while_a_writer_is_paused_in_its_transaction_others_are_unavailable_in_time_and_go_on_after()
 {
    let data = Data::new();
    let (store, values) = (data.store().await, data.values().await);
    let before = long("held");
    let grant = granted(&store, &before).await;
    let mut writer = Process::start(data.dir(), "write something");
    assert_eq!(writer.hear(), "writing");
    writer.signal(Signal::STOP);

    let blocked = long("b");
    // All at once, behind each other on their connections.
    let (acquires, took) = in_time(async {
        let acquires: Vec<_> = (0..8)
            .map(|_| {
                let (store, request) = (store.clone(), long("c"));
                tokio::spawn(async move { store.acquire(&request).await })
            })
            .collect();
        let own = store.acquire(&blocked).await;
        let mut answers = vec![own];
        for acquire in acquires {
            answers.push(acquire.await.unwrap());
        }
        answers
    })
    .await;
    for answer in acquires {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("open transaction") && text.contains("app.db"),
            "{text}"
        );
    }
    assert!(took < Duration::from_secs(5), "{took:?}");
    let fence = Fence::from(token(1));
    let (put, _) = in_time(values.put(&name_of_value(), vec![1].into(), &fence)).await;
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Unavailable);
    let (renewed, took) = in_time(renewal(&store, &lease(&before, &grant))).await;
    let Renewal::Unknown(error) = renewed else {
        panic!("{renewed:?}")
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(took < Duration::from_secs(3), "{took:?}");
    // Who only reads waits for nobody.
    let (seen, took) = in_time(store.inspect(&name("held"))).await;
    assert_eq!(seen.unwrap().unwrap().holders.len(), 1);
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(values.get(&name_of_value()).await.unwrap().value.is_none());

    writer.signal(Signal::CONT);
    writer.tell("commit");
    assert_eq!(writer.hear(), "committed");
    granted(&store, &blocked).await;
    assert!(matches!(
        renewal(&store, &lease(&before, &grant)).await,
        Renewal::Renewed
    ));
    values
        .put(&name_of_value(), vec![1].into(), &fence)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_busy_timeout_is_the_users_to_choose() {
    let data = Data::new();
    let options = SqliteStore::options().busy_timeout(Duration::from_millis(100));
    let store = options.unwrap().open(data.path()).await.unwrap();
    let mut connection = data.connect();
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    let (answer, took) = in_time(store.acquire(&long("a"))).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(took < Duration::from_secs(2), "{took:?}");
    drop(transaction);
    granted(&store, &long("a")).await;
}

#[tokio::test]
async fn a_dropped_acquire_is_one_grant_at_most_and_costs_one_ttl() {
    let data = Data::new();
    let (store, other) = (data.store().await, data.store().await);
    for round in 0..40 {
        let text = format!("n{round}");
        let dropped = request(&text, Duration::from_millis(100));
        let acquire = tokio::spawn({
            let (store, dropped) = (store.clone(), dropped.clone());
            async move { store.acquire(&dropped).await.map(drop) }
        });
        for _ in 0..round % 4 {
            tokio::task::yield_now().await;
        }
        acquire.abort();
        let _ = acquire.await;
        let grant = loop {
            match other.acquire(&long(&text)).await.unwrap() {
                Attempt::Granted(grant) => break grant,
                Attempt::Held(by) => {
                    let left = by.free_in.unwrap();
                    assert!(left <= Duration::from_millis(100), "{left:?}");
                    tokio::time::sleep(left).await;
                }
            }
        };
        assert!(grant.token.get() <= 2, "{grant:?}");
    }
}

#[tokio::test]
async fn a_lease_without_end_is_refused() {
    let data = Data::new();
    let mut endless = long("a");
    endless.ttl = Ttl::NONE;
    let error = data.store().await.acquire(&endless).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
