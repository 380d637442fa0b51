//! Casts on every CPU path.

#[test]
fn cast() {
    isobit_conformance::on_every_path(isobit_conformance::cases::cast::visit);
}
