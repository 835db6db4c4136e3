//! Data objects: values that are too large for the pointer. Each is written once, under a key that is
//! never used again, so repeating a write of it is harmless.

use std::fs::File;
use std::io::{Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use ::object_store::path::Path;
use ::object_store::{
    Error as StoreError, GetOptions, MultipartUpload, ObjectStoreExt as _, PutMultipartOptions,
    PutOptions,
};
use bytes::Bytes;
use futures_util::StreamExt as _;

use super::connect::{Link, REQUEST_LIMIT};
use super::failure;
use crate::backoff::Backoff;
use crate::body::{Body, Chunks};
use crate::driver::{off_thread, within};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::random;

/// How much is sent and held at a time: at least the 5 MiB that a part must have.
pub(super) const PART_BYTES: usize = 8 << 20;

/// The largest value: what 10,000 parts hold, the most that an upload may have.
pub const VALUE_MAX_BYTES: u64 = 10_000 * (8 << 20);

/// How long the transfer of one part may take.
const PART_LIMIT: Duration = Duration::from_secs(30);

/// How many times a part is sent.
const TRIES: u32 = 3;

/// Writes an object of its own. Holds two parts in memory at the most.
///
/// # Errors
/// `Unavailable`: the value is not there, or at least nobody is pointed to it.
pub(super) async fn upload(link: &Link, path: &Path, body: Body) -> Result<()> {
    let len = body.len();
    let mut chunks = body.into_chunks(PART_BYTES);
    let (back, first) = next(chunks).await?;
    chunks = back;
    let uploaded = if u64::try_from(first.len()).is_ok_and(|first| first == len) {
        put(link, path, first).await
    } else {
        multipart(link, path, chunks, first, len).await
    };
    // Whatever happened, no pointer names it.
    uploaded.map_err(|error| match error.kind() {
        ErrorKind::Indeterminate => error.into_kind(ErrorKind::Unavailable),
        _ => error,
    })
}

async fn next(mut chunks: Chunks) -> Result<(Chunks, Bytes)> {
    if chunks.in_memory() {
        let chunk = chunks.next_chunk()?;
        return Ok((chunks, chunk));
    }
    off_thread(move || {
        let chunk = chunks.next_chunk()?;
        Ok((chunks, chunk))
    })
    .await?
}

async fn put(link: &Link, path: &Path, bytes: Bytes) -> Result<()> {
    retried(|| async {
        let put = link
            .store()
            .put_opts(path, bytes.clone().into(), PutOptions::default());
        within(PART_LIMIT, put)
            .await
            .unwrap_or_else(|| Err(silent()))
            .map(drop)
    })
    .await
    .map_err(|error| link.named(error))
}

/// One part is sent while the next is read.
async fn multipart(link: &Link, path: &Path, chunks: Chunks, first: Bytes, len: u64) -> Result<()> {
    let start = link
        .store()
        .put_multipart_opts(path, PutMultipartOptions::default());
    let mut upload = within(REQUEST_LIMIT, start)
        .await
        .unwrap_or_else(|| Err(silent()))
        .map_err(|error| link.named(failure::reading(&error)))?;
    let sent = match send(upload.as_mut(), chunks, first).await {
        Ok(()) => complete(link, path, upload.as_mut(), len).await,
        Err(error) => Err(error),
    };
    if sent.is_err() {
        // Best effort: parts of an upload that never ends cost money; a lifecycle rule removes them.
        let _ = within(REQUEST_LIMIT, upload.abort()).await;
    }
    sent.map_err(|error| link.named(error))
}

async fn send(upload: &mut dyn MultipartUpload, mut chunks: Chunks, first: Bytes) -> Result<()> {
    let mut part = first;
    loop {
        let sending = upload.put_part(part.into());
        let sending = async {
            within(PART_LIMIT, sending)
                .await
                .unwrap_or_else(|| Err(silent()))
                .map_err(|error| failure::reading(&error))
        };
        let (sent, read) = futures_util::future::join(sending, next(chunks)).await;
        sent?;
        (chunks, part) = read?;
        if part.is_empty() {
            return Ok(());
        }
    }
}

async fn complete(
    link: &Link,
    path: &Path,
    upload: &mut dyn MultipartUpload,
    len: u64,
) -> Result<()> {
    // The server puts the parts together, which takes its time.
    let completed = within(PART_LIMIT, upload.complete())
        .await
        .unwrap_or_else(|| Err(silent()));
    let Err(error) = completed else {
        return Ok(());
    };
    // The answer may be what was lost.
    let there = within(REQUEST_LIMIT, link.store().head(path)).await;
    match there {
        Some(Ok(meta)) if meta.size == len => Ok(()),
        _ => Err(failure::reading(&error)),
    }
}

/// Repeats what may be repeated, while the reason is one that passes.
async fn retried<F>(mut request: impl FnMut() -> F) -> Result<()>
where
    F: Future<Output = ::object_store::Result<()>>,
{
    let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
    let mut tries = 1;
    loop {
        let error = match request().await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let meant = failure::writing(&error);
        // Silence has cost the limit already.
        if tries >= TRIES || is_silence(&error) || meant.kind() != ErrorKind::Indeterminate {
            return Err(meant);
        }
        tries += 1;
        tokio::time::sleep(backoff.next()).await;
    }
}

#[derive(Debug)]
struct Silence;

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the object store did not answer in time")
    }
}

