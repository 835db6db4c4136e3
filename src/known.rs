//! What a process remembers of resources, so that steady writes of one need not read first.
//!
//! It is a guess: others write too. Whoever admits by it names in the write's condition what was
//! remembered, and nobody is refused by it.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use crate::name::ResourceName;

/// How many resources are remembered: those that were used last.
const RESOURCES_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1_023);

/// The last that was seen of each of some resources.
#[derive(Debug)]
pub(crate) struct Known<T>(Mutex<LruCache<ResourceName, T>>);

impl<T: Clone> Known<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(LruCache::new(RESOURCES_MAX)))
    }

    pub(crate) fn recall(&self, resource: &ResourceName) -> Option<T> {
        self.locked().get(resource).cloned()
    }

    pub(crate) fn remember(&self, resource: &ResourceName, seen: T) {
        self.locked().put(resource.clone(), seen);
    }

    pub(crate) fn forget(&self, resource: &ResourceName) {
        self.locked().pop(resource);
    }

    fn locked(&self) -> MutexGuard<'_, LruCache<ResourceName, T>> {
        // What a panic elsewhere left here is a guess as before.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> ResourceName {
        format!("r-{number}").parse().unwrap()
    }

    #[test]
    fn the_resources_that_were_used_last_are_remembered() {
        let known = Known::new();
        let max = RESOURCES_MAX.get();
        for number in 0..max {
            known.remember(&name(number), number);
        }
        assert_eq!(known.recall(&name(0)), Some(0));
        known.remember(&name(max), max);
        assert_eq!(known.recall(&name(0)), Some(0), "used since");
        assert_eq!(known.recall(&name(1)), None, "used least");
        assert_eq!(known.recall(&name(max)), Some(max));
        known.forget(&name(max));
        assert_eq!(known.recall(&name(max)), None);
    }
}
