//! Load balancing of a router on every CPU path and every device.

#[test]
fn balance() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::balance::visit);
}
