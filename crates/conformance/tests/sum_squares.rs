//! Sum of squares on every CPU path.

#[test]
fn sum_squares() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::sum_squares::visit(&mut paths);
    paths.finish();
}
