//! Digest on every CPU path.

#[test]
fn digest() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::digest::visit(&mut paths);
    paths.finish();
}
