//! The process dies, or the disk fails, before every single effect of every operation.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use rustix::io::Errno;

use super::*;
use crate::fence::{Domain, HolderTag};
use crate::file::faults::{Plan, arm, steps_of};
use crate::name::LockName;
use crate::token::FencingToken;

const CHILD: &str = "FENCELOCK_TEST_DIE";

const OLD: &str = "the old value";
const NEW: &str = "a new value, and a longer one";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// The first write of all.
    Create,
    Replace,
    Delete,
    Raise,
    Rebind,
}

use Operation::{Create, Delete, Raise, Rebind, Replace};

const OPERATIONS: [Operation; 5] = [Create, Replace, Delete, Raise, Rebind];

fn fence(token: u64, lock: &str) -> Fence {
    let holder = HolderTag::from_bytes([u8::try_from(token).unwrap(); 16]);
    let domain = Domain::new("memory", "r", &LockName::new(lock).unwrap());
    Fence::new(FencingToken::new(token).unwrap(), holder, domain).with_seq(1)
}

fn root(dir: &Path) -> Root {
    Root {
        dir: dir.to_owned(),
        options: FencedFilesOptions::default(),
    }
}

fn place(dir: &Path) -> Place {
    Place::new(dir, &ResourceName::new("a/today.csv").unwrap()).unwrap()
}

/// The value, its writer's token, and the watermark's token.
fn seen(root: &Root) -> (Option<String>, Option<u64>, Option<u64>) {
    let snapshot = root.get(&place(&root.dir)).unwrap();
    let text = |body: Body| String::from_utf8(body.into_bytes(1 << 20).unwrap().to_vec()).unwrap();
    (
        snapshot.value.map(text),
        snapshot.writer.map(FencingToken::get),
        snapshot.watermark.map(|w| w.token.get()),
    )
}

fn before(operation: Operation) -> (Option<String>, Option<u64>, Option<u64>) {
    match operation {
        Create => (None, None, None),
        _ => (Some(OLD.to_owned()), Some(33), Some(33)),
    }
}

fn after(operation: Operation) -> (Option<String>, Option<u64>, Option<u64>) {
    match operation {
        Create | Replace => (Some(NEW.to_owned()), Some(34), Some(34)),
        Delete => (None, None, Some(34)),
        Raise | Rebind => (Some(OLD.to_owned()), Some(33), Some(34)),
    }
}

fn prepare(root: &Root, operation: Operation) {
    if operation != Create {
        root.put(&place(&root.dir), OLD.into(), &fence(33, "lock"))
            .unwrap();
    }
}

/// The operation with token 34: whether it was applied now.
fn run(root: &Root, operation: Operation) -> Result<bool> {
    let place = place(&root.dir);
    match operation {
        Create | Replace => Ok(root.put(&place, NEW.into(), &fence(34, "lock"))?.applied),
        Delete => Ok(root.delete(&place, &fence(34, "lock"))?.applied),
        Raise => root.raise(&place, &fence(34, "lock")).map(|_| true),
        Rebind => Ok(root.rebind(&place, &fence(34, "other"))?.applied),
    }
}

fn kind_of_put(root: &Root, token: u64) -> Option<ErrorKind> {
    let place = place(&root.dir);
    root.put(&place, "stale".into(), &fence(token, "lock"))
        .err()
        .map(|e| e.kind())
}

fn temp_files(root: &Root) -> usize {
    match fs::read_dir(root.dir.join("a")) {
        Ok(entries) => entries
            .filter(|e| {
                e.as_ref()
                    .unwrap()
                    .file_name()
                    .to_str()
                    .unwrap()
                    .ends_with(".tmp")
            })
            .count(),
        Err(_) => 0,
    }
}

