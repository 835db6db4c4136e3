//! The command line as clap reads it, once, into plain structs. What a command needs beyond types
//! is checked in [`run_plan`] and [`claim`]; nothing else looks at the arguments again.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use fencelock::lease::{HolderId, LeaseRef, PERMITS_MAX};
use fencelock::{Fence, FencingToken, LockName, Ttl};

use crate::acquire::{Claim, Wait};
use crate::bench::BenchArgs;
use crate::duration::{parse, parse_positive, parse_ttl};
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::run::Plan;
use crate::torture::TortureArgs;

// Lines of at most 76 columns, so that no terminal wraps an example inside its quotes.

const AFTER_HELP: &str = "\
Examples:
  fencelock run nightly-report -- ./report.sh
  fencelock run payment-export -- \\
      sh -c './export | fencelock put payments/today.csv'
  fencelock show payment-export
  fencelock demo
";

const RUN_EXAMPLES: &str = "\
Examples:
  fencelock run nightly-report -- ./report.sh
      runs the report, or exits with 75 where it is running on this host
  fencelock run tick --min-hold 50s --busy-ok -- ./tick.sh
      once a minute, whichever cron job comes first
  fencelock run payment-export --wait 10m --raise payments/today.csv -- \\
      sh -c './export | fencelock put payments/today.csv'
      waits for its turn, shuts out older writers, and publishes with the
      token of this run

The command gets FENCELOCK_NAME, FENCELOCK_TOKEN, FENCELOCK_FENCE and
FENCELOCK_STORE. It is run without a shell, in a process group of its own.
HUP, INT, QUIT, TERM, USR1, USR2, WINCH, TSTP and CONT are passed on to the
group.

If the lock is lost, the group gets TERM, and KILL before the lease can be
granted to another. Processes that leave the group (daemons that call setsid)
are not followed. If fencelock itself is killed or stopped for too long, the
group is killed.

Exit codes:
   75  held by another (--conflict-exit-code, --busy-ok)
   76  the lock was lost while the command ran
  126  the command cannot be executed
  127  the command was not found
  any other is the command's own, or 128 + n if signal n ended it, or one of
  `fencelock --help`
";

const PUT_EXAMPLES: &str = "\
Examples:
  fencelock run payment-export -- \\
      sh -c './export | fencelock put payments/today.csv'
      the token comes from the surrounding run
  fencelock put payments/today.csv --token 34 new.csv
      the token of a lock from elsewhere

The value is replaced as a whole and only where the token is not stale;
otherwise the exit code is 77, both numbers are on standard error, and nothing
was written.
";

const RAISE_EXAMPLES: &str = "\
Examples:
  fencelock run counter -- sh -c '
      n=$(fencelock raise count.txt)
      echo $((n + 1)) | fencelock put count.txt'
      a read-modify-write that loses no update

From the raise on, nobody with an older token can change the value. Where
there is no value yet, nothing is written to standard output, and the exit
code is 0.
";

const REBIND_EXAMPLES: &str = "\
Examples:
  fencelock run new-name -- fencelock rebind payments/today.csv

A bare --token says nothing about its lock, and is refused.
";

