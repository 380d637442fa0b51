//! The router of a mixture of experts on every CPU path and every device.

#[test]
fn router() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::router::visit);
}
