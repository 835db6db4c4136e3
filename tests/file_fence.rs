//! Fenced files: the rule, concurrency, killed processes, odd files and odd names.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests and their helpers fail by panicking, and children talk on their standard output"
)]
#![cfg(feature = "file")]

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencelock::body::Body;
use fencelock::fence::{Domain, HolderTag, Snapshot, Written};
use fencelock::file::FencedFiles;
use fencelock::lease::Severity;
use fencelock::{
    Error, ErrorKind, Fence, FencedStore, FencingToken, LockName, ResourceName, Result,
};
use pollster::block_on;
use tempfile::TempDir;

const NAME: &str = "payments/today.csv";

/// A store in a fresh directory, called without a runtime.
struct Files {
    dir: TempDir,
    store: FencedFiles,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = FencedFiles::open(dir.path()).unwrap();
        Self { dir, store }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, value: impl Into<Body>, fence: &Fence) -> Result<Written> {
        put(&self.store, NAME, value, fence)
    }

    fn get(&self) -> Seen {
        Seen::of(block_on(self.store.get(&resource(NAME))).unwrap())
    }

    fn raise(&self, fence: &Fence) -> Result<Seen> {
        block_on(self.store.raise(&resource(NAME), fence)).map(Seen::of)
    }

    fn delete(&self, fence: &Fence) -> Result<Written> {
        block_on(self.store.delete(&resource(NAME), fence))
    }

    fn rebind(&self, fence: &Fence) -> Result<Written> {
        block_on(self.store.rebind(&resource(NAME), fence))
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Seen {
    value: Option<Vec<u8>>,
    watermark: Option<u64>,
    writer: Option<u64>,
}

impl Seen {
    fn of(snapshot: Snapshot) -> Self {
        Self {
            value: snapshot
                .value
                .map(|body| body.into_bytes(1 << 30).unwrap().to_vec()),
            watermark: snapshot.watermark.map(|w| w.token.get()),
            writer: snapshot.writer.map(FencingToken::get),
        }
    }

    fn new(value: Option<&str>, watermark: u64, writer: Option<u64>) -> Self {
        Self {
            value: value.map(|value| value.as_bytes().to_vec()),
            watermark: Some(watermark),
            writer,
        }
    }
}

fn put(store: &FencedFiles, name: &str, value: impl Into<Body>, fence: &Fence) -> Result<Written> {
    block_on(store.put(&resource(name), value.into(), fence))
}

fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).unwrap()
}

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn bare(number: u64) -> Fence {
    Fence::from(token(number))
}

