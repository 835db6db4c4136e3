//! What a `postgres://` URL may say.

use std::fmt;
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use super::connect::Target;
use super::sql::Schema;
use super::tls::Tls;
use crate::error::{Error, Result};
use crate::settings;

/// The options that a URL may have, for messages.
const KNOWN: [&str; 9] = [
    "schema",
    "create",
    "listen",
    "insecure",
    "sslmode",
    "sslrootcert",
    "host",
    "application_name",
    "target_session_attrs",
];

/// How to reach the database, and what to use in it.
///
/// ```
/// use fencelock::postgres::PostgresOptions;
/// let options = PostgresOptions::parse("postgres://app:secret@localhost/app?schema=locks")?;
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Clone)]
pub struct PostgresOptions {
    /// `None` where the user's pool is all there is.
    pub(super) target: Option<Target>,
    pub(super) schema: Schema,
    pub(super) create: bool,
    pub(super) listen: Listen,
}

/// Whether to hear of releases by LISTEN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listen {
    /// Where it works: it is tried at the opening.
    Auto,
    /// It has to work.
    Always,
    /// Poll.
    Never,
}

impl PostgresOptions {
    /// The options of a URL as for libpq: `postgres://user:password@host:port/database?option=…`.
    ///
    /// # Errors
    /// `Invalid` for an unknown option or a wrong value; the message shows no password.
    /// `Unsupported` where the URL needs TLS and this build has none.
    pub fn parse(url: &str) -> Result<Self> {
        let rest = url
            .strip_prefix("postgres://")
            .or_else(|| url.strip_prefix("postgresql://"))
            .ok_or_else(|| {
                Error::invalid("not a PostgreSQL URL; expected postgres://user@host:port/database")
            })?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let options = form_urlencoded::parse(query.as_bytes()).into_owned();
        Self::from_parts(rest, options.collect())
    }

    /// The same, of a URL that is taken apart already.
    pub(crate) fn from_parts(rest: &str, options: Vec<(String, String)>) -> Result<Self> {
        // The parser's own error is left out: it may show what stands where a host was expected.
        let mut config: tokio_postgres::Config =
            format!("postgres://{rest}").parse().map_err(|_| {
                Error::invalid("malformed PostgreSQL URL; expected postgres://user:password@host:port/database, with special characters percent-encoded")
            })?;
        let mut schema = Schema::default();
        let (mut create, mut listen, mut insecure) = (true, Listen::Auto, false);
        let (mut sslmode, mut roots) = (None, None);
        config.application_name("fencelock");
        let mut seen: Vec<String> = Vec::new();
        for (key, value) in options {
            if seen.contains(&key) {
                return Err(Error::invalid("store option is given twice").with("option", key));
            }
            match key.as_str() {
                "schema" => schema = Schema::new(&value)?,
                "create" => create = flag(&key, &value)?,
                "listen" => {
                    listen = match value.as_str() {
                        "auto" => Listen::Auto,
                        "true" => Listen::Always,
                        "false" => Listen::Never,
                        _ => return Err(bad_value(&key, &value, "auto, true or false")),
                    }
                }
                "insecure" => insecure = flag(&key, &value)?,
                "sslmode" => sslmode = Some(value),
                "sslrootcert" => roots = Some(value),
                "host" => {
                    config.host(value);
                }
                "application_name" => {
                    config.application_name(value);
                }
                "target_session_attrs" => {
                    config.target_session_attrs(match value.as_str() {
                        "any" => TargetSessionAttrs::Any,
                        "read-write" => TargetSessionAttrs::ReadWrite,
                        _ => return Err(bad_value(&key, &value, "any or read-write")),
                    });
                }
                _ => {
                    return Err(Error::invalid(format!(
                        "unknown store option; postgres: knows ttl, {}",
                        KNOWN.join(", ")
                    ))
                    .with("option", format_args!("{key:?}")));
                }
            }
            seen.push(key);
        }
        if config.get_hosts().is_empty() {
            config.host("localhost");
        }
        if config.get_password().is_none()
            && let Ok(password) = std::env::var("PGPASSWORD")
        {
            config.password(password);
        }
        let tls = choose_tls(&config, sslmode.as_deref(), roots.as_deref(), insecure)?;
        config.ssl_mode(match tls {
            Tls::Off => SslMode::Disable,
            #[cfg(feature = "postgres-tls")]
            Tls::Rustls(_) => SslMode::Require,
        });
        config
            .keepalives_idle(Duration::from_secs(10))
            .keepalives_interval(Duration::from_secs(3))
            .keepalives_retries(3)
            .tcp_user_timeout(Duration::from_secs(15));
        Ok(Self {
            target: Some(Target::new(config, tls)),
            schema,
            create,
            listen,
        })
    }