const ACQUIRE_EXAMPLES: &str = "\
Examples:
  lease=$(fencelock acquire deploy --ttl 10m --json)
  export FENCELOCK_HOLDER=$(printf %s \"$lease\" | jq -r .holder)
  token=$(printf %s \"$lease\" | jq -r .token)
  fencelock renew deploy --token \"$token\"
  fencelock release deploy --token \"$token\"

Nothing renews the lease: it lapses after its TTL unless `renew` is called.
Whoever knows the holder id and the token can renew and release it; keep the
holder id to yourself. `expires_in` is how long the lease may be believed in:
a little shorter than the TTL, as clocks differ and the answer took a moment.
";

const TORTURE_EXAMPLES: &str = "\
Examples:
  fencelock torture --duration 10s
      on the default store and files
  fencelock torture --store redis://127.0.0.1 --report torture.html
  fencelock torture --own postgres --seed 7
      on a private server, which is paused and killed as well

Everything is done in a place of the run's own, which is taken away at the
end, also where the run is interrupted or killed.

Exit codes:
    0  held: nothing acknowledged was lost with raise, no promise was broken,
       and the arm without fencing lost something under the same faults
    1  a promise was broken
   70  proved nothing: no holder was overtaken, or nothing was lost without
       fencing
";

const BENCH_EXAMPLES: &str = "\
Examples:
  fencelock bench
  fencelock bench --store redis://127.0.0.1 --duration 5s

Nothing is left behind. Absolute figures are the machine's and the moment's;
compare rows of one run.
";

/// The heading of what every command takes.
const COMMON: &str = "Common options";

const ACQUIRE_TTL: &str = "How long the lease lasts without renewal: 100ms to 365days [default: \
                           30s, or what the store's URL says]";

/// Distributed locks whose every grant carries a fencing token, and storage that refuses a stale
/// one.
///
/// A lock cannot stop a holder that was paused past the end of its lease from waking up and writing
/// old data. A fencing token can, where the storage checks it: `fencelock run` gives the token,
/// `fencelock put` checks it. `fencelock demo` shows it in a few seconds.
#[derive(Debug, Parser)]
#[command(
    name = "fencelock",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = AFTER_HELP, after_long_help = format!("{AFTER_HELP}\n{}", exit_codes::HELP))]
pub(crate) struct Cli {
    /// The lock store: file:///dir, /dir, ./dir or sqlite:///file, for the locks of this host;
    /// redis://, postgres://, mysql://, etcd://, nats:// or s3://, for those of many [default:
    /// $XDG_STATE_HOME/fencelock or ~/.local/state/fencelock]
    // The URL may hold a password, so its value is not shown in the help.
    #[arg(long, global = true, value_name = "URL", env = env::STORE, hide_env_values = true)]
    #[arg(help_heading = COMMON)]
    pub(crate) store: Option<String>,

