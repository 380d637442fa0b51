//! SwiGLU on every CPU path.

#[test]
fn swiglu() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::swiglu::visit(&mut paths);
    paths.finish();
}
