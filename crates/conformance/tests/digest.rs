//! Digest on every CPU path.

#[test]
fn digest() {
    isobit_conformance::on_every_path(isobit_conformance::cases::digest::visit);
}
