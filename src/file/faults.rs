//! Where tests let the file system fail or the process die. Does nothing in a normal build.

#[cfg(not(test))]
use std::io;

/// Comes before each effect on the disk, and says which.
///
/// # Errors
/// Only in a test that arranged it.
#[cfg(not(test))]
pub(crate) fn step(_what: &'static str) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use armed::{Plan, arm, step, steps_of};

#[cfg(test)]
mod armed {
    use std::cell::{Cell, RefCell};
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
        static SEEN: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    /// Starts counting steps, and does as planned.
    pub(crate) fn arm(plan: Option<Plan>) {
        SEEN.take();
        PLAN.set(plan);
    }

    /// The steps that `work` takes, in order.
    pub(crate) fn steps_of(work: impl FnOnce()) -> Vec<&'static str> {
        arm(None);
        work();
        SEEN.take()
    }

    pub(crate) fn step(what: &'static str) -> io::Result<()> {
        let number = SEEN.with_borrow_mut(|seen| {
            seen.push(what);
            seen.len() - 1
        });
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
