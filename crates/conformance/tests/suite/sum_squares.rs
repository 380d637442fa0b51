//! Sum of squares on every CPU path and every device.

use isobit_conformance::{Case, Visitor, fastest, first_difference};
use isobit_kernels::Reference;

#[test]
fn sum_squares() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::sum_squares::visit);
}

/// Three levels, on two threads of the fastest path: the reference alone takes a second.
#[test]
fn third_level() {
    struct Fastest(usize);
    impl Visitor for Fastest {
        fn case<C: Case>(&mut self, case: &C) {
            assert_eq!(first_difference(&case.run(&Reference), &case.run(&fastest())), None);
            self.0 += 1;
        }
    }
    let mut fastest = Fastest(0);
    isobit_conformance::cases::sum_squares::visit_third_level(&mut fastest);
    assert_eq!(fastest.0, 1);
}
