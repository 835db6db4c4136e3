//! How does a service refuse a stale client? Its handler shows the fence to its own transaction.
//!
//! A service that keeps balances. Clients that hold the lock of an account send their fence; the
//! layer checks its form, and `admit` judges it in the transaction that changes the balance, so that
//! a request which was let in and then stalled cannot write late.
//!
//! ```sh
//! cargo run --example axum_postgres --features http,postgres -- postgres://postgres@localhost/postgres 127.0.0.1:8080
//! curl -i -X POST -H 'Fencing-Token: 34' -d 10 http://127.0.0.1:8080/accounts/alice   # 10
//! curl -i -X POST -H 'Fencing-Token: 33' -d 10 http://127.0.0.1:8080/accounts/alice   # 412
//! fencelock run alice -- sh -c 'curl -H "Fencing-Token: $FENCELOCK_TOKEN" \
//!     -H "Fencing-Lock: $FENCELOCK_FENCE" -d 10 http://127.0.0.1:8080/accounts/alice'
//! ```

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use fencelock::http::{FencingLayer, Problem, ShownFence, writes_by_path};
use fencelock::postgres::deadpool_postgres::{Config, Pool, PoolError, Runtime};
use fencelock::postgres::tokio_postgres::{self, NoTls};
use fencelock::postgres::{admit, schema_sql};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("name a postgres:// URL")?;
    let address = std::env::args().nth(2).ok_or("name an address")?;
    let listener = tokio::net::TcpListener::bind(address).await?;
    Ok(axum::serve(listener, service(&url).await?).await?)
}

/// The service over the database of `url`.
pub(crate) async fn service(url: &str) -> Result<Router, Box<dyn std::error::Error>> {
    let mut config = Config::new();
    config.url = Some(url.to_owned());
    let pool = config.create_pool(Some(Runtime::Tokio1), NoTls)?;
    let client = pool.get().await?;
    client.batch_execute(&schema_sql("fencelock")?).await?;
    client
        .batch_execute("CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, balance bigint)")
        .await?;
    Ok(Router::new()
        .route("/accounts/{name}", get(balance).post(deposit))
        .layer(FencingLayer::pass(writes_by_path))
        .with_state(pool))
}

/// Adds the number in the body to the balance.
async fn deposit(
    State(pool): State<Pool>,
    Extension(shown): Extension<ShownFence>,
    Path(name): Path<String>,
    body: String,
) -> Result<String, Failure> {
    let Ok(amount) = body.trim().parse::<i64>() else {
        let answer = (StatusCode::BAD_REQUEST, "expected a whole number\n");
        return Err(Failure(answer.into_response()));
    };
    let mut client = pool.get().await?;
    let transaction = client.transaction().await?;
    // Before anything is read: from here to the commit nobody else is admitted, and afterwards
    // nobody older. `applied` is false for the repeat of a request that was committed.
    let written = admit(&transaction, shown.resource(), &shown).await?;
    let sql = "INSERT INTO account AS a VALUES ($1, $2)
        ON CONFLICT (name) DO UPDATE SET balance = a.balance + $2 RETURNING balance";
    let amount = if written.applied { amount } else { 0 };
    let row = transaction.query_one(sql, &[&name, &amount]).await?;
    transaction.commit().await?;
    Ok(format!("{}\n", row.get::<_, i64>(0)))
}

async fn balance(State(pool): State<Pool>, Path(name): Path<String>) -> Result<String, Failure> {
    let sql = "SELECT balance FROM account WHERE name = $1";
    let row = pool.get().await?.query_opt(sql, &[&name]).await?;
    Ok(format!("{}\n", row.map_or(0, |row| row.get::<_, i64>(0))))
}

struct Failure(Response);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        self.0
    }
}

/// A refusal of the fence, in the form that the layer's own refusals have.
impl From<fencelock::Error> for Failure {
    fn from(error: fencelock::Error) -> Self {
        Self(Problem::of(&error).response())
    }
}

/// The database did not do it, or may have: a commit whose answer was lost. The client sends the
/// same headers again, and `applied` tells.
impl From<tokio_postgres::Error> for Failure {
    fn from(_: tokio_postgres::Error) -> Self {
        Self((StatusCode::SERVICE_UNAVAILABLE, "try again\n").into_response())
    }
}

impl From<PoolError> for Failure {
    fn from(_: PoolError) -> Self {
        Self((StatusCode::SERVICE_UNAVAILABLE, "try again\n").into_response())
    }
}
