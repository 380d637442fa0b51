//! Casts on every CPU path and every device.

#[test]
fn cast() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::cast::visit);
}
