//! Division and square root in software, as on devices without correctly rounded ones. Its own harness, so that a skip
//! is seen and counted, never a silent pass.
#![expect(clippy::print_stdout, reason = "a report")]

use isobit_conformance::{EveryBackend, cases};
use isobit_kernels::gpu::{self, Api, Gpu, Selector};

fn main() {
    let present = gpu::list(Api::OpenCl).and_then(|listings| match listings.first() {
        None => Err("no device".to_string()),
        Some(listing) => listing.objection.clone().map_or(Ok(()), Err),
    });
    if let Err(why) = present {
        println!("software division ... skipped: opencl:0: {why}\n0 passed, 0 failed, 1 skipped");
        return;
    }
    let selector = Selector { api: Api::OpenCl, index: 0 };
    let device = Gpu::open_with_soft_division(selector).unwrap_or_else(|failure| panic!("{failure}"));
    let mut backends = EveryBackend::of(vec![], vec![device]);
    cases::elementary::visit(&mut backends);
    cases::adamw::visit(&mut backends);
    cases::swiglu::visit(&mut backends);
    let compared = backends.compared;
    backends.finish();
    println!("software division ... {compared} comparisons on opencl:0\n1 passed, 0 failed, 0 skipped");
}
