//! What is stored of one lock, and who of its holders is good.

use std::time::Duration;

use rusqlite::{OptionalExtension as _, Row, params};

use super::database::Step;
use super::error::Halt;
use super::sql::{
    HOLDER_DROP, HOLDER_WRITE, HOLDERS_DROP, HOLDERS_READ, LOCK_READ, LOCK_USED, LOCK_WRITE,
};
use crate::clock::{Tick, unix_micros};
use crate::error::{Error, Result};
use crate::fence::HolderTag;
use crate::host::Host;
use crate::info;
use crate::lease::{HolderId, HolderState, LeaseInfo, LeaseRef, LockState, Ttl};
use crate::name::LockName;
use crate::sql::number::{signed, token};
use crate::token::FencingToken;

/// One lock.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) last: Option<FencingToken>,
    pub(super) capacity: Option<u32>,
    pub(super) used_unix_us: u64,
    pub(super) holders: Vec<Holder>,
}

/// One grant.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) id: HolderId,
    pub(super) token: FencingToken,
    ttl: Ttl,
    ends: Tick,
    boot: String,
    time_namespace: String,
    released: bool,
    info: Vec<u8>,
}

/// The moment by which holders are judged. Made with the write lock held: a moment before that
/// would let a grant that lapsed in the meantime pass for good.
#[derive(Clone, Copy)]
pub(super) struct Moment<'a> {
    now: Tick,
    host: &'a Host,
}

impl<'a> Moment<'a> {
    pub(super) fn of(step: &'a Step<'_>) -> Self {
        Self {
            now: step.clock.now(),
            host: step.host,
        }
    }

    fn is_good(self, holder: &Holder) -> bool {
        // A grant of another boot was a process's of that boot, which has ended.
        if holder.boot != self.host.boot {
            return false;
        }
        match self.remaining(holder) {
            // Ticks of another time namespace are never compared: it is good until it is released
            // or broken.
            None => true,
            // Where boots cannot be told apart, a tick further away than any TTL reaches tells.
            Some(left) => !left.is_zero() && (self.host.knows_boot() || left <= Ttl::MAX),
        }
    }

    /// When the grant lapses; none where that cannot be known.
    pub(super) fn remaining(self, holder: &Holder) -> Option<Duration> {
        self.comparable(holder).then(|| holder.ends.since(self.now))
    }

    /// How long ago the grant lapsed; none where it did not, or where that cannot be known.
    fn lapsed_for(self, holder: &Holder) -> Option<Duration> {
        (self.comparable(holder) && self.now >= holder.ends).then(|| self.now.since(holder.ends))
    }

    fn comparable(self, holder: &Holder) -> bool {
        holder.boot == self.host.boot && holder.time_namespace == self.host.time_namespace
    }
}

impl Record {
    /// The lock's record; `None` where the name has none.
    pub(super) fn read(step: &Step<'_>, name: &LockName) -> Result<Option<Self>, Halt> {
        Self::read_row(step, name.as_str().as_bytes())
    }

    /// The same, by the name's bytes.
    pub(super) fn read_row(step: &Step<'_>, name: &[u8]) -> Result<Option<Self>, Halt> {
        let found = step
            .prepare(LOCK_READ)?
            .query_row([name], |row| {
                Ok((
                    row.get::<_, Option<i64>>(0)?,
                    row.get::<_, Option<i64>>(1)?,
                    row.get::<_, i64>(2)?,
                ))
            })
            .optional()?;
        let Some((last, capacity, used)) = found else {
            return Ok(None);
        };
        let mut holders = Vec::new();
        let mut statement = step.prepare(HOLDERS_READ)?;
        let mut rows = statement.query([name])?;
        while let Some(row) = rows.next()? {
            holders.push(Holder::read(row)?);
        }
        Ok(Some(Self {
            last: last.map(token).transpose()?,
            capacity: capacity.map(permits).transpose()?,
            used_unix_us: used.unsigned_abs(),
            holders,
        }))
    }

    /// A record of a name that has none: its tokens are above all that were forgotten (L10).
    pub(super) fn new(step: &Step<'_>) -> Result<Self> {
        Ok(Self {
            last: match step.meta.floor {
                0 => None,
                floor => Some(token(floor)?),
            },
            capacity: None,
            used_unix_us: unix_micros(),
            holders: Vec::new(),
        })
    }

    /// Removes the grants that are not good any more (L5: for ever), and says for how long the last
    /// of them was not.
    pub(super) fn keep_good(
        &mut self,
        step: &Step<'_>,
        name: &LockName,
        moment: Moment<'_>,
    ) -> Result<(), Halt> {
        for lapsed in self.holders.iter().filter(|h| !moment.is_good(h)) {
            lapsed.drop_from(step, name)?;
        }
        self.holders.retain(|holder| moment.is_good(holder));
        Ok(())
    }

    /// Forgets the grants that are not good, in memory only: for those who change nothing.
    pub(super) fn see_good(&mut self, moment: Moment<'_>) {
        self.holders.retain(|holder| moment.is_good(holder));
    }

    /// For how long nobody has held or used the lock; none where somebody does.
    pub(super) fn idle_for(&self, moment: Moment<'_>) -> Option<Duration> {
        if self.holders.iter().any(|holder| moment.is_good(holder)) {
            return None;
        }
        let unused = Duration::from_micros(unix_micros().saturating_sub(self.used_unix_us));
        let lapsed = self.holders.iter().filter_map(|h| moment.lapsed_for(h));
        Some(lapsed.fold(unused, Duration::min))
    }

