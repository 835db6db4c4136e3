//! What a `mysql://` URL may say.

use std::fmt;
use std::time::Duration;

use mysql_async::OptsBuilder;

use super::connect::Target;
use super::sql::Prefix;
use super::tls::Tls;
use crate::address::{decoded, host_and_port};
use crate::error::{Error, Result};
use crate::settings::is_loopback;

const PORT_DEFAULT: u16 = 3306;

/// The options that a URL may have, for messages.
const KNOWN: [&str; 7] = [
    "prefix",
    "create",
    "allow_galera",
    "insecure",
    "ssl-mode",
    "ssl-ca",
    "socket",
];

/// What our own connections ask of their session: each statement by itself, and a wait for a row
/// that is shorter than the limit of a request. The procedures depend on neither the time zone nor
/// the isolation level; a failed setting is a failed connection.
const SESSION: &str =
    "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 1, time_zone = '+00:00'";

/// How to reach the database, and what to use in it.
///
/// ```
/// use fencelock::mysql::MysqlOptions;
/// let options = MysqlOptions::parse("mysql://app:secret@localhost/app?prefix=locks")?;
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Clone)]
pub struct MysqlOptions {
    /// `None` where the user's pool is all there is.
    pub(super) target: Option<Target>,
    pub(super) prefix: Prefix,
    pub(super) create: bool,
    pub(super) allow_galera: bool,
}

impl MysqlOptions {
    /// The options of a URL: `mysql://user:password@host:port/database?option=…`, or the same with
    /// `mariadb://`. Without a password the environment variable `MYSQL_PWD` is used, as the
    /// servers' own clients do.
    ///
    /// # Errors
    /// `Invalid` for an unknown option or a wrong value; the message shows no password.
    /// `Unsupported` where the URL needs TLS and this build has none.
    pub fn parse(url: &str) -> Result<Self> {
        let rest = url
            .strip_prefix("mysql://")
            .or_else(|| url.strip_prefix("mariadb://"))
            .ok_or_else(|| {
                Error::invalid("not a MySQL URL; expected mysql://user@host:port/database")
            })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let options = form_urlencoded::parse(query.as_bytes()).into_owned();
        Self::from_parts(rest, options.collect())
    }

    /// The same, of a URL that is taken apart already.
    pub(crate) fn from_parts(rest: &str, options: Vec<(String, String)>) -> Result<Self> {
        let place = Place::parse(rest)?;
        let mut prefix = Prefix::default();
        let (mut create, mut allow_galera, mut insecure) = (true, false, false);
        let (mut mode, mut roots, mut socket) = (None, None, None);
        let mut seen: Vec<String> = Vec::new();
        for (key, value) in options {
            if seen.contains(&key) {
                return Err(Error::invalid("store option is given twice").with("option", key));
            }
            match key.as_str() {
                "prefix" => prefix = Prefix::new(&value)?,
                "create" => create = flag(&key, &value)?,
                "allow_galera" => allow_galera = flag(&key, &value)?,
                "insecure" => insecure = flag(&key, &value)?,
                "ssl-mode" => mode = Some(value),
                "ssl-ca" => roots = Some(value),
                "socket" if value.is_empty() => {
                    return Err(bad_value(&key, &value, "the path of a socket"));
                }
                "socket" => socket = Some(value),
                _ => {
                    return Err(Error::invalid(format!(
                        "unknown store option; mysql: knows ttl, {}",
                        KNOWN.join(", ")
                    ))
                    .with("option", format_args!("{key:?}")));
                }
            }
            seen.push(key);
        }
        let local = socket.is_some() || is_loopback(&place.host);
        let tls = choose_tls(local, mode.as_deref(), roots.as_deref(), insecure)?;
        if socket.is_some() && tls.is_on() {
            return Err(Error::invalid(
                "a socket of this host needs no TLS; leave out ssl-mode or socket",
            ));
        }
        Ok(Self {
            target: Some(place.target(socket, tls)),
            prefix,
            create,
            allow_galera,
        })
    }

