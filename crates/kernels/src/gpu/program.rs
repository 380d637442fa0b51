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

/// The text of files of `crates/kernels/gpu`. Each comes after a directive with its name, so that
/// compilers name file and line in their messages.
macro_rules! files {
    ($($name:expr),+) => {
        concat!($("#line 1 \"", $name, "\"\n", include_str!(concat!("../../gpu/", $name))),+)
    };
}
pub(super) use files;

/// A line of a program's source, by the file and number that its compiler gives.
pub fn source_line<'a>(source: &'a str, file: &str, line: usize) -> Option<&'a str> {
    let (directive, start) = ("#line 1 \"", format!("#line 1 \"{file}\""));
    let lines = source.lines().skip_while(|line| *line != start).skip(1);
    lines.take_while(|line| !line.starts_with(directive)).nth(line.checked_sub(1)?)
}

/// The program in `crates/kernels/gpu/<name>.cl`.
macro_rules! program {
    ($name:literal) => {
        crate::gpu::program::Program {
            name: $name,
            text: crate::gpu::program::files!(concat!($name, ".cl")),
            language: crate::gpu::runtime::Language::Portable,
        }
    };
}
pub(super) use program;

const OPENCL: &str = files!("opencl.h");
const CUDA: &str = files!("cuda.h");

/// Headers of every portable program, in this order.
macro_rules! headers {
    ($($name:literal),+) => {
        const HEADERS: &str = files!($($name),+);
        /// Their names, in the order in which every portable program has them, after its dialect.
        pub const HEADER_NAMES: &[&str] = &[$($name),+];
    };
}
headers!("exact.h", "elementary.h", "lanes.h", "philox.h", "slices.h");

impl Program {
    /// The whole source for one dialect; programs in a device's native language are self-contained.
    pub(super) fn source(&self, cuda: bool) -> String {
        match self.language {
            Language::Native => self.text.to_string(),
            Language::Portable | Language::Cuda => [if cuda { CUDA } else { OPENCL }, HEADERS, self.text].concat(),
        }
    }
}

/// The parameters that a program is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Build {
    slices: usize,
    /// Widths of keys and values, for programs whose registers depend on them.
    widths: Option<(usize, usize)>,
    /// Whether attention scores are soft-capped.
    capped: bool,
}

impl From<Profile> for Build {
    fn from(profile: Profile) -> Self {
        Self { slices: profile.slice_count(), widths: None, capped: false }
    }
}

impl Build {
    pub(super) fn with_widths(profile: Profile, key_width: usize, value_width: usize) -> Self {
        Self { widths: Some((key_width, value_width)), ..Self::from(profile) }
    }

    pub(super) fn with_cap(profile: Profile, capped: bool) -> Self {
        Self { capped, ..Self::from(profile) }
    }

    /// In the compiler's format.
    pub(super) fn options(&self) -> Vec<String> {
        let mut options = vec![format!("-DSLICES={}", self.slices)];
        if let Some((key_width, value_width)) = self.widths {
            options.extend([format!("-DKEY_WIDTH={key_width}"), format!("-DVALUE_WIDTH={value_width}")]);
        }
        if self.capped {
            options.push("-DCAPPED=1".to_string());
        }
        options
    }
}