    /// Stores all but the holders.
    pub(super) fn store(&self, step: &Step<'_>, name: &LockName) -> Result<(), Halt> {
        step.prepare(LOCK_WRITE)?.execute(params![
            name.as_str().as_bytes(),
            self.last.map(signed),
            self.capacity,
            now_unix_us(),
        ])?;
        Ok(())
    }

    /// The grant that `lease` names, where it was not given up (L5).
    pub(super) fn find_mut(&mut self, lease: &LeaseRef) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| {
            holder.is_of(&lease.holder) && lease.token.is_none_or(|token| token == holder.token)
        })
    }

    /// The state as an operator sees it, of the holders that are left.
    pub(super) fn show(&self, name: &LockName, moment: Moment<'_>) -> LockState {
        let mut shown = LockState::new(name.clone(), self.last);
        shown.capacity = self.capacity;
        for holder in &self.holders {
            shown.holders.push(HolderState {
                token: holder.token,
                tag: HolderTag::of(&holder.id),
                ttl: holder.ttl,
                expires_in: moment.remaining(holder),
                info: holder.info(),
            });
        }
        shown
    }
}

impl Holder {
    pub(super) fn new(id: HolderId, token: FencingToken, info: &LeaseInfo) -> Self {
        Self {
            id,
            token,
            ttl: Ttl::DEFAULT,
            ends: Tick::from_nanos(0),
            boot: String::new(),
            time_namespace: String::new(),
            released: false,
            info: info::to_bytes(info),
        }
    }

    fn read(row: &Row<'_>) -> Result<Self, Halt> {
        let ttl = Duration::from_nanos(u64::try_from(row.get::<_, i64>(2)?).unwrap_or(0));
        let ends = row.get::<_, i64>(3)?;
        Ok(Self {
            token: token(row.get(0)?)?,
            id: HolderId::from_bytes(row.get(1)?),
            ttl: Ttl::new(ttl).map_err(|error| {
                Error::corrupt("a stored TTL is out of range").with_source(error)
            })?,
            ends: Tick::from_nanos(u64::try_from(ends).unwrap_or(0)),
            boot: row.get(4)?,
            time_namespace: row.get(5)?,
            released: row.get(6)?,
            info: row.get(7)?,
        })
    }

    /// True where this is a grant of `id` that it did not give up.
    pub(super) fn is_of(&self, id: &HolderId) -> bool {
        !self.released && self.id == *id
    }

    /// Makes the grant last for `ttl` from now.
    pub(super) fn extend(&mut self, ttl: Ttl, moment: Moment<'_>) -> Result<()> {
        self.ends = moment.now.after(finite(ttl)?);
        self.ttl = ttl;
        self.belong_to(moment.host);
        Ok(())
    }

    /// Lets a grant that is given up end after `linger`.
    pub(super) fn linger(&mut self, linger: Duration, moment: Moment<'_>) {
        self.released = true;
        self.ends = moment.now.after(linger.min(Ttl::MAX));
        self.belong_to(moment.host);
    }

    fn belong_to(&mut self, host: &Host) {
        self.boot.clone_from(&host.boot);
        self.time_namespace.clone_from(&host.time_namespace);
    }

    pub(super) fn info(&self) -> LeaseInfo {
        info::from_bytes(&self.info)
    }

    pub(super) fn store(&self, step: &Step<'_>, name: &LockName) -> Result<(), Halt> {
        step.prepare(HOLDER_WRITE)?.execute(params![
            name.as_str().as_bytes(),
            signed(self.token),
            self.id.as_bytes().as_slice(),
            nanos(finite(self.ttl)?),
            i64::try_from(self.ends.as_nanos()).unwrap_or(i64::MAX),
            self.boot,
            self.time_namespace,
            self.released,
            self.info,
        ])?;
        Ok(())
    }

    pub(super) fn drop_from(&self, step: &Step<'_>, name: &LockName) -> Result<(), Halt> {
        step.prepare(HOLDER_DROP)?
            .execute(params![name.as_str().as_bytes(), signed(self.token)])?;
        Ok(())
    }
}

/// Removes all holders of a lock, readable or not.
pub(super) fn drop_holders(step: &Step<'_>, name: &LockName) -> Result<(), Halt> {
    step.prepare(HOLDERS_DROP)?
        .execute([name.as_str().as_bytes()])?;
    Ok(())
}

/// Notes that a lock was used just now.
pub(super) fn note_use(step: &Step<'_>, name: &LockName) -> Result<(), Halt> {
    step.prepare(LOCK_USED)?
        .execute(params![name.as_str().as_bytes(), now_unix_us()])?;
    Ok(())
}

/// The TTL's duration.
///
/// # Errors
/// `Unsupported` where it has none.
pub(super) fn finite(ttl: Ttl) -> Result<Duration> {
    ttl.duration().ok_or_else(|| {
        Error::unsupported(
            "a lock in SQLite needs an expiry, for nobody sees there that its holder died; give a TTL",
        )
    })
}

fn permits(number: i64) -> Result<u32> {
    u32::try_from(number)
        .map_err(|_| Error::corrupt("a stored capacity is out of range").with("capacity", number))
}

pub(super) fn now_unix_us() -> i64 {
    i64::try_from(unix_micros()).unwrap_or(i64::MAX)
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
