//! Residual on every CPU path and every device.

#[test]
fn residual() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::residual::visit);
}
