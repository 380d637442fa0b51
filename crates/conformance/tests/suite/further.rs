//! Cases without golden digests: shapes that only the kernels of some devices tell apart.

#[test]
fn further_cases() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::visit_further);
}