    /// Options for a pool of the user's, which is how the database is reached then.
    #[must_use]
    pub fn for_pool() -> Self {
        Self {
            target: None,
            prefix: Prefix::default(),
            create: true,
            allow_galera: false,
        }
    }

    /// What the names of fencelock's tables and procedures begin with; `fencelock` where nothing is
    /// said. Another prefix is another set of locks.
    ///
    /// # Errors
    /// `Invalid` where it is not a plain lowercase identifier.
    pub fn prefix(mut self, prefix: &str) -> Result<Self> {
        self.prefix = Prefix::new(prefix)?;
        Ok(self)
    }

    /// Whether to create the tables and procedures where they are missing; true where nothing is
    /// said.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Whether to open a database of a Galera cluster, or of a MySQL group with several primaries,
    /// where two nodes can each grant a lock; false where nothing is said. Only safe where every
    /// client writes to the same node.
    #[must_use]
    pub fn allow_galera(mut self, allow: bool) -> Self {
        self.allow_galera = allow;
        self
    }
}

impl fmt::Debug for MysqlOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlOptions")
            .field("server", &self.target)
            .field("prefix", &self.prefix.as_str())
            .field("create", &self.create)
            .field("allow_galera", &self.allow_galera)
            .finish()
    }
}

/// What stands between the scheme and the query, decoded.
struct Place {
    user: Option<String>,
    password: Option<String>,
    host: String,
    port: u16,
    database: String,
}

impl Place {
    fn parse(rest: &str) -> Result<Self> {
        // A mistake in a password can put a part of it anywhere, so no part is shown.
        let malformed = || {
            Error::invalid(
                "malformed MySQL URL; expected mysql://user:password@host:port/database, with special characters percent-encoded",
            )
        };
        let (who, rest) = match rest.rsplit_once('@') {
            Some((who, rest)) => (Some(who), rest),
            None => (None, rest),
        };
        if who.is_some_and(|who| who.contains(['/', '#', '@'])) {
            return Err(malformed());
        }
        let (user, password) = match who.map(|who| who.split_once(':').unwrap_or((who, ""))) {
            Some((user, password)) => (decoded(user), decoded(password)),
            None => (Ok(String::new()), Ok(String::new())),
        };
        let (user, password) = (
            user.map_err(|_| malformed())?,
            password.map_err(|_| malformed())?,
        );
        let (server, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = match server {
            "" => ("localhost".to_owned(), PORT_DEFAULT),
            server => host_and_port(server, PORT_DEFAULT).map_err(|_| malformed())?,
        };
        let database = decoded(database).map_err(|_| malformed())?;
        if database.is_empty() {
            return Err(Error::invalid(
                "the URL names no database; expected mysql://user@host:port/database",
            ));
        }
        if database.contains(|c: char| c == '/' || c == '#' || c.is_control()) {
            return Err(malformed());
        }
        let given = |text: String| (!text.is_empty()).then_some(text);
        Ok(Self {
            user: given(user),
            password: given(password).or_else(|| std::env::var("MYSQL_PWD").ok().and_then(given)),
            host,
            port,
            database,
        })
    }

    fn target(self, socket: Option<String>, tls: Tls) -> Target {
        let server = match &socket {
            Some(path) => path.clone(),
            None => format!("{}:{}", self.host, self.port),
        };
        let user = self.user.clone().unwrap_or_default();
        let database = self.database.clone();
        let options = OptsBuilder::default()
            .ip_or_hostname(self.host)
            .tcp_port(self.port)
            .user(self.user)
            .pass(self.password)
            .db_name(Some(self.database))
            .socket(socket)
            // A jump to a socket that the URL does not name would be another server.
            .prefer_socket(false)
            .tcp_keepalive(Some(Duration::from_secs(10)))
            .init(vec![SESSION])
            .connect_attribute("program_name", "fencelock");
        Target::new(tls.apply(options), server, user, database)
    }
}

fn flag(key: &str, value: &str) -> Result<bool> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad_value(key, value, "true or false")),
    }
}

fn bad_value(key: &str, value: &str, expected: &str) -> Error {
    Error::invalid(format!(
        "wrong value of a store option; expected {expected}"
    ))
    .with(key, format_args!("{value:?}"))
}