    /// Print JSON, one object a line
    #[arg(long, global = true, help_heading = COMMON)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    #[command(after_help = RUN_EXAMPLES)]
    #[command(override_usage = "fencelock run NAME [OPTIONS] -- CMD [ARGS]…")]
    Run(RunArgs),
    /// Take a lock that stays until it is released or its TTL is over, and print its token
    #[command(after_help = ACQUIRE_EXAMPLES)]
    #[command(override_usage = "fencelock acquire NAME [OPTIONS]")]
    #[command(mut_arg("ttl", |ttl| ttl.help(ACQUIRE_TTL)))]
    Acquire(AcquireArgs),
    /// Extend a lease that `acquire` printed
    Renew(RenewArgs),
    /// Give up a lease that `acquire` printed
    Release(LeaseArgs),
    /// List locks: who holds them, since when, until when
    List {
        /// Only names that begin with this
        #[arg(default_value = "", hide_default_value = true)]
        prefix: String,
    },
    /// Show one lock; a name that was never held is free, and no error
    Show(NameArg),
    /// Print a line whenever a lock changes hands
    Watch(NameArg),
    /// Take a lock away from its holder, whose token is then stale
    Break(NameArg),
    /// Remove the records of locks that nobody used for long; no token is ever given again
    Prune {
        /// Keep records that were used within this time
        #[arg(long, value_name = "DUR", value_parser = parse, allow_hyphen_values = true)]
        idle: Duration,
    },
    /// Write a damaged record anew, or make the next token larger
    Repair {
        #[command(flatten)]
        name: NameArg,
        /// The next token will be larger than this; take the largest that any resource has seen
        #[arg(long, value_name = "N", allow_hyphen_values = true)]
        min_token: FencingToken,
    },
    /// Probe the store, and destinations, for what breaks the promises
    Doctor {
        /// Also probe the storage of this destination; may be repeated
        #[arg(long, value_name = "DEST")]
        dest: Vec<String>,
    },
    /// Replace a value, unless the token is stale
    #[command(after_help = PUT_EXAMPLES)]
    Put {
        #[command(flatten)]
        dest: DestArg,
        /// The new value; standard input where it is missing or -
        file: Option<PathBuf>,
        #[command(flatten)]
        fence: FenceArgs,
    },
    /// Write a value to standard output; exit code 66 where there is none
    Get(DestArg),
    /// Shut out older tokens, and write the present value to standard output
    #[command(after_help = RAISE_EXAMPLES)]
    Raise(WriteArgs),
    /// Remove a value, unless the token is stale; older tokens stay refused
    Delete(WriteArgs),
    /// Bind a resource to another lock, whose token has to be larger than any before
    #[command(after_help = REBIND_EXAMPLES)]
    Rebind(WriteArgs),
    /// See a stale write refused: two processes and a real pause
    Demo(DemoArgs),
    /// Torture a store with real processes and real faults, and check every promise
    #[command(after_help = TORTURE_EXAMPLES)]
    Torture(TortureArgs),
    /// Measure a store: acquire and release, hand-over, fenced reads and writes
    #[command(after_help = BENCH_EXAMPLES)]
    Bench(BenchArgs),
    /// Print the SQL that creates a store's tables, for an administrator who runs it by hand
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    Schema(SchemaArgs),
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write all pages into a directory
    Man {
        /// Write fencelock.1 and a page for each command into this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {
    /// The kind of database
    pub(crate) engine: SchemaEngine,
    /// The schema that the tables are in, or in MySQL what their names begin with [default:
    /// fencelock]; SQLite has none
    #[arg(long, visible_alias = "prefix", value_name = "NAME")]
    pub(crate) schema: Option<String>,
    /// Print instead the trigger that guards this table of yours: NAME, or in PostgreSQL SCHEMA.NAME
    #[arg(long, value_name = "TABLE", requires = "resource")]
    pub(crate) guard: Option<String>,
    /// The resource whose watermark guards the table
    #[arg(long, value_name = "NAME", requires = "guard")]
    pub(crate) resource: Option<String>,
}

/// The databases that have a schema to print.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum SchemaEngine {
    /// MySQL or MariaDB
    #[cfg(feature = "mysql")]
    Mysql,
    /// PostgreSQL
    #[cfg(feature = "postgres")]
    Postgres,
    /// SQLite
    #[cfg(feature = "sqlite")]
    Sqlite,
}

#[derive(Debug, Args)]
pub(crate) struct NameArg {
    /// The lock: 1 to 512 bytes of UTF-8, taken exactly
    #[arg(value_parser = LockName::new)]
    pub(crate) name: LockName,
}

#[derive(Debug, Args)]
pub(crate) struct ClaimArgs {
    /// How long the lease lasts without renewal: 100ms to 365days, or none, where the store sees a
    /// dead process [default: 30s, or what the store's URL says]
    #[arg(long, value_name = "DUR", value_parser = parse_ttl, allow_hyphen_values = true)]
    ttl: Option<Ttl>,

    /// Wait for the lock, for as long as it takes, or for at most this long
    #[arg(long, value_name = "DUR", num_args = 0..=1)]
    wait: Option<Option<String>>,

