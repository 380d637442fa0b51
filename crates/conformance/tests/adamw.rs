//! AdamW on every CPU path and every device.

#[test]
fn adamw() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::adamw::visit);
}