/// What holds after a fault, by a fresh instance, whatever was answered; ends with a repeat.
fn check(root: &Root, operation: Operation, context: &str) {
    let (value, writer, watermark) = seen(root);
    let old = before(operation);
    let new = after(operation);
    let value_is_old = (&value, writer) == (&old.0, old.1);
    let value_is_new = (&value, writer) == (&new.0, new.1);
    assert!(
        value_is_old || value_is_new,
        "{context}: {value:?} {writer:?}"
    );
    assert!(
        watermark == old.2 || watermark == new.2,
        "{context}: {watermark:?}"
    );
    if !value_is_old {
        assert_eq!(watermark, new.2, "S3, {context}");
    }
    if watermark.is_some() {
        // After a rebind, the lock of the stale token is another one.
        let refusals = [ErrorKind::Fenced, ErrorKind::DomainMismatch];
        let refused = kind_of_put(root, 32).is_some_and(|kind| refusals.contains(&kind));
        assert!(refused, "S1, {context}");
    }
    if watermark == Some(34) && operation != Rebind {
        assert_eq!(
            kind_of_put(root, 33),
            Some(ErrorKind::Fenced),
            "S1, {context}"
        );
    }
    let applied = run(root, operation).unwrap();
    if matches!(operation, Create | Replace | Delete) {
        let happened = value_is_new && watermark == Some(34) && !value_is_old;
        // A deletion of nothing leaves no trace but its sequence.
        assert_eq!(applied, !happened, "S7, S10, {context}");
    }
    assert_eq!(seen(root), new, "{context}");
    // What a dead first writer of a fence file left has a random name and stays for `doctor`.
    assert!(
        temp_files(root) <= usize::from(operation == Create),
        "{context}"
    );
}

#[test]
fn child_that_dies() {
    let Ok(plan) = std::env::var(CHILD) else {
        return;
    };
    let (operation, rest) = plan.split_once(' ').unwrap();
    let (step, dir) = rest.split_once(' ').unwrap();
    let operation = OPERATIONS[operation.parse::<usize>().unwrap()];
    arm(Some(Plan::Die(step.parse().unwrap())));
    run(&root(Path::new(dir)), operation).unwrap();
}

#[test]
fn a_writer_killed_before_any_effect_leaves_the_old_or_the_new_and_never_lowers_a_token() {
    let mut deaths = 0;
    for (index, operation) in OPERATIONS.into_iter().enumerate() {
        for step in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let root = root(dir.path());
            prepare(&root, operation);
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "file::fence::tests::child_that_dies"])
                .env(CHILD, format!("{index} {step} {}", dir.path().display()))
                .stdout(Stdio::null())
                .status()
                .unwrap();
            check(
                &root,
                operation,
                &format!("{operation:?} killed before step {step}"),
            );
            if status.success() {
                break;
            }
            assert_eq!(status.signal(), Some(9), "{operation:?} {step}");
            deaths += 1;
        }
    }
    assert!(deaths >= 35, "{deaths}");
}

#[test]
fn a_newer_writer_goes_on_after_a_writer_killed_before_any_effect() {
    for step in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let root = root(dir.path());
        prepare(&root, Replace);
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::fence::tests::child_that_dies"])
            .env(CHILD, format!("1 {step} {}", dir.path().display()))
            .stdout(Stdio::null())
            .status()
            .unwrap();
        root.put(&place(&root.dir), "newest".into(), &fence(35, "lock"))
            .unwrap();
        assert_eq!(seen(&root), (Some("newest".to_owned()), Some(35), Some(35)));
        assert_eq!(kind_of_put(&root, 34), Some(ErrorKind::Fenced));
        assert_eq!(temp_files(&root), 0, "step {step}");
        if status.success() {
            break;
        }
    }
}

