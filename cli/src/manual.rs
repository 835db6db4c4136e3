//! `fencelock completions` and `fencelock man`, both made from the command line's own description.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

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
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let Some(dir) = dir else {
        io::stdout().write_all(&page(&command)?)?;
        return Ok(exit_codes::OK);
    };
    let cannot = |e: io::Error| {
        Failure::usage(format!(
            "manual pages cannot be written to {}: {e}",
            dir.display()
        ))
    };
    fs::create_dir_all(dir).map_err(cannot)?;
    for command in std::iter::once(&command).chain(command.get_subcommands()) {
        let path = dir.join(Man::new(command.clone()).get_filename());
        fs::write(path, page(command).map_err(cannot)?).map_err(cannot)?;
    }
    Ok(exit_codes::OK)
}

/// One page. What stands after the options is laid out by lines, which must not be filled.
fn page(command: &Command) -> io::Result<Vec<u8>> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let man = Man::new(command.clone())
        .title(name)
        .source(concat!("fencelock ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let after = command
        .get_after_long_help()
        .or_else(|| command.get_after_help());
    if let Some(after) = after {
        page.write_all(sections(&after.to_string()).as_bytes())?;
    }
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

/// Paragraphs that begin with `Examples:` or `Exit codes:` become sections line by line, all others
/// one of notes.
fn sections(text: &str) -> String {
    let mut notes = String::new();
    let mut lines = String::new();
    for paragraph in text.trim_end().split("\n\n") {
        let titled = [
            ("Examples:\n", "EXAMPLES"),
            ("Exit codes:\n", "EXIT STATUS"),
        ]
        .into_iter()
        .find_map(|(head, title)| Some((title, paragraph.strip_prefix(head)?)));
        match titled {
            Some((title, rest)) => {
                lines.push_str(&format!(".SH \"{title}\"\n.nf\n{}\n.fi\n", roff(rest)));
            }
            None => notes.push_str(&format!(".PP\n{}\n", roff(paragraph))),
        }
    }
    if !notes.is_empty() {
        notes.insert_str(0, ".SH NOTES\n");
    }
    notes + &lines
}

/// Text as roff(7) shows it unchanged, quotes and dashes included, so that it can be pasted.
fn roff(text: &str) -> String {
    let text = text.trim_end().replace('\\', "\\e").replace('-', "\\-");
    let text = text.replace('\'', "\\(aq").replace('`', "\\(ga");
    let lines = text.lines().map(|line| match line.strip_prefix('.') {
        Some(_) => format!("\\&{line}"),
        None => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_laid_out_by_lines_and_notes_are_not() {
        let text =
            "Examples:\n  a -- 'b' \\\n.c\n\nNotes of\ntwo lines.\n\nExit codes:\n   0  fine\n";
        assert_eq!(
            sections(text),
            ".SH NOTES\n.PP\nNotes of\ntwo lines.\n\
             .SH \"EXAMPLES\"\n.nf\n  a \\-\\- \\(aqb\\(aq \\e\n\\&.c\n.fi\n\
             .SH \"EXIT STATUS\"\n.nf\n   0  fine\n.fi\n"
        );
    }
}
