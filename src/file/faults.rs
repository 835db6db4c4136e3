//! Where tests let the file system fail or the process die. Does nothing in a normal build.

#[cfg(not(test))]
use std::io;

/// Comes before each effect on the disk.
///
/// # Errors
/// Only in a test that arranged it.
#[cfg(not(test))]
pub(crate) fn step() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use armed::{Plan, arm, step, steps_of};

#[cfg(test)]
mod armed {
    use std::cell::Cell;
    use std::io;

    use rustix::io::Errno;

    /// What happens at the step with this number, on this thread.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Plan {
        /// This step fails, later ones do not.
        FailOnce(usize, Errno),
        /// This step and all later ones fail.
        FailFrom(usize, Errno),
        /// The process dies before this step, and no destructor runs.
        Die(usize),
    }

    thread_local! {
        static PLAN: Cell<Option<Plan>> = const { Cell::new(None) };
        static SEEN: Cell<usize> = const { Cell::new(0) };
    }

    /// Starts counting steps, and does as planned.
    pub(crate) fn arm(plan: Option<Plan>) {
        SEEN.set(0);
        PLAN.set(plan);
    }

    /// How many steps `work` takes.
    pub(crate) fn steps_of(work: impl FnOnce()) -> usize {
        arm(None);
        work();
        SEEN.get()
    }

    pub(crate) fn step() -> io::Result<()> {
        let number = SEEN.get();
        SEEN.set(number + 1);
        match PLAN.get() {
            Some(Plan::FailOnce(at, errno)) if number == at => Err(errno.into()),
            Some(Plan::FailFrom(at, errno)) if number >= at => Err(errno.into()),
            Some(Plan::Die(at)) if number == at => {
                let me = rustix::process::getpid();
                rustix::process::kill_process(me, rustix::process::Signal::KILL).unwrap();
                unreachable!("the process is killed");
            }
            _ => Ok(()),
        }
    }
}
