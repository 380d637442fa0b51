//! AdamW on every CPU path.

#[test]
fn adamw() {
    isobit_conformance::on_every_path(isobit_conformance::cases::adamw::visit);
}
