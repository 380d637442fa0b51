//! Division, of integers too, and square root in software, as on devices without correctly rounded
//! ones.

use isobit_conformance::{EveryBackend, cases, skip};
use isobit_kernels::gpu::{self, Api, Gpu, Selector};

#[test]
fn software_division() {
    let present = gpu::list(Api::OpenCl).and_then(|listings| match listings.first() {
        None => Err("no device".to_string()),
        Some(listing) => listing.objection.clone().map_or(Ok(()), Err),
    });
    if let Err(why) = present {
        return skip("software division", &[("opencl:0".to_string(), why)]);
    }
    let selector = Selector { api: Api::OpenCl, index: 0 };
    let device = Gpu::open_with_soft_division(selector).unwrap_or_else(|failure| panic!("{failure}"));
    let mut backends = EveryBackend::of(vec![], vec![device]);
    cases::elementary::visit(&mut backends);
    cases::adamw::visit(&mut backends);
    cases::swiglu::visit(&mut backends);
    cases::rms_norm::visit(&mut backends);
    cases::rope::visit(&mut backends);
    cases::columns::visit(&mut backends);
    backends.finish();
}
