//! Messages on standard error: notes, warnings, progress. Results go to standard output.

use crate::Failure;
use isobit_training::config;
use isobit_training::prepare::RunError;
use std::io::Write;

/// Prints a line. If standard error is closed, the line is lost.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Prints what arguments overrode in a config. `--device` reaches the config as a key, and is named
/// as it was typed: `device` has the value of the key and the argument.
pub(crate) fn tell_notes(notes: &[String], device: Option<(&str, &str)>) {
    for note in notes {
        let note = device.map_or(note.clone(), |(key, typed)| {
            note.replace(&format!("--set device={key} "), &format!("--device {typed} "))
        });
        tell(&format!("note: {note}"));
    }
}

/// The failure of a config, which names `--device` likewise.
pub(crate) fn config_failure(error: config::Error, device: Option<&str>) -> Failure {
    let mut failure = Failure::from(RunError::Config(error));
    if let Some(device) = device {
        failure.message = failure.message.replace(&format!("--set device={device}: "), &format!("--device {device}: "));
    }
    failure
}