/// TLS verifies fully or is not there; nothing in between is offered, since it protects from
/// nobody who can get into the way.
fn choose_tls(local: bool, mode: Option<&str>, roots: Option<&str>, insecure: bool) -> Result<Tls> {
    let wanted = match mode.map(str::to_ascii_lowercase).as_deref() {
        None => !local && !insecure,
        Some("required" | "verify_ca" | "verify_identity") => true,
        Some("disabled") => false,
        Some(other) => {
            return Err(bad_value("ssl-mode", other, "disabled or verify_identity"));
        }
    };
    if wanted {
        return Tls::verifying(roots);
    }
    if !local && !insecure {
        return Err(Error::invalid(
            "a connection without TLS would show holder ids and values to the network; use ssl-mode=verify_identity, or accept it with insecure=true",
        ));
    }
    if roots.is_some() {
        return Err(Error::invalid("ssl-ca needs ssl-mode=verify_identity"));
    }
    if !local {
        tracing::warn!("the connection to MySQL is not encrypted, as insecure=true asks");
    }
    Ok(Tls::Off)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        MysqlOptions::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong_and_shows_no_password() {
        for (url, said) in [
            ("postgres://x", "not a MySQL URL"),
            ("mysql://u:canary@h:port/db", "malformed MySQL URL"),
            ("mysql://u:canary/x@h/db", "malformed MySQL URL"),
            ("mysql://u:canary@x@h/db", "malformed MySQL URL"),
            ("mysql://u:canary%ff@h/db", "malformed MySQL URL"),
            ("mysql://u:canary@h/db/canary", "malformed MySQL URL"),
            ("mysql://u:canary@localhost", "names no database"),
            ("mysql://u:canary@localhost/", "names no database"),
            (
                "mysql://u:canary@localhost/db?colour=red",
                "unknown store option",
            ),
            (
                "mysql://u:canary@localhost/db?prefix=A",
                "not a prefix of tables",
            ),
            (
                "mysql://u:canary@localhost/db?prefix=a&prefix=b",
                "given twice",
            ),
            (
                "mysql://u:canary@localhost/db?create=maybe",
                "create=\"maybe\"",
            ),
            (
                "mysql://u:canary@localhost/db?ssl-mode=preferred",
                "ssl-mode=\"preferred\"",
            ),
            (
                "mysql://u:canary@db.example/db?ssl-mode=DISABLED",
                "insecure=true",
            ),
            ("mysql://u:canary@localhost/db?ssl-ca=/x", "ssl-ca needs"),
            ("mysql://u:canary@localhost/db?socket=", "socket=\"\""),
        ] {
            let message = refusal(url);
            assert!(message.contains(said), "{url}: {message}");
            assert!(!message.contains("canary"), "{message}");
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let options = MysqlOptions::parse("mariadb://u:canary@localhost/db").unwrap();
        let shown = format!("{options:?}");
        assert!(!shown.contains("canary"), "{shown}");
        assert!(shown.contains("localhost:3306/db"), "{shown}");
    }

    #[test]
    fn loopback_needs_no_tls() {
        for url in [
            "mysql://localhost/db",
            "mysql://127.0.0.2:3307/db",
            "mysql://u@[::1]/db",
            "mysql:///db?socket=/run/mysqld/mysqld.sock",
            "mysql://db.example/db?insecure=true",
        ] {
            let options = MysqlOptions::parse(url).unwrap();
            assert!(!options.target.unwrap().is_encrypted(), "{url}");
        }
    }

    #[test]
    fn the_parts_of_a_url_are_decoded() {
        let options = MysqlOptions::parse("mysql://a%40b:c%2Fd%3A%3F@[::1]:99/my%20db").unwrap();
        let target = options.target.unwrap();
        let opts = target.opts();
        assert_eq!(opts.user(), Some("a@b"));
        assert_eq!(opts.pass(), Some("c/d:?"));
        assert_eq!(opts.ip_or_hostname(), "::1");
        assert_eq!(opts.tcp_port(), 99);
        assert_eq!(opts.db_name(), Some("my db"));
    }
}
