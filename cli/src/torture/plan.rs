//! What a run is to do, and what its client processes are told.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How a client writes. All arms do the same work under the same grants, each on values of its own.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Arm {
    /// Reads and writes, and nobody looks at a token: the lock alone
    Unfenced,
    /// Reads, and writes with the bare token: "accept what is not smaller"
    Naive,
    /// Raises, which reads, and writes with the whole fence
    Raise,
}

/// Which arms run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArmChoice {
    /// Reads and writes, and nobody looks at a token: the lock alone
    Unfenced,
    /// Reads, and writes with the bare token: "accept what is not smaller"
    Naive,
    /// Raises, which reads, and writes with the whole fence
    Raise,
    /// All three, side by side under the same grants
    All,
}

impl ArmChoice {
    pub(crate) fn arms(self) -> Vec<Arm> {
        match self {
            Self::Unfenced => vec![Arm::Unfenced],
            Self::Naive => vec![Arm::Naive],
            Self::Raise => vec![Arm::Raise],
            Self::All => vec![Arm::Unfenced, Arm::Naive, Arm::Raise],
        }
    }
}

/// What goes wrong on purpose.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// Stops a client past its TTL (SIGSTOP), at chosen points and at any time
    Pause,
    /// Kills a client (SIGKILL), at chosen points and at any time
    Kill,
    /// Sends a write twice, at once or after a later one
    Duplicate,
    /// Cuts a client's connections
    Drop,
    /// Holds what passes between a client and the engine, also past the TTL
    Delay,
    /// Lets requests take effect, and loses their answers
    Swallow,
    /// Stops the server of --own (SIGSTOP)
    ServerPause,
    /// Kills the server of --own (SIGKILL), and starts it again
    ServerKill,
    /// Shows a storage the fence of another lock, and a number that no lock tells
    Forged,
}

impl Fault {
    /// True for what a proxy in front of the engine does.
    pub(crate) fn is_of_the_network(self) -> bool {
        matches!(self, Self::Drop | Self::Delay | Self::Swallow)
    }

    /// True for what only a server of our own may suffer.
    pub(crate) fn is_of_the_server(self) -> bool {
        matches!(self, Self::ServerPause | Self::ServerKill)
    }
}

/// For how long the holders of a lock write to one page of values: so a value grows with what a lock
/// sees in that time, and not with the run.
const PAGE_US: u64 = 60_000_000;

/// The page that a section which begins at `t` writes to, by the set of locks that it is in. A lock
/// has many pages, and a page has one lock.
pub(crate) fn page_of(set: u32, sets: u32, t: u64) -> u32 {
    let round = u32::try_from(t / PAGE_US).unwrap_or(0);
    round.saturating_mul(sets).saturating_add(set)
}

/// The set of locks that a page belongs to.
pub(crate) fn set_of(page: u32, sets: u32) -> u32 {
    page.checked_rem(sets).unwrap_or(0)
}

/// All pages of a set of locks in a run that took so long.
pub(crate) fn pages(set: u32, sets: u32, took_us: u64) -> Vec<u32> {
    let rounds = 0..=took_us / PAGE_US;
    rounds
        .map(|round| page_of(set, sets, round * PAGE_US))
        .collect()
}

/// What the name of the lock of a workload ends with.
pub(crate) fn lock_of(lane: Lane, set: u32) -> String {
    format!("{lane}-{set}")
}

/// A workload, with locks of its own.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Lane {
    /// Counts
    Counter,
    /// Appends to a list
    List,
    /// Moves amounts between three accounts under one lock
    Bank,
    /// Appends to two lists, in two storages, under one lock
    Pair,
}

impl Lane {
    /// The objects of the workload, and the number of the storage that each is in.
    pub(crate) fn objects(self) -> &'static [(&'static str, usize)] {
        match self {
            Self::Counter => &[("counter", 0)],
            Self::List => &[("list", 0)],
            Self::Bank => &[("bank-a", 0), ("bank-b", 0), ("bank-c", 0)],
            Self::Pair => &[("pair-a", 0), ("pair-b", 1)],
        }
    }
}

macro_rules! shown_by_its_value {
    ($($name:ident)*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let value = self.to_possible_value();
                f.write_str(value.as_ref().map_or("", |value| value.get_name()))
            }
        }
    )*};
}

shown_by_its_value!(Arm Fault Lane);

/// A run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) arms: Vec<Arm>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) clients: u32,
    /// How many locks each workload has.
    pub(crate) locks: u32,
    /// Ends the run as soon as each arm has so many acknowledged and has shown what it is worth.
    pub(crate) updates: Option<u64>,
    pub(crate) duration: Duration,
    pub(crate) ttl: Duration,
    /// How many critical sections all clients enter together at the most.
    pub(crate) sections: u64,
    pub(crate) seed: u64,
    pub(crate) report: Option<PathBuf>,
}

impl Plan {
    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}

/// What a client process reads as the first line of its standard input. The URLs may hold passwords,
/// so it has no `Debug`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) client: u32,
    pub(crate) life: u32,
    pub(crate) seed: u64,
    /// The beginning of the run on the host's clock.
    pub(crate) start_nanos: u64,
    /// When no further section begins, in microseconds since the beginning.
    pub(crate) until_us: u64,
    pub(crate) ttl_us: u64,
    /// The sections of this client.
    pub(crate) sections: u64,
    pub(crate) arms: Vec<Arm>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) store: String,
    /// What the names of the locks begin with, and how many each workload has.
    pub(crate) locks: String,
    pub(crate) sets: u32,
    pub(crate) storages: Vec<Storage>,
}

/// Where values go.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Storage {
    /// A destination, of a resource that is never written.
    pub(crate) dest: String,
    /// What the names of the values begin with.
    pub(crate) names: String,
}

impl Storage {
    /// The name of an object of an arm, on a page.
    pub(crate) fn name(&self, arm: Arm, object: &str, page: u32) -> String {
        format!("{}{arm}-{object}-{page}", self.names)
    }
}
