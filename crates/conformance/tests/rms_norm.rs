//! RMS norm on every CPU path.

#[test]
fn rms_norm() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::rms_norm::visit(&mut paths);
    paths.finish();
}
