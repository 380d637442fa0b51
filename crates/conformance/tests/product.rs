//! Slice product on every CPU path.

#[test]
fn product() {
    isobit_conformance::on_every_path(isobit_conformance::cases::product::visit);
}
