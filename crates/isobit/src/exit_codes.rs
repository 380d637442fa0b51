//! Every exit code of the program, for `--help`, the manual page and `docs/cli.md`.

/// Exit codes and their meanings, as printed.
pub const EXIT_CODES: [(&str, &str); 12] = [
    ("0", "ok"),
    ("1", "a difference found"),
    ("2", "usage or config"),
    ("3", "data"),
    ("4", "does not fit"),
    ("5", "non-finite numbers"),
    ("6", "device"),
    ("7", "disk or I/O"),
    ("8", "damaged or malformed file"),
    ("9", "stopped at once by a second signal"),
    ("129, 130, 143", "stopped by SIGHUP, Ctrl-C or SIGTERM after a clean save"),
    ("141", "closed pipe"),
];

/// The end of `--help` and of the manual page.
pub(crate) fn sentence() -> String {
    let codes = EXIT_CODES.map(|(code, meaning)| format!("{code} {meaning}"));
    format!("Exit codes: {}.", codes.join(", "))
}
