//! Sigmoid gates on every CPU path and every device.

#[test]
fn gate() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::gate::visit);
}
