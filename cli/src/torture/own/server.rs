//! How each engine's server is started, in a directory that is its own.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
#[cfg(any(feature = "mysql", feature = "postgres"))]
use std::process::{Command, Stdio};

#[cfg(any(feature = "mysql", feature = "postgres"))]
use rustix::process::geteuid;

use super::super::janitor::Janitor;
use super::OwnKind;
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// Where servers are that no PATH leads to.
const ELSEWHERE: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/local/bin"];

/// Where Debian has those of PostgreSQL, by version.
#[cfg(feature = "postgres")]
const POSTGRES_VERSIONS: &str = "/usr/lib/postgresql";

/// Whom servers run as where we are root.
#[cfg(feature = "postgres")]
const POSTGRES_USER: &str = "postgres";
#[cfg(feature = "mysql")]
const MYSQL_USER: &str = "mysql";

/// The words that start a server in `dir`; what it needs there is made.
pub(super) fn command(
    kind: OwnKind,
    dir: &Path,
    port: u16,
    janitor: &mut Janitor,
) -> Result<Vec<String>> {
    match kind {
        #[cfg(feature = "redis")]
        OwnKind::Redis => redis(dir, port),
        #[cfg(feature = "postgres")]
        OwnKind::Postgres => postgres(dir, port, janitor),
        #[cfg(feature = "mysql")]
        OwnKind::Mysql => mysql(dir, port, janitor),
        #[cfg(feature = "etcd")]
        OwnKind::Etcd => etcd(dir, port),
        #[cfg(feature = "nats")]
        OwnKind::Nats => nats(dir, port),
    }
}

/// The URL of its locks.
pub(super) fn url(kind: OwnKind, port: u16) -> String {
    match kind {
        #[cfg(feature = "redis")]
        OwnKind::Redis => format!("redis://127.0.0.1:{port}"),
        #[cfg(feature = "postgres")]
        OwnKind::Postgres => format!("postgres://{POSTGRES_USER}@127.0.0.1:{port}/postgres"),
        #[cfg(feature = "mysql")]
        OwnKind::Mysql => format!("mysql://root@127.0.0.1:{port}/test"),
        #[cfg(feature = "etcd")]
        OwnKind::Etcd => format!("etcd://127.0.0.1:{port}"),
        #[cfg(feature = "nats")]
        OwnKind::Nats => format!("nats://127.0.0.1:{port}"),
    }
}

pub(super) fn free_port() -> Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|e| Failure::system("no free port", e))
}

fn program(name: &str, more: &[PathBuf]) -> Result<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(ELSEWHERE.iter().map(PathBuf::from))
        .chain(more.iter().cloned())
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
        .map(|file| file.display().to_string())
        .ok_or_else(|| {
            Failure::new(
                exit_codes::CONFIG,
                format!("{name} is not installed, and --own starts it; give --store URL instead"),
            )
        })
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[cfg(feature = "redis")]
fn redis(dir: &Path, port: u16) -> Result<Vec<String>> {
    let (program, port) = (program("redis-server", &[])?, port.to_string());
    let dir = dir.display().to_string();
    // A kill must not lose what was acknowledged, so each write is synced before its answer.
    Ok(words(&[
        &program,
        "--port",
        &port,
        "--bind",
        "127.0.0.1",
        "--dir",
        &dir,
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
    ]))
}

