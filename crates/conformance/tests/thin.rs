//! Thin products on every CPU path.

#[test]
fn thin() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::thin::visit(&mut paths);
    paths.finish();
}
