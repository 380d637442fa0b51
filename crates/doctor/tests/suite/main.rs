//! The doctor on machines that are described by files: what it reports, which rules apply, and that
//! no file makes it fail.

mod hostile;
mod machine;
mod python;
mod rules;
mod snapshots;
