//! What the SQL engines share: how numbers are stored, and for those with a server, what their
//! answers mean. What is sent, and how, is each engine's own.

#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod answer;
#[cfg(all(feature = "fuzzing", any(feature = "mysql", feature = "postgres")))]
pub(crate) mod fuzz;
pub(crate) mod number;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod renewal;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod shown;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod value;
