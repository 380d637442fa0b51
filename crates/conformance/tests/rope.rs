//! Rotary embedding on every CPU path and every device.

#[test]
fn rope() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::rope::visit);
}
