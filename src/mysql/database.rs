//! One database: whose connections, which tables, and one request with its limits.

use std::collections::HashMap;
use std::time::Duration;

use mysql_async::prelude::{FromValue, Queryable as _};
use mysql_async::{Conn, Params, Pool, Row};

use super::connect::{Line, Link};
use super::error::{has_failed_cleanly, request_error, value_error};
use super::options::MysqlOptions;
use super::sql::{Argument, Prefix, SCHEMA_VERSION};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Durability;
use crate::settings::stored_realm;
use crate::sql::answer::columns;

/// How long one request may take, with the connection it may need first.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_millis(3_800);

/// How long a request may wait for its answer however long connecting took.
const ANSWER_MIN: Duration = Duration::from_millis(800);

/// How long the making of the tables may take, the wait for other first users included.
const CREATE_LIMIT: Duration = Duration::from_secs(8);
const CREATE_TURN_SECS: u32 = 4;

/// Acquires wait for rows; two connections, so that one of them does not hold up all others.
const ASK_CONNECTIONS: usize = 2;

/// Which connections a request takes: a lock that somebody keeps waiting must not hold up renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Acquires, and what operators ask.
    Ask,
    /// Renewals and releases.
    Upkeep,
}

pub(super) struct Database {
    source: Source,
    pub(super) prefix: Prefix,
    allow_galera: bool,
}

enum Source {
    Own { ask: Link, upkeep: Link },
    Pool(Pool),
}

/// What the opening finds out.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) realm: String,
    pub(super) durability: Durability,
}

/// The settings of a server that decide what it can promise. What one server does not have is not in
/// it.
#[derive(Debug)]
pub(super) struct Settings(HashMap<String, String>);

const SETTINGS: [&str; 13] = [
    "binlog_format",
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "innodb_doublewrite",
    "innodb_flush_log_at_trx_commit",
    "innodb_read_only",
    "log_bin",
    "read_only",
    "super_read_only",
    "sync_binlog",
    "version",
    "version_comment",
    "wsrep_on",
];

impl Settings {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn is_on(&self, name: &str) -> bool {
        matches!(self.get(name), Some("ON" | "1" | "YES"))
    }

    pub(super) fn is_mariadb(&self) -> bool {
        self.get("version").is_some_and(|v| v.contains("MariaDB"))
    }

    pub(super) fn server(&self) -> String {
        let version = self.get("version").unwrap_or("of an unknown version");
        let engine = if self.is_mariadb() {
            "MariaDB"
        } else {
            "MySQL"
        };
        format!("{engine} {version}")
    }

    /// Several nodes that each take writes, and find out about conflicts later.
    pub(super) fn has_several_writers(&self) -> bool {
        self.is_on("wsrep_on")
            || (self
                .get("group_replication_group_name")
                .is_some_and(|group| !group.is_empty())
                && !self.is_on("group_replication_single_primary_mode"))
    }

    pub(super) fn takes_no_writes(&self) -> bool {
        ["read_only", "super_read_only", "innodb_read_only"]
            .into_iter()
            .any(|name| {
                // MariaDB also has NO_LOCK and NO_LOCK_NO_ADMIN.
                self.get(name)
                    .is_some_and(|value| !matches!(value, "OFF" | "0"))
            })
    }

    /// After a crash, a transaction that the binary log does not have is rolled back, although it was
    /// acknowledged.
    pub(super) fn durability(&self) -> Durability {
        match self.get("innodb_flush_log_at_trx_commit") {
            Some("1" | "3") => {
                if self.is_on("log_bin") && self.get("sync_binlog") != Some("1") {
                    Durability::D1ProcessCrash
                } else {
                    Durability::D2PowerLoss
                }
            }
            Some("0") => Durability::D0Memory,
            _ => Durability::D1ProcessCrash,
        }
    }

    /// `SKIP LOCKED` came with these.
    fn is_new_enough(&self) -> bool {
        let version = self.get("version").unwrap_or_default();
        let mut numbers = version
            .split(|c: char| !c.is_ascii_digit())
            .map_while(|part| part.parse::<u32>().ok());
        let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        found >= if self.is_mariadb() { (10, 6) } else { (8, 0) }
    }
}

/// What an error of a request means.
type Explain = fn(mysql_async::Error, &Prefix) -> Error;

