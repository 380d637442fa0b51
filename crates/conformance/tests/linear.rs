//! Residual on every CPU path and every device.

#[test]
fn linear() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::linear::visit);
}