    /// Options for a pool of the user's, which is how the database is reached then.
    #[must_use]
    pub fn for_pool() -> Self {
        Self {
            target: None,
            schema: Schema::default(),
            create: true,
            listen: Listen::Never,
        }
    }

    /// The schema that holds fencelock's tables; `fencelock` where nothing is said.
    ///
    /// # Errors
    /// `Invalid` where it is not a plain lowercase identifier.
    pub fn schema(mut self, schema: &str) -> Result<Self> {
        self.schema = Schema::new(schema)?;
        Ok(self)
    }

    /// Whether to create the schema where it is missing; true where nothing is said.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }
}

impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("server", &self.target)
            .field("schema", &self.schema.as_str())
            .field("create", &self.create)
            .field("listen", &self.listen)
            .finish()
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
fn choose_tls(
    config: &tokio_postgres::Config,
    sslmode: Option<&str>,
    roots: Option<&str>,
    insecure: bool,
) -> Result<Tls> {
    let local = config.get_hosts().iter().all(is_loopback);
    let wanted = match sslmode {
        None => !local && !insecure,
        Some("require" | "verify-ca" | "verify-full") => true,
        Some("disable") => false,
        Some(other) => {
            return Err(bad_value("sslmode", other, "disable or verify-full"));
        }
    };
    if wanted {
        return Tls::verifying(roots);
    }
    if !local && !insecure {
        return Err(Error::invalid(
            "a connection without TLS would show passwords and holder ids to the network; use sslmode=verify-full, or accept it with insecure=true",
        ));
    }
    if roots.is_some() {
        return Err(Error::invalid("sslrootcert needs sslmode=verify-full"));
    }
    if !local {
        tracing::warn!("the connection to PostgreSQL is not encrypted, as insecure=true asks");
    }
    Ok(Tls::Off)
}

fn is_loopback(host: &Host) -> bool {
    match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => settings::is_loopback(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        PostgresOptions::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong_and_shows_no_password() {
        for (url, said) in [
            ("mysql://x", "not a PostgreSQL URL"),
            ("postgres://u:canary@h:port/db", "malformed PostgreSQL URL"),
            (
                "postgres://u:canary@localhost/db?colour=red",
                "unknown store option",
            ),
            (
                "postgres://u:canary@localhost/db?schema=A",
                "not a schema name",
            ),
            (
                "postgres://u:canary@localhost/db?schema=a&schema=b",
                "given twice",
            ),
            (
                "postgres://u:canary@localhost/db?listen=maybe",
                "listen=\"maybe\"",
            ),
            (
                "postgres://u:canary@localhost/db?sslmode=prefer",
                "sslmode=\"prefer\"",
            ),
            (
                "postgres://u:canary@db.example/db?sslmode=disable",
                "insecure=true",
            ),
            (
                "postgres://u:canary@localhost,db.example/db?sslmode=disable",
                "insecure=true",
            ),
        ] {
            let message = refusal(url);
            assert!(message.contains(said), "{url}: {message}");
            assert!(!message.contains("canary"), "{message}");
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let options = PostgresOptions::parse("postgres://u:canary@localhost/db").unwrap();
        let shown = format!("{options:?}");
        assert!(!shown.contains("canary"), "{shown}");
        assert!(shown.contains("localhost"), "{shown}");
    }

    #[test]
    fn loopback_needs_no_tls() {
        for url in [
            "postgres://localhost/db",
            "postgres://127.0.0.2/db",
            "postgres://[::1]/db",
            "postgres://%2Frun%2Fpostgresql/db",
            "postgres:///db?host=/run/postgresql",
            "postgres://db.example/db?insecure=true",
        ] {
            let options = PostgresOptions::parse(url).unwrap();
            assert!(matches!(options.target.unwrap().tls, Tls::Off), "{url}");
        }
    }

    #[test]
    fn the_default_schema_is_valid() {
        assert_eq!(
            Schema::default(),
            Schema::new(crate::postgres::SCHEMA_DEFAULT).unwrap()
        );
    }
}