    /// How many may hold the lock at once; all who use the name have to agree
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        allow_hyphen_values = true
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(PERMITS_MAX)))]
    permits: u32,

    /// What others see as the holder's work
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The lock: 1 to 512 bytes of UTF-8, taken exactly; one that begins with a dash goes after --
    #[arg(required = false)]
    name: Option<OsString>,

    #[command(flatten)]
    claim: ClaimArgs,

    /// Keep the lock for at least this long, even if the command ends earlier
    #[arg(long, value_name = "DUR", value_parser = parse, allow_hyphen_values = true)]
    min_hold: Option<Duration>,

    /// End the command after this long, as if the lock were lost
    #[arg(long, value_name = "DUR", value_parser = parse_positive, allow_hyphen_values = true)]
    max_hold: Option<Duration>,

    /// Before the start, shut out older tokens at this destination; may be repeated
    #[arg(long, value_name = "DEST")]
    raise: Vec<String>,

    /// From TERM to KILL where the lock is lost, as far as the lease allows
    #[arg(long, value_name = "DUR", value_parser = parse, default_value = "5s", allow_hyphen_values = true)]
    kill_after: Duration,

    /// The exit code where somebody else holds the lock, 0 to 255
    #[arg(long, value_name = "N", default_value_t = exit_codes::HELD, allow_hyphen_values = true)]
    conflict_exit_code: u8,

    /// Where somebody else holds the lock, exit with 0 and say nothing
    #[arg(long, conflicts_with = "conflict_exit_code")]
    busy_ok: bool,

    /// The command and its arguments, passed on byte for byte
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct AcquireArgs {
    /// The lock: 1 to 512 bytes of UTF-8, taken exactly
    #[arg(required = false)]
    name: Option<OsString>,

    #[command(flatten)]
    claim: ClaimArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LeaseArgs {
    #[command(flatten)]
    name: NameArg,
    /// The holder id that `acquire` printed; better in the environment, as ps shows arguments
    #[arg(long, value_name = "H", env = env::HOLDER, hide_env_values = true)]
    holder: HolderId,
    /// The token that `acquire` printed
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    token: FencingToken,
}

#[derive(Debug, Args)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    pub(crate) lease: LeaseArgs,
    /// How long it lasts from now on: 100ms to 365days [default: as it was acquired]
    #[arg(long, value_name = "DUR", value_parser = parse_ttl, allow_hyphen_values = true)]
    pub(crate) ttl: Option<Ttl>,
}

#[derive(Debug, Args)]
pub(crate) struct DestArg {
    /// A path, file:///path, s3://bucket/key, or a store URL with ?key=NAME
    pub(crate) dest: String,
}

#[derive(Debug, Args)]
pub(crate) struct FenceArgs {
    /// The token to show [default: that of the surrounding `run`]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) token: Option<FencingToken>,
    /// The fence to show, in its text form
    #[arg(long, value_name = "TEXT", conflicts_with = "token")]
    pub(crate) fence: Option<Fence>,
}

#[derive(Debug, Args)]
pub(crate) struct WriteArgs {
    #[command(flatten)]
    pub(crate) dest: DestArg,
    #[command(flatten)]
    pub(crate) fence: FenceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Write here instead of into a temporary directory; its value is replaced
    #[arg(long)]
    pub(crate) dest: Option<String>,
    /// Play the last step without the token check, and see the data lost; writes a plain file
    #[arg(long)]
    pub(crate) without_fencing: bool,
}

impl LeaseArgs {
    /// The lease that is meant.
    pub(crate) fn lease(&self) -> LeaseRef {
        LeaseRef {
            name: self.name.name.clone(),
            holder: self.holder,
            token: Some(self.token),
        }
    }
}

