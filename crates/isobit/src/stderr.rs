//! Messages on standard error: notes, warnings, progress. Results go to standard output.

use std::io::Write;

/// Prints a line. If standard error is closed, the line is lost.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
