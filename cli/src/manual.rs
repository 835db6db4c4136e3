//! `fencelock completions` and `fencelock man`, both made from the command line's own description.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// Prints a completion script.
pub(crate) fn completions(shell: Shell) -> Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "fencelock", &mut script);
    io::stdout().write_all(&script)?;
    Ok(exit_codes::OK)
}

/// Prints the manual page, or writes all of them into `dir`.
pub(crate) fn man(dir: Option<&Path>) -> Result<u8> {
    let command = Cli::command();
    let Some(dir) = dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        io::stdout().write_all(&page)?;
        return Ok(exit_codes::OK);
    };
    let cannot = |e: io::Error| {
        Failure::usage(format!(
            "manual pages cannot be written to {}: {e}",
            dir.display()
        ))
    };
    fs::create_dir_all(dir).map_err(cannot)?;
    clap_mangen::generate_to(command, dir).map_err(cannot)?;
    Ok(exit_codes::OK)
}