#[test]
fn a_disk_that_fails_before_any_effect_is_answered_honestly() {
    for operation in OPERATIONS {
        let steps = {
            let dir = tempfile::tempdir().unwrap();
            let root = root(dir.path());
            prepare(&root, operation);
            steps_of(|| assert!(run(&root, operation).unwrap())).len()
        };
        assert!(steps >= 3, "{operation:?} {steps}");
        for at in 0..steps {
            for plan in [
                Plan::FailOnce(at, Errno::NOSPC),
                Plan::FailFrom(at, Errno::NOSPC),
                Plan::FailOnce(at, Errno::IO),
                Plan::FailFrom(at, Errno::IO),
            ] {
                let context = format!("{operation:?} {plan:?}");
                let dir = tempfile::tempdir().unwrap();
                let root = root(dir.path());
                prepare(&root, operation);
                arm(Some(plan));
                let answer = run(&root, operation);
                arm(None);
                let error = answer.expect_err(&context);
                assert!(error.to_string().contains("path="), "{context}: {error}");
                let plain = fs::read_to_string(root.dir.join("a/today.csv")).ok();
                match error.kind() {
                    ErrorKind::Unavailable => {
                        assert_eq!(plain, before(operation).0, "S10, {context}");
                    }
                    ErrorKind::Indeterminate => assert_eq!(plain, after(operation).0, "{context}"),
                    other => panic!("{context}: {other:?}"),
                }
                check(&root, operation, &context);
                assert_eq!(temp_files(&root), 0, "{context}");
            }
        }
    }
}

#[test]
fn nothing_is_shown_or_acknowledged_before_what_it_rests_on_is_durable() {
    const STORE: [&str; 3] = ["write a slot", "sync the slots", "write a slot"];
    let expected = |operation| -> Vec<&str> {
        let temp = [
            "create a temporary file",
            "write the value",
            "sync the value",
        ];
        match operation {
            Create => [
                &["sync the directory"][..],
                &temp,
                &[
                    "write a new file",
                    "sync the directory",
                    "sync the directory",
                ],
                &STORE,
                &["rename", "sync the directory"],
                &STORE,
            ]
            .concat(),
            Replace => [&temp[..], &STORE, &["rename", "sync the directory"], &STORE].concat(),
            Delete => [&STORE[..], &["unlink", "sync the directory"], &STORE].concat(),
            Raise | Rebind => STORE.to_vec(),
        }
    };
    for operation in OPERATIONS {
        let dir = tempfile::tempdir().unwrap();
        let root = root(dir.path());
        prepare(&root, operation);
        let steps = steps_of(|| assert!(run(&root, operation).unwrap()));
        assert_eq!(steps, expected(operation), "{operation:?}");
    }
}

#[test]
fn a_stale_write_is_refused_before_anything_is_streamed() {
    let dir = tempfile::tempdir().unwrap();
    let root = root(dir.path());
    prepare(&root, Replace);
    let steps = steps_of(|| assert_eq!(kind_of_put(&root, 32), Some(ErrorKind::Fenced)));
    assert_eq!(steps, Vec::<&str>::new());
}

#[test]
fn the_next_write_removes_what_any_dead_writer_left_and_nothing_of_a_living_one() {
    let dir = tempfile::tempdir().unwrap();
    let (root, place) = (root(dir.path()), place(dir.path()));
    fs::create_dir(&place.dir).unwrap();
    for number in [0, 4, 127] {
        fs::write(place.temp(number), "left behind").unwrap();
    }
    let living = fs::File::create(place.temp(3)).unwrap();
    living.lock().unwrap();
    root.put(&place, "new".into(), &fence(1, "a")).unwrap();
    let left = |number| place.temp(number).exists();
    assert_eq!([0, 3, 4, 127].map(left), [false, true, false, false]);
}

#[test]
fn a_probe_tells_each_damaged_fence_file_and_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let root = root(dir.path());
    let place = Place::new(dir.path(), &ResourceName::new("z").unwrap()).unwrap();
    root.put(&place, "new".into(), &fence(1, "a")).unwrap();
    let bad = || {
        let found = doctor::examine(&root.dir, root.access());
        let bad = found
            .into_iter()
            .filter(|f| f.severity == crate::lease::Severity::Bad);
        bad.map(|f| f.detail).collect::<Vec<_>>()
    };
    assert_eq!(bad(), Vec::<String>::new());
    fs::write(&place.fence, "destroyed").unwrap();
    let found = bad();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("remove the fence file"), "{found:?}");
    assert!(found[0].contains(&shown(&place.fence)), "{found:?}");
}
