//! Real processes. A child is this test binary again, told by its environment what to do.

use super::trouble::{on_a_full_disk, on_being_shut_out};
use super::*;

pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(dir: &Path, job: &str) -> Self {
        Self::start_under(&[], dir, job)
    }

    /// Starts the child through another program, `under` and its arguments.
    pub(crate) fn start_under(under: &[&str], dir: &Path, job: &str) -> Self {
        Self::start_program(under, &std::env::current_exe().unwrap(), dir, job)
    }

    pub(crate) fn start_program(under: &[&str], program: &Path, dir: &Path, job: &str) -> Self {
        let mut words = under.iter().map(std::ffi::OsStr::new);
        let mut command = match words.next() {
            Some(first) => Command::new(first),
            None => Command::new(program),
        };
        if !under.is_empty() {
            command.args(words).arg(program);
        }
        let child = command
            .current_dir(dir)
            .args(["--exact", "processes::child_process", "--nocapture"])
            .env("FENCELOCK_TEST_DIR", dir)
            .env("FENCELOCK_TEST_JOB", job)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// The next line that the child's job wrote.
    pub(crate) fn hear(&mut self) -> String {
        use std::io::BufRead as _;
        // One byte at a time would be slow for much, and this is little.
        let mut lines =
            std::io::BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).lines();
        loop {
            let line = lines.next().expect("the child ended").unwrap();
            if let Some((_, said)) = line.split_once("SAID ") {
                return said.to_owned();
            }
        }
    }

    fn tell(&mut self, line: &str) {
        use std::io::Write as _;
        writeln!(self.0.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    println!("\nSAID {what}");
}

/// Not a test of its own: the body of the children.
#[tokio::test]
async fn child_process() {
    let Ok(job) = std::env::var("FENCELOCK_TEST_JOB") else {
        return;
    };
    let dir = PathBuf::from(std::env::var("FENCELOCK_TEST_DIR").unwrap());
    let store = FileStore::open(dir.join("store")).unwrap();
    match job.split_once(' ').unwrap() {
        ("hold", ms) => {
            let request = request("a", Duration::from_millis(ms.parse().unwrap()));
            let grant = granted(&store, &request).await;
            say(grant.token);
            std::io::stdin().read_line(&mut String::new()).unwrap();
            say(format!(
                "{:?}",
                renewal(&store, &lease(&request, &grant), request.ttl).await
            ));
        }
        ("count", rounds) => {
            let mut done = 0;
            while done < rounds.parse().unwrap() {
                let mut watch = store.watch(&name("a")).await.unwrap();
                let request = request("a", LONG);
                let Attempt::Granted(grant) = store.acquire(&request).await.unwrap() else {
                    soon(watch.changed()).await;
                    continue;
                };
                // A read, a pause and a write that only the lock makes one step.
                let path = dir.join("counter");
                let before: u64 = fs::read_to_string(&path).unwrap().parse().unwrap();
                tokio::task::yield_now().await;
                fs::write(&path, (before + 1).to_string()).unwrap();
                let mut log = fs::OpenOptions::new()
                    .append(true)
                    .open(dir.join("log"))
                    .unwrap();
                std::io::Write::write_all(&mut log, format!("{}\n", grant.token).as_bytes())
                    .unwrap();
                store
                    .release(&lease(&request, &grant), Duration::ZERO)
                    .await
                    .unwrap();
                done += 1;
            }
            say(store.profile().realm.clone());
        }
        ("spin", text) => loop {
            let token = cycle(&store, text).await;
            let mut log = fs::OpenOptions::new()
                .append(true)
                .open(dir.join("log"))
                .unwrap();
            std::io::Write::write_all(&mut log, format!("{token}\n").as_bytes()).unwrap();
        },
        ("full", _) => {
            on_a_full_disk(&dir.join("store"), store).await;
            say("done");
        }
        ("shut", _) => {
            on_being_shut_out(&dir, store).await;
            say("done");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_killed_holder_is_replaced_at_once_whatever_its_ttl() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path().join("store")).unwrap();
    let mut child = Process::start(dir.path(), "hold 120000");
    let its: u64 = child.hear().parse().unwrap();
    let mut watch = store.watch(&name("a")).await.unwrap();
    held(&store, &request("a", LONG)).await;
    let clock = Clock::system();
    child.signal(rustix::process::Signal::KILL);
    let killed = clock.now();
    let grant = loop {
        soon(watch.changed()).await;
        if let Attempt::Granted(grant) = store.acquire(&request("a", LONG)).await.unwrap() {
            break grant;
        }
    };
    assert!(grant.token.get() > its);
    let took = clock.now().since(killed);
    assert!(took < Duration::from_secs(10), "{took:?} of a TTL of 120 s");
    // A store that is opened later clears up.
    drop(watch);
    drop(store);
    FileStore::open(dir.path().join("store")).unwrap();
    assert_eq!(
        fs::read_dir(dir.path().join("store/live")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn a_paused_holder_is_replaced_at_its_expiry_and_then_has_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path().join("store")).unwrap();
    let mut child = Process::start(dir.path(), "hold 3000");
    let its: u64 = child.hear().parse().unwrap();
    child.signal(rustix::process::Signal::STOP);
    let mut watch = store.watch(&name("a")).await.unwrap();
    let left = held(&store, &request("a", LONG)).await.free_in.unwrap();
    let clock = Clock::system();
    let seen = clock.now();
    let grant = loop {
        soon(watch.changed()).await;
        if let Attempt::Granted(grant) = store.acquire(&request("a", LONG)).await.unwrap() {
            break grant;
        }
    };
    assert!(
        clock.now().since(seen) >= left,
        "replaced before its expiry"
    );
    assert!(grant.token.get() > its);
    child.signal(rustix::process::Signal::CONT);
    child.tell("renew");
    assert_eq!(child.hear(), "Lost");
    held(&store, &request("a", LONG)).await;
}

#[test]
fn processes_that_share_a_lock_lose_no_update_and_repeat_no_token() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("counter"), "0").unwrap();
    fs::write(dir.path().join("log"), "").unwrap();
    let mut children: Vec<_> = (0..8)
        .map(|_| Process::start(dir.path(), "count 50"))
        .collect();
    let realms: HashSet<_> = children.iter_mut().map(Process::hear).collect();
    assert_eq!(realms.len(), 1);
    assert_eq!(
        fs::read_to_string(dir.path().join("counter")).unwrap(),
        "400"
    );
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let tokens: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 400);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// Kills at any point of an operation, in the middle of a reservation too: each round begins a new
/// store, whose reservations are short.
#[tokio::test]
async fn a_process_killed_anywhere_leaves_a_sound_record_and_no_token_to_tell_again() {
    for round in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("log"), "").unwrap();
        let child = Process::start(dir.path(), "spin a");
        let told = || fs::read_to_string(dir.path().join("log")).unwrap();
        while told().lines().count() < round * 8 + 1 {
            std::thread::yield_now();
        }
        child.signal(rustix::process::Signal::KILL);
        // Waits for it: until the kernel has closed its files, it may still hold the lock.
        drop(child);
        let highest = told()
            .lines()
            .map(|line| line.parse().unwrap())
            .max()
            .unwrap();
        let store = FileStore::open(dir.path().join("store")).unwrap();
        assert!(cycle(&store, "a").await > highest, "round {round}");
        let findings = store.probe().await.unwrap();
        assert!(
            findings.iter().all(|f| f.severity < Severity::Bad),
            "{findings:?}"
        );
    }
}

#[tokio::test]
async fn a_child_process_does_not_inherit_the_locks() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    granted(&a, &request("a", LONG)).await;
    // While the holder is there: what it gives back by itself, it also unlinks.
    let own = ["-l", "/proc/self/fd"];
    let listed = Command::new("ls").args(own).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    assert!(listed.contains("->"), "{listed}");
    assert!(!listed.contains(dir.path().to_str().unwrap()), "{listed}");
    let mut sleeper = Process(Command::new("sleep").arg("60").spawn().unwrap());
    drop(a);
    granted(&b, &request("a", LONG)).await;
    assert!(sleeper.0.try_wait().unwrap().is_none());
}
