//! Column copies on every CPU path and every device.

#[test]
fn columns() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::columns::visit);
}