/// Checks what `run` was given, before anything is done.
pub(crate) fn run_plan(args: RunArgs) -> Result<Plan> {
    const EXPECTED: &str = "expected: fencelock run NAME [OPTIONS] -- CMD [ARGS]…";
    let mut command = args.command.into_iter().peekable();
    let mut claim = args.claim;
    let mut name = args.name;
    if name.is_none() {
        name = name_after_wait(&mut claim)?;
    }
    // `run -- -x CMD`: the name begins with a dash, and a second `--` may set it off. Any other word
    // there is a command whose NAME was forgotten, and its first argument must not be run instead.
    if name.is_none() {
        name = command.next_if(|word| word.as_encoded_bytes().starts_with(b"-"));
        if name.is_some() {
            command.next_if(|word| word == "--");
        }
    }
    let name =
        name.ok_or_else(|| Failure::usage(format!("the lock's NAME is missing; {EXPECTED}")))?;
    let Some(program) = command.next() else {
        return Err(Failure::usage(format!(
            "the command is missing for the lock {:?}; {EXPECTED}",
            name.to_string_lossy()
        )));
    };
    let min_hold = args.min_hold.unwrap_or_default();
    if args.max_hold.is_some_and(|max| max < min_hold) {
        return Err(Failure::usage(
            "--max-hold is shorter than --min-hold; expected a lock that is kept for at least one and at most the other",
        ));
    }
    let mut claim = checked_claim(&name, claim)?;
    if claim.label.is_none() {
        // Never the arguments: those may hold secrets.
        claim.label = std::path::Path::new(&program)
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
    }
    Ok(Plan {
        claim,
        min_hold,
        max_hold: args.max_hold,
        kill_after: args.kill_after,
        raise: args.raise,
        conflict_code: (!args.busy_ok).then_some(args.conflict_exit_code),
        command: program,
        args: command.collect(),
    })
}

/// Checks what `acquire` was given.
pub(crate) fn claim(args: AcquireArgs) -> Result<Claim> {
    let mut claim = args.claim;
    let mut name = args.name;
    if name.is_none() {
        name = name_after_wait(&mut claim)?;
    }
    let name = name.ok_or_else(|| {
        Failure::usage("the lock's NAME is missing; expected: fencelock acquire NAME [OPTIONS]")
    })?;
    let claim = checked_claim(&name, claim)?;
    if claim.ttl == Some(Ttl::NONE) {
        return Err(Failure::usage(
            "--ttl none is for run, whose end is the lease's; a lease that acquire leaves behind would stay for ever; expected 100ms to 365days",
        ));
    }
    Ok(claim)
}

/// A value of `--wait` that clap takes for a flag, as `--wait -5s`.
pub(crate) fn negative_wait(mut args: impl Iterator<Item = OsString>) -> Option<Failure> {
    args.by_ref()
        .take_while(|arg| arg != "--")
        .find(|arg| arg == "--wait")?;
    let value = args.next()?.into_string().ok()?;
    let number = value
        .strip_prefix('-')?
        .starts_with(|c: char| c.is_ascii_digit());
    let error = parse(&value).err().filter(|_| number)?;
    Some(Failure::usage(format!("--wait {error}")))
}

/// `--wait NAME`: the value of `--wait` is optional, so a name after it is read as its value. Where
/// it is no duration and a name is missing, it is the name.
///
/// # Errors
/// Where it looks like a duration and is none, such as one without a unit: a lock of that name is
/// not what was meant.
fn name_after_wait(claim: &mut ClaimArgs) -> Result<Option<OsString>> {
    let Some(Some(text)) = &claim.wait else {
        return Ok(None);
    };
    let Err(error) = parse(text) else {
        return Ok(None);
    };
    if looks_like_a_duration(text) {
        return Err(Failure::usage(format!("--wait {error}")));
    }
    let name = text.into();
    claim.wait = Some(None);
    Ok(Some(name))
}

/// True for what begins with a digit and goes on with digits, points and letters, as `10`, `1.5`
/// and `10sec` do, but `2024-report` does not.
fn looks_like_a_duration(text: &str) -> bool {
    let text = text.trim();
    text.starts_with(|c: char| c.is_ascii_digit())
        && text
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '.' | ',' | ' '))
}

fn checked_claim(name: &OsString, args: ClaimArgs) -> Result<Claim> {
    let name = name
        .to_str()
        .ok_or_else(|| Failure::usage("lock name is not UTF-8"))?;
    let wait = match args.wait {
        None => Wait::No,
        Some(None) => Wait::Forever,
        Some(Some(text)) => {
            Wait::AtMost(parse(&text).map_err(|error| Failure::usage(format!("--wait {error}")))?)
        }
    };
    Ok(Claim {
        name: LockName::new(name)?,
        ttl: args.ttl,
        wait,
        permits: args.permits,
        label: args.label,
    })
}
