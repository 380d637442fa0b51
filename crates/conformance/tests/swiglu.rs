//! SwiGLU on every CPU path.

#[test]
fn swiglu() {
    isobit_conformance::on_every_path(isobit_conformance::cases::swiglu::visit);
}
