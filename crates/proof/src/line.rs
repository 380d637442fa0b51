//! Lines of append-only logs (`metrics.jsonl`): what two equal runs share of a line, its own
//! checksum, and the digest that covers a line and all before it.

use crate::hash::Hash;

/// Starts the two fields that may differ between equal runs.
const TIMING: &str = ",\"timing\":";
pub const CHECK: &str = ",\"check\":\"";
/// Hexadecimal digits of a line's checksum.
const CHECK_DIGITS: usize = 16;

/// The digest of zero lines.
pub const NO_LINES: Hash = Hash([0; 32]);

/// The checksum of everything before it in its line.
pub fn checksum(before: &str) -> String {
    let mut digits = Hash::of_bytes(before.as_bytes()).to_string();
    digits.truncate(CHECK_DIGITS);
    digits
}

/// The line up to its checksum, and the checksum; None if there is no checksum, as in files of
/// earlier versions.
pub fn checked(line: &str) -> Option<(&str, &str)> {
    let digits = line.strip_suffix("\"}")?;
    let (before, check) = digits.split_at_checked(digits.len().checked_sub(CHECK_DIGITS)?)?;
    Some((before.strip_suffix(CHECK)?, check))
}

/// The part of a line that two equal runs share, without the closing brace.
pub fn shared(line: &str) -> &str {
    let at = line.rfind(TIMING).or_else(|| line.rfind(CHECK));
    at.map_or(line.strip_suffix('}').unwrap_or(line), |at| &line[..at])
}

/// The measurements of a line, between the part that equal runs share and the checksum; empty if
/// there are none.
pub fn timing(line: &str) -> &str {
    let Some((before, _)) = checked(line) else { return "" };
    before.get(shared(line).len()..).and_then(|rest| rest.strip_prefix(TIMING)).unwrap_or("")
}

/// Extends the digest of the previous lines with this one.
pub fn chained(before: Hash, line: &str) -> Hash {
    Hash::of_bytes(&[&before.0, shared(line).as_bytes()].concat())
}
