//! Connections of our own: how one is made, what it says on the side, and one that comes back.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio_postgres::config::Host;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, NoTls};
use tokio_util::sync::CancellationToken;

use super::error::{connect_error, startup_parameter_refused};
use super::tls::Tls;
use crate::error::{Error, Result};

/// How long connecting may take. With the request that follows, it stays below what the layers
/// above wait for one request.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// What a connection asks of its session. The timeout is a second belt: each request has its own
/// limit, and the functions' `lock_timeout` is shorter still.
const SESSION_OPTIONS: &str =
    "-c statement_timeout=30s -c default_transaction_isolation=read\\ committed";

/// Where the database is and how to get in. `Debug` shows no password.
#[derive(Clone)]
pub(super) struct Target {
    config: Arc<Config>,
    pub(super) tls: Tls,
    /// Set once the server, a pooler, refused our startup parameters.
    plain_startup: Arc<AtomicBool>,
}

/// Takes the channels of notifications as they come.
pub(super) type OnNotification = Arc<dyn Fn(&str) + Send + Sync>;

/// One connection, and the task that moves its bytes.
pub(super) struct Session {
    pub(super) client: Client,
    /// How often a commit's wait for the standby was cancelled on this connection: whatever was
    /// answered around then is committed here and perhaps nowhere else.
    unreplicated: Arc<AtomicU64>,
    ended: CancellationToken,
    task: AbortHandle,
}

impl Target {
    pub(super) fn new(config: Config, tls: Tls) -> Self {
        Self {
            config: Arc::new(config),
            tls,
            plain_startup: Arc::default(),
        }
    }

    /// Connects, within [`CONNECT_LIMIT`].
    pub(super) async fn connect(&self, on_notification: Option<OnNotification>) -> Result<Session> {
        let connecting = async {
            if !self.plain_startup.load(Ordering::Relaxed) {
                let mut config = Config::clone(&self.config);
                config.options(SESSION_OPTIONS);
                match self.connect_with(&config, on_notification.clone()).await {
                    Err(error) if startup_parameter_refused(&error) => {
                        self.plain_startup.store(true, Ordering::Relaxed);
                    }
                    other => return other,
                }
            }
            self.connect_with(&self.config, on_notification).await
        };
        match tokio::time::timeout(CONNECT_LIMIT, connecting).await {
            Ok(Ok(session)) => Ok(session),
            Ok(Err(error)) => Err(connect_error(error, Some(self))),
            Err(_) => Err(
                Error::unavailable("the PostgreSQL server cannot be reached in time")
                    .with("server", self)
                    .with("limit", format_args!("{CONNECT_LIMIT:?}")),
            ),
        }
    }

    async fn connect_with(
        &self,
        config: &Config,
        on_notification: Option<OnNotification>,
    ) -> Result<Session, tokio_postgres::Error> {
        match &self.tls {
            Tls::Off => {
                let (client, connection) = config.connect(NoTls).await?;
                Ok(Session::spawn(client, connection, on_notification))
            }
            #[cfg(feature = "postgres-tls")]
            Tls::Rustls(tls) => {
                let (client, connection) = config.connect(tls.clone()).await?;
                Ok(Session::spawn(client, connection, on_notification))
            }
        }
    }

    pub(super) fn user(&self) -> &str {
        self.config
            .get_user()
            .unwrap_or("the name of this process's user")
    }

    pub(super) fn database(&self) -> &str {
        self.config.get_dbname().unwrap_or_else(|| self.user())
    }
}

/// The hosts and ports, without user and password.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ports = self.config.get_ports();
        for (i, host) in self.config.get_hosts().iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            match host {
                Host::Tcp(name) => f.write_str(name)?,
                Host::Unix(path) => write!(f, "{}", path.display())?,
            }
            let port = ports.get(i).or(ports.first()).copied().unwrap_or(5432);
            write!(f, ":{port}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}/{}", self.database())
    }
}

impl Session {
    fn spawn<S, T>(
        client: Client,
        mut connection: Connection<S, T>,
        on_notification: Option<OnNotification>,
    ) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let unreplicated = Arc::new(AtomicU64::new(0));
        let ended = CancellationToken::new();
        let (counted, ending) = (Arc::clone(&unreplicated), ended.clone().drop_guard());
        let task = tokio::spawn(async move {
            let _ending = ending;
            let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
            while let Some(message) = messages.next().await {
                match message {
                    Ok(AsyncMessage::Notification(note)) => {
                        if let Some(hear) = &on_notification {
                            hear(note.channel());
                        }
                    }
                    // The text is translated, and its code is that of any warning; the routine is
                    // neither. It comes before the answer that it belongs to.
                    Ok(AsyncMessage::Notice(notice))
                        if notice.routine() == Some("SyncRepWaitForLSN") =>
                    {
                        counted.fetch_add(1, Ordering::SeqCst);
                        tracing::warn!(
                            message = notice.message(),
                            "commit not known to be replicated"
                        );
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::debug!(%error, "connection to PostgreSQL ended");
                        break;
                    }
                }
            }
        });
        Self {
            client,
            unreplicated,
            ended,
            task: task.abort_handle(),
        }
    }

    pub(super) fn unreplicated(&self) -> u64 {
        self.unreplicated.load(Ordering::SeqCst)
    }

    /// Resolves when the connection is gone.
    pub(super) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed() || self.ended.is_cancelled()
    }

    /// Drops the connection without a goodbye, which a silent server would never take.
    pub(super) fn cut(&self) {
        // The task ends a moment later; nobody is to take the connection in between.
        self.ended.cancel();
        self.task.abort();
    }
}

/// A connection that is made when it is needed, shared by all requests, and made anew when it is
/// gone. Requests are pipelined, each a transaction of its own.
pub(super) struct Link {
    target: Target,
    current: Mutex<Option<Arc<Session>>>,
}

impl Link {
    pub(super) fn new(target: Target) -> Self {
        Self {
            target,
            current: Mutex::new(None),
        }
    }

    /// The connection. Who asks while it is being made waits for the same one.
    pub(super) async fn session(&self) -> Result<Arc<Session>> {
        let connecting = async {
            let mut current = self.current.lock().await;
            if let Some(session) = current.as_ref().filter(|session| !session.is_closed()) {
                return Ok(Arc::clone(session));
            }
            *current = None;
            let session = Arc::new(self.target.connect(None).await?);
            *current = Some(Arc::clone(&session));
            Ok(session)
        };
        match tokio::time::timeout(CONNECT_LIMIT, connecting).await {
            Ok(session) => session,
            Err(_) => Err(
                Error::unavailable("the PostgreSQL server cannot be reached in time")
                    .with("server", &self.target)
                    .with("limit", format_args!("{CONNECT_LIMIT:?}")),
            ),
        }
    }

    /// Forgets the connection, so that the next one belongs to whichever runtime asks for it.
    pub(super) async fn forget(&self) {
        *self.current.lock().await = None;
    }
}
