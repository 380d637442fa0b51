//! Residual on every CPU path and every device.

#[test]
fn scale() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::scale::visit);
}
