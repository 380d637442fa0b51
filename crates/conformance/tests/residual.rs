//! Residual on every CPU path.

#[test]
fn residual() {
    isobit_conformance::on_every_path(isobit_conformance::cases::residual::visit);
}
