//! One request at a time for each resource, within one process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::name::ResourceName;

/// How many requests may wait for one resource; more are turned away at once.
const LINE_MAX: usize = 1024;

/// The resources that somebody is in or waits for. Nothing is kept for others. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Sections {
    lines: Arc<Mutex<HashMap<ResourceName, Line>>>,
}

#[derive(Debug)]
struct Line {
    // Tokio's semaphore serves in the order of arrival.
    turn: Arc<Semaphore>,
    places: usize,
}

/// A resource that its holder alone is in, until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    // Before the place: a line without places is forgotten, and whoever comes then finds nobody.
    _turn: OwnedSemaphorePermit,
    _place: Place,
}

#[derive(Debug)]
struct Place {
    sections: Sections,
    resource: ResourceName,
}

impl Sections {
    /// Waits in line for `resource`, at most for `limit`. Cancel safe: leaving loses the place.
    ///
    /// # Errors
    /// `Timeout` where the wait was too long or the line is.
    pub(super) async fn enter(&self, resource: &ResourceName, limit: Duration) -> Result<Held> {
        let (place, turn) = self.join(resource)?;
        match within(limit, turn.acquire_owned()).await {
            Some(Ok(turn)) => Ok(Held {
                _turn: turn,
                _place: place,
            }),
            // The semaphore is never closed.
            Some(Err(_)) | None => Err(busy(resource).with("waited_ms", limit.as_millis())),
        }
    }

    fn join(&self, resource: &ResourceName) -> Result<(Place, Arc<Semaphore>)> {
        let mut lines = self.lines();
        let line = lines.entry(resource.clone()).or_insert_with(|| Line {
            turn: Arc::new(Semaphore::new(1)),
            places: 0,
        });
        if line.places > LINE_MAX {
            return Err(busy(resource).with("waiting", line.places));
        }
        line.places += 1;
        let place = Place {
            sections: self.clone(),
            resource: resource.clone(),
        };
        Ok((place, Arc::clone(&line.turn)))
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<ResourceName, Line>> {
        // The map is whole at every unlock, so a panic elsewhere does not spoil it.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many resources are held or waited for.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.lines().len()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lines = self.sections.lines();
        if let Entry::Occupied(mut entry) = lines.entry(self.resource.clone()) {
            let line = entry.get_mut();
            line.places = line.places.saturating_sub(1);
            if line.places == 0 {
                entry.remove();
            }
        }
    }
}

fn busy(resource: &ResourceName) -> Error {
    Error::new(
        ErrorKind::Timeout,
        "other requests are at the resource; try again later",
    )
    .with("resource", format_args!("{resource:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_at_a_time_and_nothing_is_left_behind() {
        let sections = Sections::default();
        let resource: ResourceName = "r".parse().unwrap();
        let inside = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..16 {
            let (sections, resource) = (sections.clone(), resource.clone());
            let inside = Arc::clone(&inside);
            tasks.spawn(async move {
                for _ in 0..2_000 {
                    let held = sections.enter(&resource, LONG).await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    if number % 2 == 0 {
                        tokio::task::yield_now().await;
                    }
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(held);
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(sections.len(), 0);
    }

    #[tokio::test]
    async fn a_wait_is_bounded_and_leaving_keeps_the_order() {
        let sections = Sections::default();
        let resource: ResourceName = "r".parse().unwrap();
        let held = sections.enter(&resource, LONG).await.unwrap();
        let late = sections.enter(&resource, Duration::from_millis(5)).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
        let other = "other".parse().unwrap();
        drop(sections.enter(&other, LONG).await.unwrap());
        assert_eq!(sections.len(), 1);
        drop(held);
        assert_eq!(sections.len(), 0);
    }

    #[tokio::test]
    async fn a_line_has_a_longest_length() {
        let sections = Sections::default();
        let resource: ResourceName = "r".parse().unwrap();
        let mut places = Vec::new();
        while let Ok(place) = sections.join(&resource) {
            places.push(place);
        }
        assert_eq!(places.len(), LINE_MAX + 1, "one inside and the line");
        places.clear();
        assert_eq!(sections.len(), 0);
    }
}