#[cfg(feature = "postgres")]
fn postgres(dir: &Path, port: u16, janitor: &mut Janitor) -> Result<Vec<String>> {
    let mut versions: Vec<PathBuf> = fs::read_dir(POSTGRES_VERSIONS)
        .map(|dirs| dirs.flatten().map(|dir| dir.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    versions.reverse();
    let data = dir.join("data").display().to_string();
    let (dir, port) = (dir.display().to_string(), port.to_string());
    let as_user = as_user(POSTGRES_USER, &dir, janitor)?;
    let mut initdb = as_user.clone();
    let program_of = |name| program(name, &versions);
    initdb.extend(words(&[
        &program_of("initdb")?,
        "-A",
        "trust",
        "-U",
        POSTGRES_USER,
        "--no-sync",
        "-D",
        &data,
    ]));
    run(&initdb, janitor)?;
    let mut command = as_user;
    command.extend(words(&[
        &program_of("postgres")?,
        "-D",
        &data,
        "-p",
        &port,
        "-c",
        "listen_addresses=127.0.0.1",
        "-c",
        "shared_buffers=16MB",
        "-c",
    ]));
    command.push(format!("unix_socket_directories={dir}"));
    Ok(command)
}

#[cfg(feature = "mysql")]
fn mysql(dir: &Path, port: u16, janitor: &mut Janitor) -> Result<Vec<String>> {
    let install = program("mariadb-install-db", &[])?;
    let server = program("mariadbd", &[])?;
    let (data, test) = (dir.join("data"), dir.join("data/test"));
    let dir = dir.display().to_string();
    // Another user's temporary directory may be closed to it.
    let tmpdir = format!("--tmpdir={dir}");
    let as_user = as_user(MYSQL_USER, &dir, janitor)?;
    let datadir = format!("--datadir={}", data.display());
    let then = |more: &[&str]| [as_user.clone(), words(more)].concat();
    run(
        &then(&[
            &install,
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--innodb-log-file-size=48M",
            &datadir,
            &tmpdir,
        ]),
        janitor,
    )?;
    if !test.exists() {
        run(&then(&["mkdir", &test.display().to_string()]), janitor)?;
    }
    Ok(then(&[
        &server,
        "--no-defaults",
        &datadir,
        &tmpdir,
        &format!("--port={port}"),
        "--bind-address=127.0.0.1",
        &format!("--socket={dir}/socket"),
        &format!("--pid-file={dir}/pid"),
        "--skip-name-resolve",
        "--innodb-log-file-size=48M",
        "--innodb-buffer-pool-size=16M",
        // A kill must not lose what was acknowledged.
        "--innodb-flush-log-at-trx-commit=1",
        "--sync-binlog=1",
    ]))
}

#[cfg(feature = "etcd")]
fn etcd(dir: &Path, port: u16) -> Result<Vec<String>> {
    let program = program("etcd", &[])?;
    let clients = format!("http://127.0.0.1:{port}");
    let peers = format!("http://127.0.0.1:{}", free_port()?);
    let data = dir.join("data").display().to_string();
    // The shortest lease is one and a half election timeouts.
    Ok(words(&[
        &program,
        "--data-dir",
        &data,
        "--listen-client-urls",
        &clients,
        "--advertise-client-urls",
        &clients,
        "--listen-peer-urls",
        &peers,
        "--initial-advertise-peer-urls",
        &peers,
        "--initial-cluster",
        &format!("default={peers}"),
        "--heartbeat-interval",
        "50",
        "--election-timeout",
        "250",
        "--log-level",
        "error",
    ]))
}

#[cfg(feature = "nats")]
fn nats(dir: &Path, port: u16) -> Result<Vec<String>> {
    let program = program("nats-server", &[])?;
    let file = dir.join("nats.conf");
    let store = dir.display().to_string();
    // Without sync_interval an answer can come before its message is on the disk.
    let lines = format!(
        "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: {store:?}, sync_interval: always }}\n"
    );
    fs::write(&file, lines).map_err(|e| Failure::system("the server's configuration", e))?;
    Ok(words(&[&program, "-c", &file.display().to_string()]))
}

/// What goes before a command so that it runs as `user` where we are root, which these servers refuse;
/// the directory is the user's then.
#[cfg(any(feature = "mysql", feature = "postgres"))]
fn as_user(user: &str, dir: &str, janitor: &mut Janitor) -> Result<Vec<String>> {
    if !geteuid().is_root() {
        return Ok(Vec::new());
    }
    run(&words(&["chown", user, dir]), janitor)?;
    Ok(words(&[
        "setpriv",
        "--reuid",
        user,
        "--regid",
        user,
        "--init-groups",
        "--",
    ]))
}

/// Runs a program to its end, with the janitor knowing of it: what outlives us would make anew what
/// was taken away.
#[cfg(any(feature = "mysql", feature = "postgres"))]
fn run(command: &[String], janitor: &mut Janitor) -> Result<()> {
    let mut words = command.iter();
    let program = words.next().map_or("", String::as_str);
    let cannot = |e| Failure::system(program, e);
    let process = Command::new(program)
        .args(words)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    janitor.server(Some(process.id()));
    let output = process.wait_with_output().map_err(cannot)?;
    janitor.server(None);
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::new(
        exit_codes::CONFIG,
        format!("{program} failed: {}", said.trim()),
    ))
}
