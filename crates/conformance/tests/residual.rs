//! Residual on every CPU path.

#[test]
fn residual() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::residual::visit(&mut paths);
    paths.finish();
}
