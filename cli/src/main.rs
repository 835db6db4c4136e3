//! `fencelock`: run commands under distributed locks with fencing tokens, and write to storage that
//! refuses a stale one.

mod acquire;
mod bench;
mod cli;
mod demo;
mod duration;
mod env;
mod exit_codes;
mod failure;
mod fenced;
#[cfg(test)]
mod fuzz;
mod lease;
mod manual;
mod output;
mod run;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod schema;
mod show;
mod signals;
mod store;
mod torture;
mod upkeep;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use clap::error::ErrorKind;

use self::cli::{Cli, Command};
use self::failure::{Failure, Result};
use self::fenced::{Shown, Source};
use self::store::StoreUrl;

/// How long work of the runtime that nobody waits for may hold up the end of the process.
const SHUTDOWN: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    let code = match internal() {
        Some(failure) => {
            failure.report();
            failure.code()
        }
        None => command_line().unwrap_or_else(|failure| {
            failure.report();
            failure.code()
        }),
    };
    ExitCode::from(code)
}

/// The steps that fencelock runs as processes of their own; see [`run`] and [`demo`].
fn internal() -> Option<Failure> {
    let mut args = std::env::args_os().skip(1);
    let arg = args.next()?;
    match arg.to_str()? {
        run::launch::ARG => Some(run::launch::main(args)),
        run::warden::ARG => Some(run::warden::main(args)),
        demo::worker::ARG => Some(demo::worker::main(args)),
        torture::client::ARG => Some(torture::client::main(args)),
        torture::janitor::ARG => Some(torture::janitor::main(args)),
        _ => None,
    }
}

fn command_line() -> Result<u8> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // The main thread runs everything: the command's death signal follows the thread that spawned.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("the runtime cannot be started", e))?;
    let result = runtime.block_on(dispatch(cli));
    runtime.shutdown_timeout(SHUTDOWN);
    result
}

async fn dispatch(cli: Cli) -> Result<u8> {
    let json = cli.json;
    let given = cli.store;
    let store = || StoreUrl::resolve(given.as_deref());
    match cli.command {
        Command::Run(args) => {
            // All flags are checked before the default store is created.
            let plan = cli::run_plan(args)?;
            run::run(&plan, &store()?).await
        }
        Command::Acquire(args) => {
            let claim = cli::claim(args)?;
            acquire::acquire(&store()?, &claim, json).await
        }
        Command::Renew(args) => lease::renew(&store()?, &args.lease.lease(), args.ttl, json).await,
        Command::Release(args) => lease::release(&store()?, &args.lease(), json).await,
        Command::List { prefix } => show::list(&store()?, &prefix, json).await,
        Command::Show(arg) => show::show(&store()?, &arg.name, json).await,
        Command::Watch(arg) => show::watch(&store()?, &arg.name, json).await,
        Command::Break(arg) => upkeep::break_lock(&store()?, &arg.name, json).await,
        Command::Prune { idle } => upkeep::prune(&store()?, idle, json).await,
        Command::Repair { name, min_token } => {
            upkeep::repair(&store()?, &name.name, min_token, json).await
        }
        Command::Doctor { dest } => upkeep::doctor(&store()?, &dest, json).await,
        Command::Put { dest, file, fence } => {
            let shown = Shown::resolve(fence.fence, fence.token)?;
            let source = match file {
                Some(path) if path.as_os_str() != "-" => Source::File(path),
                _ => Source::Stdin,
            };
            fenced::put(&dest.dest, &shown, &source, json).await
        }
        Command::Get(arg) => fenced::get(&arg.dest, json).await,
        Command::Raise(args) => {
            let shown = Shown::resolve(args.fence.fence, args.fence.token)?;
            fenced::raise(&args.dest.dest, &shown, json).await
        }
        Command::Delete(args) => {
            let shown = Shown::resolve(args.fence.fence, args.fence.token)?;
            fenced::delete(&args.dest.dest, &shown, json).await
        }
        Command::Rebind(args) => {
            let shown = Shown::resolve(args.fence.fence, args.fence.token)?;
            fenced::rebind(&args.dest.dest, &shown, json).await
        }
        Command::Demo(args) => demo::demo(given.as_deref(), &args, json).await,
        Command::Bench(args) => bench::bench(given.as_deref(), args, json).await,
        Command::Torture(args) => torture::torture(given.as_deref(), args, json).await,
        #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
        Command::Schema(args) => schema::print(&args),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { dir } => manual::man(dir.as_deref()),
    }
}

/// Help and version go to standard output; a mistake to standard error, with our prefix and code.
fn usage(error: &clap::Error) -> Result<u8> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            error.print()?;
            Ok(exit_codes::OK)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Ok(exit_codes::USAGE)
        }
        ErrorKind::UnknownArgument
            if let Some(failure) = cli::negative_wait(std::env::args_os().skip(1)) =>
        {
            Err(failure)
        }
        _ => {
            let text = error.render().to_string();
            let text = text.strip_prefix("error: ").unwrap_or(&text);
            // The usage repeats what was given, and the store may only be in the environment.
            let given = std::env::args_os().any(|arg| arg.to_string_lossy().starts_with("--store"));
            let text = if given {
                text.to_owned()
            } else {
                text.replace(" --store <URL>", "")
            };
            failure::say_block(text.trim_end());
            Ok(exit_codes::USAGE)
        }
    }
}
