//! Elementary functions on every CPU path.

#[test]
fn elementary() {
    isobit_conformance::on_every_path(isobit_conformance::cases::elementary::visit);
}
