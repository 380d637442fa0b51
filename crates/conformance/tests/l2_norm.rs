//! L2 norm on every CPU path and every device.

#[test]
fn l2_norm() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::l2_norm::visit);
}
