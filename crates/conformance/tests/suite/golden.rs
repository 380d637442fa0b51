//! The reference gives the bits it gave when they were last blessed: a new compiler or a careless
//! change shows here.

use isobit_conformance::cases::visit_all;
use isobit_conformance::digests::ReferenceDigests;
use std::collections::BTreeSet;

#[test]
fn golden() {
    let mut digests = ReferenceDigests::default();
    visit_all(&mut digests);
    let names: BTreeSet<&str> = digests.lines.iter().filter_map(|line| Some(line.split_once(' ')?.1)).collect();
    assert_eq!(names.len(), digests.lines.len(), "two cases share a name");
    let golden: Vec<&str> =
        include_str!("../../golden/reference.txt").lines().filter(|line| !line.starts_with('#')).collect();
    for (want, got) in golden.iter().zip(&digests.lines) {
        assert_eq!(want, got, "golden line wanted, reference given; if meant: cargo xtask bless --reason \"…\"");
    }
    assert_eq!(golden.len(), digests.lines.len(), "cases; if meant: cargo xtask bless --reason \"…\"");
}
