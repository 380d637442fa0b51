//! Talk on standard error: notes, warnings, progress. Results go to standard output.

use std::io::Write;

/// A line. Where standard error is closed there is nobody to tell.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
