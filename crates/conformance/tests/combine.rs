//! Combine and gather on every CPU path and every device.

#[test]
fn combine() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::combine::visit);
}
