//! One database: whose connections, which schema, and one request with its limits.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::connect::{Link, Session};
use super::error::{connect_error, request_error};
use super::options::PostgresOptions;
use super::sql::{SCHEMA_VERSION, Schema};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::Durability;
use crate::settings::stored_realm;
use crate::sql::answer::columns;

/// How long one request may take, with the connection it may need first.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_millis(3_800);

/// How long a request may wait for its answer however long connecting took.
const ANSWER_MIN: Duration = Duration::from_millis(800);

/// How long the making of the schema may take, the wait for other first users included.
const CREATE_LIMIT: Duration = Duration::from_secs(5);

/// A parameter with its type, which saves the round trip that asks for the types.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// Which connection a request takes: a lock that somebody keeps waiting must not hold up renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Acquires, and what operators ask.
    Ask,
    /// Renewals and releases.
    Upkeep,
}

pub(super) struct Database {
    source: Source,
    pub(super) schema: Schema,
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

/// One connection in use.
enum Line {
    Own(Arc<Session>),
    Pooled(Box<Object>),
}

impl Database {
    /// The database of `options`, through `pool` where there is one. Asks nothing yet.
    pub(super) fn new(options: &PostgresOptions, pool: Option<Pool>) -> Result<Self> {
        let source = match (pool, &options.target) {
            (Some(pool), _) => Source::Pool(pool),
            (None, Some(target)) => Source::Own {
                ask: Link::new(target.clone()),
                upkeep: Link::new(target.clone()),
            },
            (None, None) => {
                return Err(Error::invalid(
                    "no server is named; give a URL, or a pool of your own",
                ));
            }
        };
        Ok(Self {
            source,
            schema: options.schema.clone(),
        })
    }

    /// Checks the schema, and creates it where it is missing and that is wanted.
    pub(super) async fn open(&self, create: bool) -> Result<Meta> {
        let found = self.meta().await;
        match found {
            Err(error) if error.kind() == ErrorKind::Corrupt && create => {
                self.create().await?;
                self.meta().await
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => Err(Error::invalid(
                "the schema does not exist, and create=false; run the SQL of fencelock's schema first",
            )
            .with("schema", self.schema.as_str())),
            other => other,
        }
    }

    async fn meta(&self) -> Result<Meta> {
        let sql = format!(
            "SELECT version, realm, current_setting('fsync') = 'on', \
             current_setting('synchronous_standby_names') <> '' \
             AND current_setting('synchronous_commit') IN ('on', 'off', 'remote_apply') \
             FROM \"{}\".meta",
            self.schema.as_str()
        );
        let row = self.one(Lane::Ask, &sql, &[]).await?;
        let version: i32 = get(&row, 0)?;
        if version != SCHEMA_VERSION {
            return Err(Error::unsupported(
                "the schema is of another version of fencelock; update the older of the two, or use another schema",
            )
            .with("schema", self.schema.as_str())
            .with("found", version)
            .with("expected", SCHEMA_VERSION));
        }
        let durability = match (get(&row, 2)?, get(&row, 3)?) {
            (false, _) => Durability::D1ProcessCrash,
            (true, false) => Durability::D2PowerLoss,
            // `synchronous_commit=off` is raised to `on` by the functions.
            (true, true) => Durability::D3Failover,
        };
        Ok(Meta {
            realm: stored_realm(get(&row, 1)?)?,
            durability,
        })
    }

    async fn create(&self) -> Result<()> {
        let line = self.line(Lane::Ask).await?;
        let sql = self.schema.create_sql();
        let created = tokio::time::timeout(CREATE_LIMIT, line.client().batch_execute(&sql)).await;
        let error = match created {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                Error::invalid(
                    "the schema does not exist and this user may not create it; GRANT CREATE ON DATABASE to it, or have an administrator run the SQL of `fencelock schema postgres`",
                )
                .with("schema", self.schema.as_str())
                .with_source(error)
            }
            Ok(Err(error)) => request_error(error, self.schema.as_str()),
            Err(_) => Error::indeterminate("the schema could not be created in time")
                .with("limit", format_args!("{CREATE_LIMIT:?}")),
        };
        // The transaction is open and failed; the connection is of no use to the next request.
        line.cut();
        Err(error)
    }