fn held(number: u64, holder: u8, lock: &str) -> Fence {
    let domain = Domain::new("memory", "r", &LockName::new(lock).unwrap());
    Fence::new(token(number), HolderTag::from_bytes([holder; 16]), domain)
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

fn named(error: &Error, path: &Path) {
    let expected = format!("path={path:?}");
    assert!(error.to_string().contains(&expected), "{error}");
}

// --- the rule -------------------------------------------------------------------------------

#[test]
fn a_stale_write_is_refused_with_both_numbers_and_the_value_stands() {
    let files = Files::new();
    files.put("thirty-three", &held(33, 1, "a")).unwrap();
    let written = files.put("thirty-four", &held(34, 2, "a")).unwrap();
    assert!(written.applied);
    assert_eq!(written.watermark.token, token(34));
    let refused = files.put("late", &held(33, 1, "a")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(refused.token(), Some(token(33)));
    assert_eq!(refused.watermark(), Some(token(34)));
    assert_eq!(files.get(), Seen::new(Some("thirty-four"), 34, Some(34)));
    assert_eq!(fs::read(files.path(NAME)).unwrap(), b"thirty-four");
}

#[test]
fn an_equal_token_is_for_its_holder_only() {
    let files = Files::new();
    files.put("one", &held(34, 1, "a")).unwrap();
    files.put("two", &held(34, 1, "a")).unwrap();
    let other = held(34, 2, "a");
    assert_eq!(kind(files.put("three", &other)), ErrorKind::Fenced);
    assert_eq!(kind(files.raise(&other)), ErrorKind::Fenced);
    assert_eq!(kind(files.delete(&other)), ErrorKind::Fenced);
    assert_eq!(files.get(), Seen::new(Some("two"), 34, Some(34)));
}

#[test]
fn a_holders_own_writes_are_ordered_and_a_repeat_is_acknowledged_and_not_applied() {
    let files = Files::new();
    let seq = |n| held(34, 1, "a").with_seq(n);
    assert!(files.put("one", &seq(1)).unwrap().applied);
    assert!(files.put("two", &seq(2)).unwrap().applied);
    assert!(!files.put("two, again", &seq(2)).unwrap().applied);
    assert_eq!(kind(files.put("one", &seq(1))), ErrorKind::Fenced);
    assert_eq!(files.get(), Seen::new(Some("two"), 34, Some(34)));
    assert!(files.delete(&seq(3)).unwrap().applied);
    assert!(!files.delete(&seq(3)).unwrap().applied);
    assert_eq!(kind(files.put("two", &seq(2))), ErrorKind::Fenced);
    assert_eq!(files.get(), Seen::new(None, 34, None));
}

#[test]
fn a_raise_returns_the_value_and_fences_everybody_below() {
    let files = Files::new();
    assert_eq!(files.raise(&bare(30)).unwrap(), Seen::new(None, 30, None));
    files.put("thirty-three", &bare(33)).unwrap();
    let raised = files.raise(&bare(40)).unwrap();
    assert_eq!(raised, Seen::new(Some("thirty-three"), 40, Some(33)));
    for stale in [33, 39] {
        assert_eq!(kind(files.raise(&bare(stale))), ErrorKind::Fenced);
        assert_eq!(kind(files.put("late", &bare(stale))), ErrorKind::Fenced);
        assert_eq!(kind(files.delete(&bare(stale))), ErrorKind::Fenced);
    }
    files.put("forty", &bare(40)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("forty"), 40, Some(40)));
}

#[test]
fn a_raise_is_seen_by_another_instance_at_once() {
    let files = Files::new();
    let other = FencedFiles::open(files.dir.path()).unwrap();
    files.raise(&bare(40)).unwrap();
    assert_eq!(
        kind(put(&other, NAME, "late", &bare(39))),
        ErrorKind::Fenced
    );
}

#[test]
fn a_deleted_value_keeps_its_watermark() {
    let files = Files::new();
    files.put("value", &bare(33)).unwrap();
    assert!(files.delete(&bare(34)).unwrap().applied);
    assert!(!files.path(NAME).exists());
    assert_eq!(files.get(), Seen::new(None, 34, None));
    assert_eq!(kind(files.put("late", &bare(33))), ErrorKind::Fenced);
    assert!(!files.path(NAME).exists());
    files.put("new", &bare(35)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("new"), 35, Some(35)));
}

#[test]
fn a_deletion_of_what_was_never_written_fences_too() {
    let files = Files::new();
    assert!(files.delete(&bare(7)).unwrap().applied);
    assert_eq!(kind(files.put("late", &bare(6))), ErrorKind::Fenced);
    assert_eq!(files.get(), Seen::new(None, 7, None));
}

#[test]
fn one_bad_number_does_not_brick_a_resource() {
    let files = Files::new();
    assert_eq!(kind(files.put("first", &bare(1 << 62))), ErrorKind::Invalid);
    files.put("one", &bare(1)).unwrap();
    assert_eq!(kind(files.put("huge", &bare(1 << 62))), ErrorKind::Invalid);
    assert_eq!(kind(files.raise(&bare(1 << 62))), ErrorKind::Invalid);
    files.put("two", &bare(2)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("two"), 2, Some(2)));
}

#[test]
fn another_lock_is_refused_until_a_rebind_that_raises() {
    let files = Files::new();
    files.put("a", &held(34, 1, "a")).unwrap();
    let mismatch = ErrorKind::DomainMismatch;
    assert_eq!(kind(files.put("b", &held(99, 2, "b"))), mismatch);
    assert_eq!(kind(files.rebind(&held(34, 2, "b"))), ErrorKind::Fenced);
    files.rebind(&held(35, 2, "b")).unwrap();
    assert_eq!(files.get(), Seen::new(Some("a"), 35, Some(34)));
    assert_eq!(kind(files.put("a", &held(36, 1, "a"))), mismatch);
    files.put("b", &held(35, 2, "b")).unwrap();
}

// --- values and files -----------------------------------------------------------------------

#[test]
fn empty_and_binary_values_are_kept_exactly() {
    let files = Files::new();
    files.put("", &bare(1)).unwrap();
    assert_eq!(files.get(), Seen::new(Some(""), 1, Some(1)));
    let binary: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    files.put(binary.clone(), &bare(2)).unwrap();
    assert_eq!(files.get().value, Some(binary));
}

