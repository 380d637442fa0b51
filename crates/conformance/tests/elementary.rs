//! Elementary functions on every CPU path.

#[test]
fn elementary() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::elementary::visit(&mut paths);
    paths.finish();
}
