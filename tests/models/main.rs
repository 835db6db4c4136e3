//! The two protocols as models, checked over every interleaving of delays, pauses and duplicates,
//! by the library's own rule. Each has its broken variants, which have to be found: a model that
//! finds nothing wrong with them proves nothing of the sound one.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that cannot go on has to fail, its helpers included"
)]

mod fencing;
mod lease;
