//! Embedding on every CPU path.

#[test]
fn embedding() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::embedding::visit(&mut paths);
    paths.finish();
}