#[test]
fn a_body_that_is_an_open_file_is_written_from_its_position() {
    let files = Files::new();
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(b"header value").unwrap();
    std::io::Seek::seek(&mut source, std::io::SeekFrom::Start(7)).unwrap();
    let body = Body::from_file(source).unwrap();
    files.put(body, &bare(1)).unwrap();
    assert_eq!(fs::read(files.path(NAME)).unwrap(), b"value");
}

#[test]
fn a_body_that_shrinks_while_it_is_read_changes_nothing() {
    let files = Files::new();
    files.put("whole", &bare(1)).unwrap();
    let source = tempfile::tempfile().unwrap();
    source.set_len(1 << 20).unwrap();
    let body = Body::from_file(source.try_clone().unwrap()).unwrap();
    source.set_len(10).unwrap();
    assert_eq!(kind(files.put(body, &bare(2))), ErrorKind::Invalid);
    assert_eq!(files.get(), Seen::new(Some("whole"), 1, Some(1)));
    assert_eq!(fs::read_dir(files.path("payments")).unwrap().count(), 2);
}

#[test]
fn a_read_value_stays_what_it_was_while_a_newer_one_replaces_it() {
    let files = Files::new();
    files.put("old", &bare(1)).unwrap();
    let snapshot = block_on(files.store.raise(&resource(NAME), &bare(2))).unwrap();
    files.put("new", &bare(3)).unwrap();
    let value = snapshot.value.unwrap().into_bytes(100).unwrap();
    assert_eq!(&value[..], b"old");
}

#[test]
fn an_existing_files_mode_is_kept_and_the_fence_file_is_for_the_user_alone() {
    let files = Files::new();
    let mode = |name: &str| {
        let found = fs::metadata(files.path(name)).unwrap();
        found.permissions().mode() & 0o7777
    };
    files.put("one", &bare(1)).unwrap();
    // What the umask leaves of 0666, learned from a file that std creates.
    File::create(files.path("plain")).unwrap();
    assert_eq!(mode(NAME), mode("plain"));
    assert_eq!(mode("payments/.today.csv.fence"), 0o600);
    for kept in [0o640, 0o400, 0o666, 0o755] {
        let permissions = fs::Permissions::from_mode(kept);
        fs::set_permissions(files.path(NAME), permissions).unwrap();
        files.put("two", &bare(2)).unwrap();
        assert_eq!(mode(NAME), kept);
    }
}

#[test]
fn an_unfenced_file_is_a_value_without_watermark_or_writer_and_can_be_fenced() {
    let files = Files::new();
    fs::create_dir(files.path("payments")).unwrap();
    fs::write(files.path(NAME), "by hand").unwrap();
    let seen = files.get();
    assert_eq!(seen.value.as_deref(), Some(&b"by hand"[..]));
    assert_eq!((seen.watermark, seen.writer), (None, None));
    let entries = fs::read_dir(files.path("payments")).unwrap().count();
    assert_eq!(entries, 1, "a read leaves nothing");
    let raised = files.raise(&bare(7)).unwrap();
    assert_eq!(raised, Seen::new(Some("by hand"), 7, None));
    files.put("fenced", &bare(7)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("fenced"), 7, Some(7)));
}

#[test]
fn a_value_that_was_changed_without_a_fence_has_no_writer_and_keeps_the_watermark() {
    let files = Files::new();
    files.put("fenced", &bare(7)).unwrap();
    fs::write(files.path("new"), "moved here").unwrap();
    fs::rename(files.path("new"), files.path(NAME)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("moved here"), 7, None));
    files.put("fenced", &bare(8)).unwrap();
    let edited = File::options().write(true).open(files.path(NAME)).unwrap();
    edited.write_all_at(b", edited", 6).unwrap();
    assert_eq!(files.get(), Seen::new(Some("fenced, edited"), 8, None));
    fs::remove_file(files.path(NAME)).unwrap();
    assert_eq!(files.get(), Seen::new(None, 8, None));
    assert_eq!(kind(files.put("late", &bare(7))), ErrorKind::Fenced);
}

