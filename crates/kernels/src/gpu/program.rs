//! Device programs: the sources of `crates/kernels/gpu`, assembled, compiled on first use and
//! cached.

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
/// Headers of every portable program, in this order.
const HEADERS: [&str; 5] = [
    include_str!("../../gpu/exact.h"),
    include_str!("../../gpu/elementary.h"),
    include_str!("../../gpu/lanes.h"),
    include_str!("../../gpu/philox.h"),
    include_str!("../../gpu/slices.h"),
];

impl Program {
    /// The whole source for one dialect; programs in a device's native language are self-contained.
    pub(super) fn source(&self, cuda: bool) -> String {
        match self.language {
            Language::Native => self.text.to_string(),
            Language::Portable | Language::Cuda => {
                let mut source = if cuda { CUDA } else { OPENCL }.to_string();
                for part in HEADERS.into_iter().chain([self.text]) {
                    source.push_str(part);
                }
                source
            }
        }
    }
}

/// The parameters that a program is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Build {
    slices: usize,
    /// Widths of keys and values, for programs whose registers depend on them.
    widths: Option<(usize, usize)>,
}

impl From<Profile> for Build {
    fn from(profile: Profile) -> Self {
        Self { slices: profile.slice_count(), widths: None }
    }
}

impl Build {
    pub(super) fn with_widths(profile: Profile, key_width: usize, value_width: usize) -> Self {
        Self { widths: Some((key_width, value_width)), ..Self::from(profile) }
    }

    /// In the compiler's format.
    pub(super) fn options(&self) -> Vec<String> {
        let mut options = vec![format!("-DSLICES={}", self.slices)];
        if let Some((key_width, value_width)) = self.widths {
            options.extend([format!("-DKEY_WIDTH={key_width}"), format!("-DVALUE_WIDTH={value_width}")]);
        }
        options
    }
}
