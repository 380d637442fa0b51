//! SwiGLU on every CPU path and every device.

#[test]
fn swiglu() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::swiglu::visit);
}
