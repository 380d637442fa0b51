//! Casts on every CPU path.

#[test]
fn cast() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::cast::visit(&mut paths);
    paths.finish();
}
