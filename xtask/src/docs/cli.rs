//! `docs/cli.md`: every command and flag, from the definitions that parse the command line.

use super::{NOTICE, Table, code};
use clap::{Arg, Command};
use std::fmt::Write;

const OPENING: &str = "\
# Commands

Results go to stdout, progress and warnings to stderr. Every command takes `-h, --help`. `isobit
completions` and `isobit man` print the same for a shell and for `man`.
";

pub(super) fn page() -> String {
    let mut program = isobit::command();
    program.build();
    let mut page = format!("{NOTICE}\n{OPENING}\n## Exit codes\n\n");
    let mut codes = Table::new(&["code", "meaning"]);
    for (number, meaning) in isobit::EXIT_CODES {
        codes.row(&[number, meaning]);
    }
    page.push_str(&codes.0);
    for command in program.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
        describe(&mut page, command, "isobit", 2);
    }
    page
}

fn describe(page: &mut String, command: &mut Command, parent: &str, depth: usize) {
    let name = format!("{parent} {}", command.get_name());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let arguments: Vec<&Arg> = command.get_arguments().filter(|argument| is_shown(argument)).collect();
    write!(page, "\n{} `{name}`\n\n{about}.\n\n    {usage}\n", "#".repeat(depth))
        .expect("writing to a string succeeds");
    if !arguments.is_empty() {
        let mut table = Table::new(&["argument", "default", "meaning"]);
        for argument in arguments {
            table.row(&[code(&spelled(argument)), code(&default(argument)), meaning(argument)]);
        }
        write!(page, "\n{}", table.0).expect("writing to a string succeeds");
    }
    for child in command.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
        describe(page, child, &name, depth + 1);
    }
}

fn is_shown(argument: &Arg) -> bool {
    !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
}

/// `-o, --output <FILE>`, as in the help.
fn spelled(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default();
    let values: Vec<String> = values.iter().map(|value| format!("<{value}>")).collect();
    let values = if argument.get_action().takes_values() { values.join(" ") } else { String::new() };
    let several = argument.get_num_args().is_some_and(|count| count.max_values() > 1);
    let values = if several && !values.is_empty() { format!("{values}...") } else { values };
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let flags: Vec<String> = short.into_iter().chain(long).collect();
    [flags.join(", "), values].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// If a default applies only when another argument is absent, the help states it at its end.
fn said_default(help: &str) -> Option<(&str, &str)> {
    help.strip_suffix(']')?.split_once(" [default: ")
}

fn default(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let values = argument.get_default_values().iter().map(|value| value.to_string_lossy());
    let values = values.collect::<Vec<_>>().join(" ");
    let help = help(argument);
    if values.is_empty() { said_default(&help).map_or(values, |(_, said)| said.to_string()) } else { values }
}

fn help(argument: &Arg) -> String {
    argument.get_help().map(ToString::to_string).unwrap_or_default()
}

/// The help, and the values to choose from.
fn meaning(argument: &Arg) -> String {
    let help = help(argument);
    let help = said_default(&help).map_or(help.as_str(), |(rest, _)| rest);
    let values = if argument.get_action().takes_values() { argument.get_possible_values() } else { Vec::new() };
    let values = values.iter().filter(|value| !value.is_hide_set()).map(|value| code(value.get_name()));
    let values = values.collect::<Vec<_>>().join(", ");
    let required = if argument.is_required_set() && !argument.is_positional() { " (required)" } else { "" };
    if values.is_empty() { format!("{help}{required}") } else { format!("{help}{required}: {values}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_spelled_as_in_the_help() {
        let flag = Arg::new("output").short('o').long("output").value_name("FILE").help("Where to [default: run.toml]");
        assert_eq!(spelled(&flag), "-o, --output <FILE>");
        assert_eq!((default(&flag).as_str(), meaning(&flag).as_str()), ("run.toml", "Where to"));
        let switch = Arg::new("json").long("json").action(clap::ArgAction::SetTrue).help("One object");
        assert_eq!((spelled(&switch).as_str(), default(&switch).as_str()), ("--json", ""));
    }

    #[test]
    fn every_command_is_there() {
        let page = page();
        for command in ["isobit train", "isobit data check", "isobit bench step"] {
            assert!(page.contains(&format!(" `{command}`\n")), "{command}");
        }
    }
}
