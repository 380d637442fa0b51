//! Slice product on every CPU path.

#[test]
fn product() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::product::visit(&mut paths);
    paths.finish();
}
