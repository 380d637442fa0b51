//! Column copies on every CPU path and every device.

#[test]
fn column_copy() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::column_copy::visit);
}
