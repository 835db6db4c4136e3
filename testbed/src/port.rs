//! Ports that no other test takes.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher as _, RandomState};
use std::net::TcpListener;

/// Below the range from which kernels draw the local ports of connections, so that none of those
/// takes a port between two lives of a server.
const RANGE: std::ops::Range<u16> = 12_000..31_000;

/// A port of 127.0.0.1 that is this value's alone among all tests of the host, for as long as it
/// lives: a server can be killed and started again on it.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _claim: File,
}

impl Port {
    /// A free port.
    ///
    /// # Panics
    /// Where there is none.
    #[must_use]
    pub fn free() -> Self {
        let claims = std::env::temp_dir().join("fencelock-testbed-ports");
        std::fs::create_dir_all(&claims).expect("a directory for claims on ports");
        let count = u64::from(RANGE.end - RANGE.start);
        for attempt in 0..1_000_u64 {
            let drawn = RandomState::new().hash_one(attempt) % count;
            let number = RANGE.start + u16::try_from(drawn).expect("below the range's size");
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(claims.join(number.to_string()));
            // The lock goes with the descriptor, however the process ends.
            if let Ok(file) = file
                && file.try_lock().is_ok()
                && TcpListener::bind(("127.0.0.1", number)).is_ok()
            {
                return Self {
                    number,
                    _claim: file,
                };
            }
        }
        panic!("no free port among {RANGE:?}");
    }

    /// The number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }
}
