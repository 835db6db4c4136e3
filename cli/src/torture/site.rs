//! All places of one run, made together and taken away together, also where the run is killed.

use std::path::Path;
use std::time::Duration;

use super::janitor::{Duties, Janitor};
use super::place::{Mark, Place, Trace, erase};
use super::plan::Storage;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::store::StoreUrl;

/// How long the places of a run may take to be taken away.
const ERASE_LIMIT: Duration = Duration::from_secs(30);

/// A server that goes as a whole, and with it all that is in it.
pub(crate) struct Server<'a> {
    pub(crate) url: String,
    pub(crate) dir: &'a Path,
}

/// The places of a run.
pub(crate) struct Site {
    pub(crate) mark: Mark,
    pub(crate) store: Place,
    /// Two of them: values are in the first, and where a workload has two storages, in the second.
    pub(crate) storages: Vec<Place>,
    pub(crate) janitor: Janitor,
    /// Without what goes with a server.
    traces: Vec<Trace>,
    /// Of the second storage, where nobody named one.
    _files: tempfile::TempDir,
}

impl Site {
    /// Makes the run's own places, and has the janitor know of them. Values go into the store and into
    /// files, unless `dests` say otherwise.
    pub(crate) fn set(
        store: Option<&str>,
        server: Option<&Server<'_>>,
        dests: &[String],
        mut janitor: Janitor,
    ) -> Result<Self> {
        let mark = Mark::random();
        let store = match server {
            Some(server) => server.url.clone(),
            None => StoreUrl::resolve(store)?.reveal().to_owned(),
        };
        if store.starts_with("memory:") {
            return Err(Failure::new(
                exit_codes::CONFIG,
                "a store that processes share is needed, and memory: is one process's own; give --store URL",
            ));
        }
        let files = temporary("fencelock-values-")?;
        let first = dests.first().map_or(store.as_str(), String::as_str);
        let second = match dests.get(1) {
            Some(dest) => dest.clone(),
            None => files.path().display().to_string(),
        };
        let mut places = Vec::new();
        let made = [
            (store.as_str(), "locks"),
            (first, "values"),
            (&second, "more-values"),
        ]
        .into_iter()
        .try_for_each(|(url, role)| {
            places.push(Place::within(url, &mark, role)?);
            Ok(())
        });
        let mut traces: Vec<Trace> = places
            .iter()
            .flat_map(|place: &Place| place.traces.clone())
            .collect();
        // It is removed with its value; whoever is killed drops none.
        traces.push(Trace::Directory(files.path().to_owned()));
        traces.sort();
        traces.dedup();
        if let Some(server) = server {
            let url = &server.url;
            traces.retain(|trace| !matches!(trace, Trace::Engine(at) if at.starts_with(url)));
        }
        if let Err(failure) = made {
            // Directories that were made before the one that could not be.
            for trace in &traces {
                remove(trace);
            }
            return Err(failure);
        }
        janitor.duties(&Duties {
            mark: mark.as_str().to_owned(),
            traces: traces.clone(),
            server_dir: server.map(|server| server.dir.to_owned()),
        })?;
        let mut places = places.into_iter();
        let (Some(store), storages) = (places.next(), places.collect()) else {
            return Err(Failure::new(exit_codes::INDETERMINATE, "there is no place"));
        };
        Ok(Self {
            mark,
            store,
            storages,
            janitor,
            traces,
            _files: files,
        })
    }

    /// What a storage is, for the clients.
    pub(crate) fn storages(&self) -> Vec<Storage> {
        let storages = self.storages.iter().map(|place| place.storage.clone());
        storages.collect()
    }

    /// Takes everything away again.
    pub(crate) async fn clear(self) -> Result<()> {
        let mark = self.mark.as_str();
        let mut failed = None;
        for trace in &self.traces {
            match tokio::time::timeout(ERASE_LIMIT, erase(trace, mark)).await {
                Ok(Ok(())) => {}
                Ok(Err(failure)) => failed = Some(failure),
                Err(_) => {
                    let silent = "a store does not answer".to_owned();
                    failed = Some(Failure::new(exit_codes::INDETERMINATE, silent));
                }
            }
        }
        self.janitor.dismiss();
        match failed {
            None => Ok(()),
            Some(failure) => Err(failure.within(&format!(
                "what the run left under {mark} could not be taken away"
            ))),
        }
    }
}

/// Removes a directory that nothing is in yet.
fn remove(trace: &Trace) {
    match trace {
        Trace::Directory(path) => drop(std::fs::remove_dir_all(path)),
        Trace::EmptyDirectory(path) => drop(std::fs::remove_dir(path)),
        Trace::Engine(_) => {}
    }
}

/// A temporary directory, gone with its value.
pub(crate) fn temporary(prefix: &str) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new().prefix(prefix).tempdir();
    made.map_err(|e| {
        Failure::new(
            exit_codes::CONFIG,
            format!(
                "a temporary directory cannot be made in {}: {e}; set TMPDIR",
                std::env::temp_dir().display()
            ),
        )
    })
}