impl std::error::Error for Silence {}

fn silent() -> StoreError {
    StoreError::Generic {
        store: "fencelock",
        source: Box::new(Silence),
    }
}

fn is_silence(error: &StoreError) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<Silence>())
}

/// Reads a data object: into memory where it is at most one part, else into a temporary file without
/// a name. `None` where it is gone.
///
/// # Errors
/// `Unavailable`; `Corrupt` where it has another length than its pointer says.
pub(super) async fn download(link: &Link, path: &Path, len: u64) -> Result<Option<Body>> {
    let start = link.store().get_opts(path, GetOptions::default());
    let result = match within(PART_LIMIT, start)
        .await
        .unwrap_or_else(|| Err(silent()))
    {
        Ok(result) => result,
        Err(StoreError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(link.named(failure::reading(&error))),
    };
    if result.meta.size != len {
        return Err(
            Error::corrupt("a data object has another length than its pointer says")
                .with("object", path)
                .with("bytes", result.meta.size)
                .with("expected_bytes", len),
        );
    }
    let small = usize::try_from(len).is_ok_and(|len| len <= PART_BYTES);
    let mut spool = match small {
        true => None,
        false => Some(Arc::new(off_thread(temporary).await??)),
    };
    let mut stream = result.into_stream();
    let mut held = Vec::new();
    let mut received: u64 = 0;
    while let Some(next) = within(PART_LIMIT, stream.next())
        .await
        .unwrap_or_else(|| Some(Err(silent())))
    {
        let bytes = next.map_err(|error| link.named(failure::reading(&error)))?;
        received = received.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        held.extend_from_slice(&bytes);
        if let Some(file) = &spool
            && held.len() >= SPOOL_WRITE_BYTES
        {
            held = spooled(file, held).await?;
        }
    }
    if received != len {
        return Err(link.named(Error::unavailable(
            "the object store ended the transfer of a value early",
        )));
    }
    let Some(file) = spool.take() else {
        return Ok(Some(held.into()));
    };
    spooled(&file, held).await?;
    off_thread(move || {
        let mut whole = Arc::try_unwrap(file)
            .or_else(|shared| shared.try_clone())
            .map_err(|e| no_room(&e))?;
        whole.rewind().map_err(|e| no_room(&e))?;
        Body::from_file(whole).map(Some)
    })
    .await?
}

/// How much is gathered before it is written to the temporary file.
const SPOOL_WRITE_BYTES: usize = 1 << 20;

/// Writes the bytes and gives back their buffer, emptied.
async fn spooled(file: &Arc<File>, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    let file = Arc::clone(file);
    off_thread(move || {
        file.as_ref().write_all(&bytes).map_err(|e| no_room(&e))?;
        bytes.clear();
        Ok(bytes)
    })
    .await?
}

fn temporary() -> Result<File> {
    let name = format!("fencelock-{}", hex(&random::id()));
    let path = std::env::temp_dir().join(name);
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| no_room(&e))?;
    // It lives as long as it is open.
    std::fs::remove_file(&path).map_err(|e| no_room(&e))?;
    Ok(file)
}

fn no_room(error: &std::io::Error) -> Error {
    Error::unavailable(
        "a large value cannot be kept in the temporary directory; set TMPDIR to one with room",
    )
    .with("dir", std::env::temp_dir().display())
    .with("reason", error)
}
