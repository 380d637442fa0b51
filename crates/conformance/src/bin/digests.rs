//! Prints a line `digest name` for every case, computed by the reference. `cargo xtask` reads it.
#![expect(clippy::print_stdout, reason = "printing is what it does")]

use isobit_conformance::cases::visit_all;
use isobit_conformance::digests::ReferenceDigests;

fn main() {
    let mut digests = ReferenceDigests::default();
    visit_all(&mut digests);
    for line in digests.lines {
        println!("{line}");
    }
}
