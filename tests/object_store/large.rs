//! Values larger than memory should hold.

use std::io::{Seek as _, Write as _};
use std::process::Command;

use fencelock::body::Body;
use fencelock_testbed::{s3, skip};

use crate::faulty::Faulty;
use crate::lab::{open, over, token};

const MIB: usize = 1 << 20;
const LARGE_MIB: usize = 100;

/// What the child is given: the URL.
const CHILD: &str = "FENCELOCK_LARGE_CHILD";

/// A byte that says where it is.
fn pattern(at: usize) -> u8 {
    let mixed = at.wrapping_mul(0x9e37_79b9) >> 7;
    mixed.to_le_bytes()[0]
}

fn write_file() -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    for mib in 0..LARGE_MIB {
        let chunk: Vec<u8> = (0..MIB).map(|at| pattern(mib * MIB + at)).collect();
        file.write_all(&chunk).unwrap();
    }
    file.rewind().unwrap();
    file
}

/// Checks all that is written to it.
struct Checked(usize);

impl std::io::Write for Checked {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, pattern(self.0 + at), "at {}", self.0 + at);
        }
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    let kib = line.split_whitespace().nth(1).unwrap().parse::<usize>();
    kib.unwrap() / 1024
}

#[test]
fn a_hundred_megabytes_pass_in_less_than_sixty_four() {
    skip!("s3");
    let server = s3::S3::seaweed();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "large::child_that_moves_a_large_value",
            "--nocapture",
        ])
        .env(CHILD, server.url("x"))
        .status();
    assert!(status.unwrap().success());
}

/// Does nothing but in the child of the test above.
#[tokio::test]
async fn child_that_moves_a_large_value() {
    let Ok(url) = std::env::var(CHILD) else {
        return;
    };
    let objects = open(&url).await.unwrap();
    let body = Body::from_file(write_file()).unwrap();
    objects.put("large.bin", body, token(1)).await.unwrap();
    let seen = objects.raise("large.bin", token(2)).await.unwrap();
    let value = seen.value.unwrap();
    assert_eq!(value.len(), u64::try_from(LARGE_MIB * MIB).unwrap());
    assert!(!value.in_memory());
    let mut checked = Checked(0);
    value.copy_to(&mut checked).unwrap();
    assert_eq!(checked.0, LARGE_MIB * MIB);
    let peak = peak_mib();
    assert!(peak < 64, "{peak} MiB");
}

#[tokio::test]
async fn values_of_every_size_around_a_limit_come_back_exactly() {
    let objects = over(Faulty::new()).await;
    let limits = [0, 64 * 1024, 8 * MIB, 16 * MIB];
    for size in limits.iter().flat_map(|l| l.saturating_sub(1)..=l + 1) {
        let bytes: Vec<u8> = (0..size).map(pattern).collect();
        objects.put("v", bytes, token(1)).await.unwrap();
        let value = objects.get("v").await.unwrap().value.unwrap();
        assert_eq!(value.len(), u64::try_from(size).unwrap());
        let mut checked = Checked(0);
        value.copy_to(&mut checked).unwrap();
        assert_eq!(checked.0, size);
    }
}

#[tokio::test]
async fn a_file_that_becomes_shorter_is_not_written() {
    let objects = over(Faulty::new()).await;
    objects.put("v", "1", token(1)).await.unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![1; 20 * MIB]).unwrap();
    file.rewind().unwrap();
    let body = Body::from_file(file.try_clone().unwrap()).unwrap();
    file.set_len(9_000_000).unwrap();
    let error = objects.put("v", body, token(1)).await.unwrap_err();
    assert_eq!(error.kind(), fencelock::ErrorKind::Unavailable, "{error:?}");
    let value = objects.get("v").await.unwrap().value.unwrap();
    assert_eq!(value.into_bytes(9).unwrap().as_ref(), b"1");
}
