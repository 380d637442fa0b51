//! Product with 4-bit weights on every CPU path and every device.

#[test]
fn product4() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::product4::visit);
}
