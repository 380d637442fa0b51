//! Device programs: the sources of `crates/kernels/gpu`, put together, compiled when first used and kept.

use super::runtime::Language;
use isobit_numerics::slices::Profile;

/// One file of device code. Its parameters become macros of the compilation.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    pub(super) language: Language,
}

/// The program in `crates/kernels/gpu/<name>.cl`.
macro_rules! program {
    ($name:literal) => {
        crate::gpu::program::Program {
            name: $name,
            text: include_str!(concat!("../../gpu/", $name, ".cl")),
            language: crate::gpu::runtime::Language::Portable,
        }
    };
}
pub(super) use program;

const OPENCL: &str = include_str!("../../gpu/opencl.h");
const CUDA: &str = include_str!("../../gpu/cuda.h");
/// What every portable program sees, in this order.
const HEADERS: [&str; 5] = [
    include_str!("../../gpu/exact.h"),
    include_str!("../../gpu/elementary.h"),
    include_str!("../../gpu/lanes.h"),
    include_str!("../../gpu/philox.h"),
    include_str!("../../gpu/slices.h"),
];

impl Program {
    /// The whole source for one dialect; programs in a device's own language stand alone.
    pub(super) fn source(&self, cuda: bool) -> String {
        match self.language {
            Language::Native => self.text.to_string(),
            Language::Portable => {
                let mut source = if cuda { CUDA } else { OPENCL }.to_string();
                for part in HEADERS.into_iter().chain([self.text]) {
                    source.push_str(part);
                }
                source
            }
        }
    }
}

/// Every portable program, for audits that compile them all.
pub(super) fn slices_option(profile: Profile) -> String {
    format!("-DSLICES={}", profile.slice_count())
}
