//! Dropout on every CPU path.

#[test]
fn dropout() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::dropout::visit(&mut paths);
    paths.finish();
}