#[test]
fn missing_directories_are_created_on_writes_or_refused_as_asked() {
    let files = Files::new();
    put(&files.store, "a/b/c", "deep", &bare(1)).unwrap();
    assert_eq!(fs::read(files.path("a/b/c")).unwrap(), b"deep");
    let seen = Seen::of(block_on(files.store.get(&resource("x/y"))).unwrap());
    assert_eq!((seen.value, seen.watermark), (None, None));
    assert!(!files.path("x").exists(), "a read creates nothing");
    let strict = FencedFiles::options().create_parents(false);
    let strict = strict.open(files.dir.path()).unwrap();
    let missing = ErrorKind::Invalid;
    assert_eq!(kind(put(&strict, "x/y", "v", &bare(1))), missing);
    assert_eq!(
        kind(block_on(strict.raise(&resource("x/y"), &bare(1)))),
        missing
    );
    assert!(!files.path("x").exists());
    let below_a_file = put(&files.store, "a/b/c/d", "v", &bare(1));
    assert_eq!(kind(below_a_file), ErrorKind::Invalid);
}

#[test]
fn the_root_has_to_be_a_directory() {
    let files = Files::new();
    fs::write(files.path("file"), "").unwrap();
    let missing = FencedFiles::open(files.path("none"));
    assert_eq!(kind(missing), ErrorKind::Invalid);
    let file = FencedFiles::open(files.path("file"));
    assert_eq!(kind(file), ErrorKind::Invalid);
}