    /// Sends one statement and reads its rows, in one round trip on a connection that is there.
    pub(super) async fn query(
        &self,
        lane: Lane,
        sql: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<Row>> {
        self.query_within(lane, sql, parameters, REQUEST_LIMIT)
            .await
    }

    pub(super) async fn query_within(
        &self,
        lane: Lane,
        sql: &str,
        parameters: &[Parameter<'_>],
        limit: Duration,
    ) -> Result<Vec<Row>> {
        let clock = Clock::system();
        let started = clock.now();
        let line = self.line(lane).await?;
        let left = limit
            .saturating_sub(clock.now().since(started))
            .max(ANSWER_MIN);
        let before = line.unreplicated();
        let answer = tokio::time::timeout(left, line.client().query_typed(sql, parameters)).await;
        match answer {
            Ok(_) if line.unreplicated() != before => Err(Error::indeterminate(
                "the commit's wait for the standby was cancelled; a fail-over may undo it",
            )),
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err(error)) => Err(request_error(error, self.schema.as_str())),
            Err(_) => {
                line.cut();
                Err(Error::indeterminate("PostgreSQL did not answer in time")
                    .with("limit", format_args!("{limit:?}")))
            }
        }
    }

    /// The one row of a statement that yields one.
    pub(super) async fn one(
        &self,
        lane: Lane,
        sql: &str,
        parameters: &[Parameter<'_>],
    ) -> Result<Row> {
        let mut rows = self.query(lane, sql, parameters).await?;
        rows.pop().ok_or_else(no_row)
    }

    async fn line(&self, lane: Lane) -> Result<Line> {
        match &self.source {
            Source::Own { ask, upkeep } => {
                let link = match lane {
                    Lane::Ask => ask,
                    Lane::Upkeep => upkeep,
                };
                Ok(Line::Own(link.session().await?))
            }
            Source::Pool(pool) => {
                let limit = super::connect::CONNECT_LIMIT;
                match tokio::time::timeout(limit, pool.get()).await {
                    Ok(Ok(object)) => Ok(Line::Pooled(Box::new(object))),
                    Ok(Err(error)) => Err(pool_error(error)),
                    Err(_) => Err(Error::unavailable(
                        "the pool gave no connection in time; its connections are all in use, or the server cannot be reached",
                    )
                    .with("limit", format_args!("{limit:?}"))),
                }
            }
        }
    }

    /// Forgets the connections, so that the next ones belong to whichever runtime asks for them.
    pub(super) async fn forget_connections(&self) {
        if let Source::Own { ask, upkeep } = &self.source {
            ask.forget().await;
            upkeep.forget().await;
        }
    }
}

impl Line {
    fn client(&self) -> &Client {
        match self {
            Self::Own(session) => &session.client,
            Self::Pooled(object) => object,
        }
    }

    /// A pool's connections keep their notices to themselves.
    fn unreplicated(&self) -> u64 {
        match self {
            Self::Own(session) => session.unreplicated(),
            Self::Pooled(_) => 0,
        }
    }

    /// Gives up the connection: nobody else gets it.
    fn cut(self) {
        match self {
            Self::Own(session) => session.cut(),
            Self::Pooled(object) => drop(Object::take(*object)),
        }
    }
}

fn pool_error(error: PoolError) -> Error {
    match error {
        PoolError::Backend(error) => connect_error(error, None),
        other => Error::unavailable("the pool gave no connection").with_source(other),
    }
}

fn no_row() -> Error {
    Error::corrupt(
        "PostgreSQL's answer has no row; are fencelock's functions those of this version?",
    )
}

/// A column of an answer.
pub(super) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, i: usize) -> Result<T> {
    row.try_get(i).map_err(|error| {
        Error::corrupt("PostgreSQL's answer is not of the expected form; are fencelock's functions those of this version?")
            .with_source(error)
    })
}

columns!(Row, get);

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