/// One statement, and what goes beside it.
enum Request<'a> {
    Text(&'a str),
    Prepared(&'a str, Params),
}

impl Database {
    /// The database of `options`, through `pool` where there is one. Asks nothing yet.
    pub(super) fn new(options: &MysqlOptions, pool: Option<Pool>) -> Result<Self> {
        let source = match (pool, &options.target) {
            (Some(pool), _) => Source::Pool(pool),
            (None, Some(target)) => Source::Own {
                ask: Link::new(target.clone(), ASK_CONNECTIONS),
                upkeep: Link::new(target.clone(), 1),
            },
            (None, None) => {
                return Err(Error::invalid(
                    "no server is named; give a URL, or a pool of your own",
                ));
            }
        };
        Ok(Self {
            source,
            prefix: options.prefix.clone(),
            allow_galera: options.allow_galera,
        })
    }

    /// Checks the server and the tables, and creates them where they are missing and that is wanted.
    pub(super) async fn open(&self, create: bool) -> Result<Meta> {
        let settings = self.settings().await?;
        if !settings.is_new_enough() {
            return Err(Error::unsupported(
                "the server is too old; expected MySQL 8.0 or MariaDB 10.6, or later",
            )
            .with("server", settings.server()));
        }
        if settings.has_several_writers() && !self.allow_galera {
            return Err(Error::unsupported(
                "this server takes writes together with others (Galera, or a group with several primaries), so two of them can grant one lock; use a single primary, or make every client use the same node and say allow_galera=true",
            )
            .with("server", settings.server()));
        }
        let realm = match self.realm().await {
            Err(error) if error.kind() == ErrorKind::Corrupt && create => {
                self.create().await?;
                self.realm().await?
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                return Err(Error::invalid(
                    "fencelock's tables do not exist, and create=false; run the SQL of fencelock's schema first",
                )
                .with("prefix", self.prefix.as_str()));
            }
            other => other?,
        };
        Ok(Meta {
            realm: stored_realm(realm)?,
            durability: settings.durability(),
        })
    }

    pub(super) async fn settings(&self) -> Result<Settings> {
        let sql = format!(
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('{}')",
            SETTINGS.join("','")
        );
        let mut settings = HashMap::new();
        for row in self.query(Lane::Ask, &sql).await? {
            settings.insert(get(&row, 0)?, get(&row, 1)?);
        }
        Ok(Settings(settings))
    }

    async fn realm(&self) -> Result<String> {
        let sql = format!(
            "SELECT version, CONVERT(realm USING utf8mb4) FROM `{}_meta`",
            self.prefix.as_str()
        );
        let row = self.one(Lane::Ask, &sql).await?;
        let version: i32 = get(&row, 0)?;
        if version != SCHEMA_VERSION {
            return Err(Error::unsupported(
                "the tables are of another version of fencelock; update the older of the two, or use another prefix",
            )
            .with("prefix", self.prefix.as_str())
            .with("found", version)
            .with("expected", SCHEMA_VERSION));
        }
        get(&row, 1)
    }

    /// First users that come together make one set of tables, one after the other.
    async fn create(&self) -> Result<()> {
        let mut line = self.line(Lane::Ask).await?;
        let conn = line.conn()?;
        // The connection is cut afterwards, and the turn is over with it.
        match tokio::time::timeout(CREATE_LIMIT, self.create_on(conn)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if is_privilege(&error) => Err(Error::invalid(
                "fencelock's tables do not exist and this user may not create them; GRANT CREATE, CREATE ROUTINE, ALTER ROUTINE ON the database to it, or have an administrator run the SQL of `fencelock schema mysql`",
            )
            .with("prefix", self.prefix.as_str())
            .with_source(error)),
            Ok(Err(error)) => Err(request_error(error, &self.prefix)),
            Err(_) => Err(Error::indeterminate("the tables could not be created in time")
                .with("limit", format_args!("{CREATE_LIMIT:?}"))),
        }
    }

    async fn create_on(&self, conn: &mut Conn) -> mysql_async::Result<()> {
        let turn = format!(
            "SHA1(CONCAT(DATABASE(), ' fencelock {}'))",
            self.prefix.as_str()
        );
        // Without the turn the statements are the same, only that two at once may trip one another.
        conn.query_drop(format!("DO GET_LOCK({turn}, {CREATE_TURN_SECS})"))
            .await?;
        let found = format!("SELECT version FROM `{}_meta`", self.prefix.as_str());
        let done = conn.query_first::<i32, _>(found).await;
        if !matches!(done, Ok(Some(_))) {
            for statement in self.prefix.create_statements() {
                conn.query_drop(statement).await?;
            }
        }
        conn.query_drop(format!("DO RELEASE_LOCK({turn})")).await
    }

    /// Calls a procedure and reads its rows, in one round trip on a connection that is there.
    pub(super) async fn call(
        &self,
        lane: Lane,
        procedure: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<Row>> {
        self.query(lane, &self.prefix.call(procedure, arguments))
            .await
    }

    /// The one row of a procedure that yields one.
    pub(super) async fn call_one(
        &self,
        lane: Lane,
        procedure: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Row> {
        self.one(lane, &self.prefix.call(procedure, arguments))
            .await
    }

    pub(super) async fn one(&self, lane: Lane, sql: &str) -> Result<Row> {
        let mut rows = self.query(lane, sql).await?;
        rows.pop().ok_or_else(no_row)
    }

    pub(super) async fn query(&self, lane: Lane, sql: &str) -> Result<Vec<Row>> {
        self.send(lane, Request::Text(sql), REQUEST_LIMIT).await
    }

    pub(super) async fn query_within(&self, sql: &str, limit: Duration) -> Result<Vec<Row>> {
        self.send(Lane::Ask, Request::Text(sql), limit).await
    }

    /// For large values, which are sent as they are. A connection's first such request asks for the
    /// statement to be prepared: one more round trip.
    pub(super) async fn prepared_within(
        &self,
        sql: &str,
        parameters: Params,
        limit: Duration,
    ) -> Result<Vec<Row>> {
        self.send(Lane::Ask, Request::Prepared(sql, parameters), limit)
            .await
    }

    async fn send(&self, lane: Lane, request: Request<'_>, limit: Duration) -> Result<Vec<Row>> {
        let clock = Clock::system();
        let started = clock.now();
        let mut line = self.line(lane).await?;
        let left = limit
            .saturating_sub(clock.now().since(started))
            .max(ANSWER_MIN);
        let conn = line.conn()?;
        let explain: Explain = match request {
            Request::Text(_) => request_error,
            Request::Prepared(..) => value_error,
        };
        let answering = async {
            match request {
                Request::Text(sql) => conn.query(sql).await,
                Request::Prepared(sql, parameters) => conn.exec(sql, parameters).await,
            }
        };
        match tokio::time::timeout(left, answering).await {
            Ok(Ok(rows)) => {
                line.keep();
                Ok(rows)
            }
            Ok(Err(error)) => {
                // Anything else may have left a transaction open: the connection is cut.
                if has_failed_cleanly(&error) {
                    line.keep();
                } else {
                    self.doubt_connections();
                }
                Err(explain(error, &self.prefix))
            }
            Err(_) => {
                self.doubt_connections();
                Err(Error::indeterminate("MySQL did not answer in time")
                    .with("limit", format_args!("{limit:?}")))
            }
        }
    }

    async fn line(&self, lane: Lane) -> Result<Line> {
        match (&self.source, lane) {
            (Source::Own { ask, .. }, Lane::Ask) => ask.line().await,
            (Source::Own { upkeep, .. }, Lane::Upkeep) => upkeep.line().await,
            (Source::Pool(pool), _) => Line::of(pool).await,
        }
    }

    fn doubt_connections(&self) {
        if let Source::Own { ask, upkeep } = &self.source {
            ask.doubt();
            upkeep.doubt();
        }
    }

    /// Forgets the connections, so that the next ones belong to whichever runtime asks for them.
    pub(super) fn forget_connections(&self) {
        if let Source::Own { ask, upkeep } = &self.source {
            ask.forget();
            upkeep.forget();
        }
    }
}

/// May not create a table or a routine, or may not use the database.
fn is_privilege(error: &mysql_async::Error) -> bool {
    matches!(error, mysql_async::Error::Server(e) if matches!(e.code, 1044 | 1142 | 1227 | 1370 | 1419))
}

pub(super) fn no_row() -> Error {
    Error::corrupt("MySQL's answer has no row; are fencelock's procedures those of this version?")
}

/// A column of an answer. The client's own error is left out, for it shows the value.
pub(super) fn get<T: FromValue>(row: &Row, i: usize) -> Result<T> {
    match row.get_opt(i) {
        Some(Ok(value)) => Ok(value),
        _ => Err(Error::corrupt(
            "MySQL's answer is not of the expected form; are fencelock's procedures those of this version?",
        )
        .with("column", i)),
    }
}

columns!(Row, get);

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
