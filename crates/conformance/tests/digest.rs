//! Digest on every CPU path and every device.

#[test]
fn digest() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::digest::visit);
}
