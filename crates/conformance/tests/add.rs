//! Residual on every CPU path and every device.

#[test]
fn add() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::add::visit);
}
