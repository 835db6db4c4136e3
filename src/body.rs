//! The bytes of a fenced value: in memory, or a file that is read as it is needed.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use bytes::Bytes;

use crate::error::{Error, Result};

/// How much of a file is read at a time, in bytes.
const CHUNK_BYTES: usize = 256 * 1024;

/// The bytes of a value.
///
/// A [`Body::from_file`] is read in chunks of 256 KiB, so that a large one never has to be in
/// memory whole.
#[derive(Debug)]
pub struct Body(Source);

#[derive(Debug)]
enum Source {
    Bytes(Bytes),
    File { file: File, len: u64 },
}

impl Body {
    /// The rest of an open regular file, from its present position.
    ///
    /// # Errors
    /// `Invalid` where it cannot be measured, as a pipe cannot: read that into memory, or copy it
    /// to a file first.
    pub fn from_file(mut file: File) -> Result<Self> {
        let len = measure(&mut file)
            .map_err(|e| Error::invalid("the body's file cannot be measured").with_source(e))?;
        Ok(Self(Source::File { file, len }))
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.0 {
            Source::Bytes(bytes) => u64::try_from(bytes.len()).unwrap_or(u64::MAX),
            Source::File { len, .. } => *len,
        }
    }

    /// True where the bytes are in memory already, so that reading them does not block.
    #[must_use]
    pub fn in_memory(&self) -> bool {
        matches!(self.0, Source::Bytes(_))
    }

    /// True where there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes, where there are at most `limit_bytes`. Blocks on file I/O where the body is a
    /// file.
    ///
    /// # Errors
    /// `Invalid` where the body is longer; `Unavailable` where it cannot be read.
    pub fn into_bytes(self, limit_bytes: u64) -> Result<Bytes> {
        if self.len() > limit_bytes {
            return Err(Error::invalid("the value is larger than can be held here")
                .with("bytes", self.len())
                .with("limit_bytes", limit_bytes));
        }
        match self.0 {
            Source::Bytes(bytes) => Ok(bytes),
            Source::File { file, len } => {
                let mut all = Vec::new();
                file.take(len).read_to_end(&mut all).map_err(read_error)?;
                Ok(all.into())
            }
        }
    }

    /// The bytes in pieces of at most `chunk_bytes`.
    #[cfg(feature = "object_store")]
    pub(crate) fn into_chunks(self, chunk_bytes: usize) -> Chunks {
        let left = self.len();
        Chunks {
            source: self.0,
            chunk_bytes,
            left,
        }
    }

    /// Writes all bytes to `out` in chunks, and returns how many. Blocks.
    ///
    /// # Errors
    /// The first read or write error. A file that became shorter in the meantime is an
    /// `UnexpectedEof`.
    pub fn copy_to(self, out: &mut impl io::Write) -> io::Result<u64> {
        match self.0 {
            Source::Bytes(bytes) => {
                out.write_all(&bytes)?;
                Ok(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
            }
            Source::File { file, len } => {
                let mut reader = io::BufReader::with_capacity(CHUNK_BYTES, file.take(len));
                let copied = io::copy(&mut reader, out)?;
                if copied < len {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(copied)
            }
        }
    }
}

/// A body that is read piece by piece.
#[cfg(feature = "object_store")]
#[derive(Debug)]
pub(crate) struct Chunks {
    source: Source,
    chunk_bytes: usize,
    /// What is still to come, in bytes.
    left: u64,
}

#[cfg(feature = "object_store")]
impl Chunks {
    /// True where the next piece does not block.
    pub(crate) fn in_memory(&self) -> bool {
        matches!(self.source, Source::Bytes(_))
    }

    /// The next piece, as long as can be; empty at the end. Blocks on file I/O where the body is a
    /// file.
    ///
    /// # Errors
    /// `Unavailable` where the file cannot be read, or has become shorter.
    pub(crate) fn next_chunk(&mut self) -> Result<Bytes> {
        let wanted =
            usize::try_from(self.left).map_or(self.chunk_bytes, |n| n.min(self.chunk_bytes));
        let chunk = match &mut self.source {
            Source::Bytes(bytes) => bytes.split_to(wanted.min(bytes.len())),
            Source::File { file, .. } => {
                let mut chunk = vec![0; wanted];
                file.read_exact(&mut chunk).map_err(read_error)?;
                chunk.into()
            }
        };
        self.left = self
            .left
            .saturating_sub(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
        Ok(chunk)
    }
}

fn measure(file: &mut File) -> io::Result<u64> {
    let here = file.stream_position()?;
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(here))?;
    Ok(end.saturating_sub(here))
}

fn read_error(error: io::Error) -> Error {
    Error::unavailable("the body cannot be read").with_source(error)
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self(Source::Bytes(bytes))
    }
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Source::Bytes(bytes.into()))
    }
}

impl From<String> for Body {
    fn from(text: String) -> Self {
        Self(Source::Bytes(text.into()))
    }
}

impl From<&'static str> for Body {
    fn from(text: &'static str) -> Self {
        Self(Source::Bytes(Bytes::from_static(text.as_bytes())))
    }
}

impl From<&'static [u8]> for Body {
    fn from(bytes: &'static [u8]) -> Self {
        Self(Source::Bytes(Bytes::from_static(bytes)))
    }
}
