//! `fencelock put`: replaces the value of a resource.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use fencelock::body::Body;

use super::{Destination, Shown};
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// How much of a pipe is kept in memory; more goes to a temporary file without a name.
const SPOOL_BYTES: u64 = 8 * 1024 * 1024;

/// Where the new value comes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Standard input.
    Stdin,
    /// A file.
    File(PathBuf),
}

/// Writes the value.
pub(crate) async fn put(dest: &str, shown: &Shown, source: &Source, json: bool) -> Result<u8> {
    let (file, what) = open(source)?;
    let destination = Destination::open(dest).await?;
    let body = read(file).map_err(|e| unreadable(&what, &e))?;
    match destination
        .storage
        .put(&destination.resource, body, shown.fence())
        .await
    {
        Ok(written) => destination.report(shown, &written, json)?,
        Err(error) => return Err(shown.refused(&destination, error).await),
    }
    Ok(exit_codes::OK)
}

fn open(source: &Source) -> Result<(File, String)> {
    let (file, what) = match source {
        Source::Stdin => (
            io::stdin().as_fd().try_clone_to_owned().map(File::from),
            "standard input".to_owned(),
        ),
        Source::File(path) => (File::open(path), path.display().to_string()),
    };
    let file = file.map_err(|e| unreadable(&what, &e))?;
    Ok((file, what))
}

fn unreadable(what: &str, error: &io::Error) -> Failure {
    Failure::usage(format!("{what} cannot be read: {error}"))
}

/// A regular file is read while it is written out. Anything else, such as a pipe, is read to its
/// end first: the storage's lock must not be held for as long as a slow producer takes.
fn read(mut file: File) -> io::Result<Body> {
    if file.metadata()?.is_file() {
        return Body::from_file(file).map_err(io::Error::other);
    }
    let mut start = Vec::new();
    (&file).take(SPOOL_BYTES).read_to_end(&mut start)?;
    if u64::try_from(start.len()).unwrap_or(u64::MAX) < SPOOL_BYTES {
        return Ok(start.into());
    }
    let mut spool = tempfile::tempfile()?;
    spool.write_all(&start)?;
    drop(start);
    io::copy(&mut file, &mut spool)?;
    spool.rewind()?;
    Body::from_file(spool).map_err(io::Error::other)
}
