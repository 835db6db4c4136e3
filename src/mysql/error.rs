//! What the server's errors mean for the caller.

use mysql_async::{DriverError, Error as ClientError, IoError, ServerError};

use super::connect::Target;
use super::sql::Prefix;
use crate::error::{Error, ErrorKind};
use crate::token::FencingToken;

/// An error before anything was sent: nothing was applied. A pool's target is not known.
pub(super) fn connect_error(error: ClientError, target: Option<&Target>) -> Error {
    let refusal = match &error {
        ClientError::Server(error) => connect_refusal(error),
        // This is how the client says that it does not trust the server.
        ClientError::Io(error) if is_tls(error) => tls_refusal(),
        ClientError::Io(_) | ClientError::Driver(DriverError::ConnectionClosed) => {
            Error::unavailable("the MySQL server cannot be reached")
        }
        ClientError::Driver(DriverError::NoClientSslFlagFromServer) => Error::invalid(
            "the MySQL server has no TLS; set it up there, or accept a connection in the clear with ssl-mode=disabled",
        ),
        ClientError::Driver(DriverError::PoolDisconnected) => {
            Error::unavailable("the pool is closed")
        }
        _ => Error::invalid("no connection to MySQL can be made with these settings"),
    };
    let refusal = match target {
        Some(target) => refusal
            .with("server", target)
            .with("user", target.user())
            .with("database", target.database()),
        None => refusal,
    };
    refusal.with_source(error)
}

fn is_tls(error: &IoError) -> bool {
    match error {
        IoError::Io(error) => error.kind() == std::io::ErrorKind::InvalidData,
        #[cfg(feature = "mysql-tls")]
        IoError::Tls(_) => true,
    }
}

fn tls_refusal() -> Error {
    Error::invalid(
        "the TLS handshake with MySQL failed: its certificate is not trusted, or not for this name; see ssl-ca",
    )
}

fn connect_refusal(error: &ServerError) -> Error {
    match error.code {
        1045 | 1251 | 1698 => Error::invalid(
            "MySQL refused the user or the password; check the URL, MYSQL_PWD and the user's host",
        ),
        1044 => Error::invalid("the user may not use the database; GRANT it privileges there"),
        1049 => Error::invalid("there is no such database; create it, or correct the URL"),
        1129 | 1130 => Error::invalid("MySQL takes no connections from this host"),
        3159 => Error::invalid(
            "this MySQL server takes only connections with TLS; use ssl-mode=verify_identity",
        ),
        1040 | 1203 | 1226 => {
            Error::unavailable("MySQL has no connection free for this user; raise max_connections")
        }
        _ => Error::unavailable("MySQL does not take connections now"),
    }
}

/// True where the server answered with an error after which the connection is as before: a refusal of
/// our own procedures, which have rolled back.
pub(super) fn has_failed_cleanly(error: &ClientError) -> bool {
    matches!(error, ClientError::Server(error) if error.state.starts_with("FL"))
}

/// An error after a request was sent.
pub(super) fn request_error(error: ClientError, prefix: &Prefix) -> Error {
    let refusal = match &error {
        ClientError::Server(error) => match own_refusal(error) {
            Some(refusal) => return refusal,
            None => refusal(error, prefix),
        },
        ClientError::Driver(DriverError::PacketTooLarge) => answer_too_large(),
        ClientError::Io(error) if is_too_large(error) => answer_too_large(),
        _ => Error::indeterminate("the connection to MySQL was lost before the answer came"),
    };
    refusal.with_source(error)
}

/// An error after a request was sent whose size is that of a value, and whose answer is small.
pub(super) fn value_error(error: ClientError, prefix: &Prefix) -> Error {
    match &error {
        // The client knows the server's limit, and has sent nothing.
        ClientError::Io(io) if is_too_large(io) => too_large().with_source(error),
        _ => request_error(error, prefix),
    }
}

/// The client hides this case behind an error of input and output, whose type it does not export.
fn is_too_large(error: &IoError) -> bool {
    match error {
        IoError::Io(error) => {
            error.kind() == std::io::ErrorKind::Other
                && error.to_string().contains("max_allowed_packet")
        }
        #[cfg(feature = "mysql-tls")]
        IoError::Tls(_) => false,
    }
}

fn answer_too_large() -> Error {
    Error::indeterminate(
        "MySQL's answer is larger than its max_allowed_packet, which was lowered; raise it there",
    )
}

fn too_large() -> Error {
    Error::invalid(
        "the value is larger than the server's max_allowed_packet; raise it there, or store less",
    )
}

fn refusal(error: &ServerError, prefix: &Prefix) -> Error {
    let prefix = prefix.as_str();
    match error.code {
        // A session or a statement that is ended from outside may have committed before.
        1053 | 1077 | 1078 | 1079 | 1080 | 1317 | 1927 | 1969 | 3024 | 3168 | 3169 => {
            Error::indeterminate("MySQL ended the request before the answer came")
        }
        // The commit itself failed.
        1026 | 1180 | 1598 => Error::indeterminate("MySQL could not say whether the commit is done"),
        1290 | 1792 | 1836 | 1874 | 3100 => Error::unavailable(
            "this MySQL server takes no writes: a replica, or read_only is on; connect to the primary",
        ),
        1044 | 1142 | 1143 | 1227 | 1370 => Error::unsupported(format!(
            "the user may not do this; GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE on the database to it, or on the tables and procedures {prefix}_* (creating them needs CREATE, CREATE ROUTINE, ALTER ROUTINE)"
        )),
        1146 | 1305 => Error::corrupt(
            "fencelock's tables or procedures are missing; run the SQL of its schema, which leaves data as it is",
        )
        .with("prefix", prefix),
        1153 | 1301 => too_large(),
        1205 => Error::unavailable(
            "another transaction keeps the row locked; look for it with SHOW ENGINE INNODB STATUS",
        ),
        1213 | 1020 => {
            Error::unavailable("the request met another one, and was rolled back")
        }
        1568 => Error::invalid(
            "the connection is inside a transaction, or its autocommit is off; locks need connections with autocommit on",
        ),
        1665 => Error::unsupported(
            "the server's binary log is of statements, and cannot take fencelock's writes; set binlog_format to ROW or MIXED",
        ),
        1021 | 1114 => Error::unavailable("MySQL has no space left, and applied nothing"),
        _ => Error::unavailable("MySQL refused the request, and applied nothing"),
    }
}

/// The refusals that fencelock's own procedures raise, `FL…`: no cause is attached, for the message
/// says all, and the server's says it again.
pub(super) fn own_refusal(error: &ServerError) -> Option<Error> {
    let message = error.message.clone();
    let kind = match error.state.as_str() {
        "FL001" => {
            if let (Some(token), Some(watermark)) =
                (field(&message, "token"), field(&message, "watermark"))
            {
                return Some(Error::fenced(token, watermark, message));
            }
            ErrorKind::Fenced
        }
        "FL002" => {
            return Some(Error::new(
                ErrorKind::DomainMismatch,
                format!(
                    "the resource is bound to another lock; use that lock, or rebind the resource {message}"
                ),
            ));
        }
        "FL003" | "FL005" | "FL009" => ErrorKind::Invalid,
        "FL004" => ErrorKind::Exhausted,
        "FL006" => ErrorKind::Unsupported,
        "FL007" => ErrorKind::Corrupt,
        _ => return None,
    };
    Some(Error::new(kind, message))
}

fn field(message: &str, key: &str) -> Option<FencingToken> {
    message
        .split(' ')
        .find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
        .and_then(|number| number.parse().ok())
}
