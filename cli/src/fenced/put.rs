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
    let body = read(file, &what)?;
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
fn read(file: File, what: &str) -> Result<Body> {
    let unreadable = |error: io::Error| unreadable(what, &error);
    if file.metadata().map_err(unreadable)?.is_file() {
        return Body::from_file(file).map_err(|e| unreadable(io::Error::other(e)));
    }
    let mut chunk = Vec::new();
    let more = |chunk: &mut Vec<u8>| {
        chunk.clear();
        (&file).take(SPOOL_BYTES).read_to_end(chunk)
    };
    more(&mut chunk).map_err(unreadable)?;
    if u64::try_from(chunk.len()).unwrap_or(u64::MAX) < SPOOL_BYTES {
        return Ok(chunk.into());
    }
    let mut spool = tempfile::tempfile().map_err(|e| no_room(&e))?;
    while !chunk.is_empty() {
        spool.write_all(&chunk).map_err(|e| no_room(&e))?;
        more(&mut chunk).map_err(unreadable)?;
    }
    spool.rewind().map_err(|e| no_room(&e))?;
    Body::from_file(spool).map_err(|e| no_room(&io::Error::other(e)))
}

/// The temporary directory took no copy of the input.
fn no_room(error: &io::Error) -> Failure {
    let code = match error.kind() {
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem => exit_codes::CONFIG,
        _ => exit_codes::UNAVAILABLE,
    };
    Failure::new(
        code,
        format!(
            "standard input cannot be kept in the temporary directory {}: {error}; nothing was written, set TMPDIR to one with room",
            std::env::temp_dir().display()
        ),
    )
}
