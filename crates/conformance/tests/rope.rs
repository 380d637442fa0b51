//! Rotary embedding on every CPU path.

#[test]
fn rope() {
    isobit_conformance::on_every_path(isobit_conformance::cases::rope::visit);
}