fn make_pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[test]
fn symlinks_pipes_and_directories_are_refused_and_left_alone() {
    let files = Files::new();
    let victim = files.path("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, files.path("link")).unwrap();
    fs::create_dir(files.path("dir")).unwrap();
    make_pipe(&files.path("pipe"));
    let root = fs::canonicalize(files.dir.path()).unwrap();
    for odd in ["link", "dir", "pipe"] {
        let name = resource(odd);
        let answers = [
            put(&files.store, odd, "v", &bare(1)).map(drop),
            block_on(files.store.get(&name)).map(drop),
            block_on(files.store.raise(&name, &bare(1))).map(drop),
            block_on(files.store.delete(&name, &bare(1))).map(drop),
            block_on(files.store.rebind(&name, &bare(1))).map(drop),
        ];
        for answer in answers {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{odd}: {error}");
            named(&error, &root.join(odd));
        }
    }
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    let link = fs::symlink_metadata(files.path("link")).unwrap();
    assert!(link.is_symlink());
}

#[test]
fn a_planted_fence_file_is_refused_and_leads_nowhere() {
    let files = Files::new();
    let victim = files.path("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, files.path(".a.fence")).unwrap();
    fs::create_dir(files.path(".b.fence")).unwrap();
    make_pipe(&files.path(".c.fence"));
    for name in ["a", "b", "c"] {
        let write = put(&files.store, name, "v", &bare(1));
        assert_eq!(kind(write), ErrorKind::Corrupt);
        let read = block_on(files.store.get(&resource(name)));
        assert_eq!(kind(read), ErrorKind::Corrupt);
        assert!(!files.path(name).exists());
    }
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}

#[test]
fn a_planted_temporary_file_is_passed_by() {
    let files = Files::new();
    let victim = files.path("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, files.path(".a.0.fence.tmp")).unwrap();
    fs::hard_link(&victim, files.path(".a.1.fence.tmp")).unwrap();
    put(&files.store, "a", "value", &bare(1)).unwrap();
    assert_eq!(fs::read(files.path("a")).unwrap(), b"value");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}

#[test]
fn odd_names_work_and_names_that_are_no_plain_path_are_refused() {
    let files = Files::new();
    let (longest, long) = ("x".repeat(255), "y".repeat(240));
    for name in [
        "-rf",
        " ",
        "a\nb",
        "Größe/π.csv",
        ".hidden",
        "a:b",
        "'\"\\$(x)",
        &longest,
        &long,
    ] {
        put(&files.store, name, name.to_owned(), &bare(34)).unwrap();
        let written = fs::read(files.path(name)).unwrap();
        assert_eq!(written, name.as_bytes(), "{name:?}");
        let late = put(&files.store, name, "late", &bare(33));
        assert_eq!(kind(late), ErrorKind::Fenced, "{name:?}");
    }
    let too_long = "z".repeat(256);
    for bad in [
        "/etc/x",
        "../x",
        "a/../x",
        ".",
        "a//b",
        "a/",
        "a\0b",
        ".a.fence",
        ".a.0.fence.tmp",
        &too_long,
    ] {
        let write = put(&files.store, bad, "v", &bare(1));
        assert_eq!(kind(write), ErrorKind::Invalid, "{bad:?}");
        let read = block_on(files.store.get(&resource(bad)));
        assert_eq!(kind(read), ErrorKind::Invalid, "{bad:?}");
    }
}

// --- damage and faults ----------------------------------------------------------------------

#[test]
fn a_damaged_fence_file_is_corrupt_and_nothing_is_guessed() {
    let files = Files::new();
    files.put("value", &bare(34)).unwrap();
    let fence = files.path("payments/.today.csv.fence");
    let good = fs::read(&fence).unwrap();
    let truncated = good[..100].to_vec();
    for damage in [vec![], vec![0; good.len()], b"garbage".to_vec(), truncated] {
        fs::write(&fence, &damage).unwrap();
        for answer in [
            files.put("new", &bare(35)).map(drop),
            files.raise(&bare(35)).map(drop),
            files.delete(&bare(35)).map(drop),
            files.rebind(&bare(35)).map(drop),
            block_on(files.store.get(&resource(NAME))).map(drop),
        ] {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            let text = error.to_string();
            assert!(text.contains("remove the fence file"), "{text}");
            assert!(text.contains(".today.csv.fence"), "{text}");
        }
        assert_eq!(fs::read(files.path(NAME)).unwrap(), b"value");
        assert_eq!(fs::read(&fence).unwrap(), damage);
    }
}

#[test]
fn one_damaged_copy_in_the_fence_file_is_made_whole_again() {
    let files = Files::new();
    files.put("value", &bare(34)).unwrap();
    let fence = files.path("payments/.today.csv.fence");
    let good = fs::read(&fence).unwrap();
    for at in [30, 4096 + 30] {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        fs::write(&fence, &damaged).unwrap();
        assert_eq!(kind(files.put("late", &bare(33))), ErrorKind::Fenced);
        assert_eq!(files.get(), Seen::new(Some("value"), 34, Some(34)));
        assert_eq!(fs::read(&fence).unwrap(), good, "healed by the read");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_directory_that_cannot_be_written_is_unavailable_and_named() {
    // Not even the superuser can create a file there.
    let store = FencedFiles::open("/sys/kernel").unwrap();
    let error = put(&store, "value", "v", &bare(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("/sys/kernel/"), "{error}");
}

#[test]
fn a_fence_file_that_another_process_keeps_locked_is_unavailable_in_bounded_time() {
    let files = Files::new();
    files.put("value", &bare(1)).unwrap();
    let keeper = File::open(files.path("payments/.today.csv.fence")).unwrap();
    keeper.lock().unwrap();
    let options = FencedFiles::options().lock_wait(Duration::from_millis(50));
    let store = options.open(files.dir.path()).unwrap();
    let write = put(&store, NAME, "v", &bare(2));
    assert_eq!(kind(write), ErrorKind::Unavailable);
    let raise = block_on(store.raise(&resource(NAME), &bare(2)));
    assert_eq!(kind(raise), ErrorKind::Unavailable);
    assert_eq!(
        files.get(),
        Seen::new(Some("value"), 1, Some(1)),
        "a read needs no lock"
    );
    drop(keeper);
    put(&store, NAME, "v", &bare(2)).unwrap();
}

#[test]
fn readers_without_pause_do_not_keep_a_writer_out() {
    let files = Files::new();
    files.put("1", &bare(1)).unwrap();
    let dir = files.dir.path();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..16).map(|_| scope.spawn(|| watch(dir, &done))).collect();
        let options = FencedFiles::options().lock_wait(Duration::from_secs(20));
        let store = options.open(dir).unwrap();
        let written: Vec<_> = (2..=50)
            .map(|number| put(&store, NAME, number.to_string(), &bare(number)))
            .collect();
        done.store(true, Ordering::SeqCst);
        for reader in readers {
            reader.join().unwrap();
        }
        for answer in written {
            answer.unwrap();
        }
    });
}

#[test]
fn a_write_whose_future_is_dropped_leaves_a_store_that_works() {
    let files = Files::new();
    files.put("one", &bare(1)).unwrap();
    for _ in 0..20 {
        let (name, fence) = (resource(NAME), bare(2));
        let mut write = files.store.put(&name, "two".into(), &fence);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = write.as_mut().poll(&mut context);
    }
    files.put("three", &bare(3)).unwrap();
    assert_eq!(files.get(), Seen::new(Some("three"), 3, Some(3)));
}

#[test]
fn a_probe_finds_a_good_directory_good_and_a_dead_writers_leftover() {
    let files = Files::new();
    files.put("value", &bare(1)).unwrap();
    // The file system that the tests run on may rightly be warned about.
    let worst = |store: &FencedFiles| {
        let findings = block_on(store.probe()).unwrap();
        let own = findings.iter().filter(|f| f.subject != "file system");
        own.map(|f| f.severity).max().unwrap()
    };
    assert_eq!(worst(&files.store), Severity::Good);
    let temp = files.path("payments/.today.csv.0.fence.tmp");
    let streaming = File::create(&temp).unwrap();
    streaming.lock().unwrap();
    assert_eq!(worst(&files.store), Severity::Good, "its writer lives");
    drop(streaming);
    assert_eq!(worst(&files.store), Severity::Warning);
    files.put("value", &bare(1)).unwrap();
    assert!(!temp.exists());
    assert_eq!(worst(&files.store), Severity::Good);
}

// --- many writers ---------------------------------------------------------------------------

/// Reads until told to stop: every read is one write's value with its own token and watermark, and
/// tokens never go down (S4). Returns how many reads there were.
fn watch(dir: &Path, done: &AtomicBool) -> u32 {
    let store = FencedFiles::open(dir).unwrap();
    let (mut last, mut reads) = (0, 0);
    while !done.load(Ordering::SeqCst) {
        let seen = Seen::of(block_on(store.get(&resource(NAME))).unwrap());
        let value = String::from_utf8(seen.value.unwrap()).unwrap();
        let mut words = value.split(' ');
        let number: u64 = words.next().unwrap().parse().unwrap();
        assert_eq!(seen.writer, Some(number));
        assert_eq!(seen.watermark, Some(number));
        assert!(words.all(|word| word == number.to_string()));
        assert!(number >= last, "{number} after {last}");
        last = number;
        reads += 1;
    }
    reads
}

#[test]
fn of_forty_writers_the_highest_token_stands_and_nobody_sees_it_go_down() {
    const WRITERS: u64 = 40;
    const HIGHEST: u64 = 99 + WRITERS;
    let files = Files::new();
    files.put("1", &bare(1)).unwrap();
    let dir = files.dir.path();
    let done = AtomicBool::new(false);
    let accepted: Vec<u64> = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(dir, &done));
        let writers: Vec<_> = (0..WRITERS)
            .map(|n| {
                // 17 and 40 have no common factor, so that this is each number once.
                let number = 100 + (n * 17) % WRITERS;
                scope.spawn(move || {
                    let store = FencedFiles::open(dir).unwrap();
                    let value = vec![number.to_string(); 5_000].join(" ");
                    match put(&store, NAME, value, &bare(number)) {
                        Ok(_) => Some(number),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
                            assert!(error.watermark() > error.token());
                            None
                        }
                    }
                })
            })
            .collect();
        let accepted = writers.into_iter().map(|w| w.join().unwrap());
        let accepted = accepted.flatten().collect();
        done.store(true, Ordering::SeqCst);
        assert!(watcher.join().unwrap() > 0);
        accepted
    });
    assert!(accepted.contains(&HIGHEST));
    let end = files.get();
    assert_eq!(end.writer, Some(HIGHEST));
    assert_eq!(end.watermark, Some(HIGHEST));
    let entries = fs::read_dir(files.path("payments")).unwrap().count();
    assert_eq!(entries, 2, "no temporary file stays");
}

