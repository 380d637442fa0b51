//! Rotary embedding on every CPU path.

#[test]
fn rope() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::rope::visit(&mut paths);
    paths.finish();
}
