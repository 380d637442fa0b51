//! Elementary functions on every CPU path and every device.

#[test]
fn elementary() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::elementary::visit);
}