/// One writer of a shared counter: raise, read, add one, put. Returns how often that was accepted.
fn count_up(dir: &Path, fences: impl Iterator<Item = Fence>) -> u64 {
    let store = FencedFiles::open(dir).unwrap();
    let mut accepted = 0;
    for fence in fences {
        let Ok(snapshot) = block_on(store.raise(&resource(NAME), &fence)) else {
            continue;
        };
        let count = String::from_utf8(Seen::of(snapshot).value.unwrap()).unwrap();
        let next = (count.parse::<u64>().unwrap() + 1).to_string();
        accepted += u64::from(put(&store, NAME, next, &fence).is_ok());
    }
    accepted
}

#[test]
fn a_counter_that_is_raised_before_it_is_read_loses_no_increment() {
    const WRITERS: u64 = 8;
    const ROUNDS: u64 = 12;
    let files = Files::new();
    files.put("0", &bare(1)).unwrap();
    let dir = files.dir.path();
    let accepted: u64 = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let fences = (0..ROUNDS).map(move |round| bare(2 + round * WRITERS + writer));
                scope.spawn(move || count_up(dir, fences))
            })
            .collect();
        writers.into_iter().map(|w| w.join().unwrap()).sum()
    });
    assert!(accepted > 0);
    let count = files.get().value.unwrap();
    assert_eq!(count, accepted.to_string().into_bytes());
}

