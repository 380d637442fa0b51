//! AdamW on every CPU path.

#[test]
fn adamw() {
    let mut paths = isobit_conformance::CpuPaths::new();
    isobit_conformance::cases::adamw::visit(&mut paths);
    paths.finish();
}
