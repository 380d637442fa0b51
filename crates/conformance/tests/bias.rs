//! Bias on every CPU path.

#[test]
fn bias() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::bias::visit(&mut paths);
    paths.finish();
}