// --- other processes ------------------------------------------------------------------------

const CHILD_DIR: &str = "FENCELOCK_TEST_CHILD_DIR";

/// This test binary, running only the child of that name.
fn child(name: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture"])
        .env(CHILD_DIR, dir)
        .stdout(Stdio::piped());
    command
}

#[test]
fn child_that_writes_until_it_is_killed() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let store = FencedFiles::open(Path::new(&dir)).unwrap();
    let start = Seen::of(block_on(store.get(&resource(NAME))).unwrap());
    for number in start.watermark.unwrap_or(0) + 1.. {
        let value = vec![number.to_string(); 10_000].join(" ");
        put(&store, NAME, value, &bare(number)).unwrap();
        println!("\nacknowledged {number}");
    }
}

/// Runs a writer until it has acknowledged `writes`, kills it, and returns the last number that it
/// acknowledged.
fn kill_after(writes: u32, dir: &Path) -> u64 {
    let mut writer = child("child_that_writes_until_it_is_killed", dir)
        .spawn()
        .unwrap();
    let acknowledged = BufReader::new(writer.stdout.take().unwrap())
        .lines()
        .filter_map(|line| line.unwrap().strip_prefix("acknowledged ")?.parse().ok())
        .take(usize::try_from(writes).unwrap())
        .last();
    writer.kill().unwrap();
    writer.wait().unwrap();
    acknowledged.unwrap()
}

#[test]
fn a_writer_killed_at_any_time_leaves_whole_values_and_every_acknowledged_one() {
    let files = Files::new();
    files.put("start", &bare(1)).unwrap();
    let mut last = 0;
    for round in 0..25 {
        let acknowledged = kill_after(1 + round % 4, files.dir.path());
        assert!(acknowledged > last);
        last = acknowledged;
        let plain = fs::read_to_string(files.path(NAME)).unwrap();
        let end = files.get();
        assert_eq!(end.value.as_deref(), Some(plain.as_bytes()));
        let words: Vec<&str> = plain.split(' ').collect();
        assert!(words.len() == 10_000 && words.iter().all(|word| *word == words[0]));
        let number: u64 = words[0].parse().unwrap();
        assert!(number >= acknowledged, "{number} of {acknowledged}");
        assert_eq!(end.writer, Some(number));
        let watermark = end.watermark.unwrap();
        assert!(
            watermark == number || watermark == number + 1,
            "{watermark} {number}"
        );
        assert_eq!(
            kind(files.put("late", &bare(watermark - 1))),
            ErrorKind::Fenced
        );
    }
    files.put("end", &bare(last + 100)).unwrap();
    let entries = fs::read_dir(files.path("payments")).unwrap().count();
    assert_eq!(entries, 2, "no temporary file stays");
}

#[test]
fn child_that_puts_a_large_file() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let store = FencedFiles::open(Path::new(&dir)).unwrap();
    let source = tempfile::tempfile().unwrap();
    source.set_len(100 << 20).unwrap();
    source.write_all_at(b"end", (100 << 20) - 3).unwrap();
    let body = Body::from_file(source).unwrap();
    put(&store, NAME, body, &bare(1)).unwrap();
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find(|line| line.starts_with("VmHWM:"));
    println!("\n{}", peak.unwrap());
}

#[test]
#[cfg(target_os = "linux")]
fn a_hundred_megabytes_are_written_in_bounded_memory() {
    let files = Files::new();
    let mut writer = child("child_that_puts_a_large_file", files.dir.path());
    let output = writer.output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let peak = text
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let peak_kib: u64 = peak.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(peak_kib < 64 << 10, "{peak_kib} KiB");
    let written = File::open(files.path(NAME)).unwrap();
    assert_eq!(written.metadata().unwrap().size(), 100 << 20);
    let mut end = [0; 3];
    written.read_exact_at(&mut end, (100 << 20) - 3).unwrap();
    assert_eq!(&end, b"end");
}
