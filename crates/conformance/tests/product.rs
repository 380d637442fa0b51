//! Slice product on every CPU path and every device.

#[test]
fn product() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::product::visit);
}
