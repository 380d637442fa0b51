//! The available devices, and their names: `opencl:0`, `cuda:1`, `hip:0`.

use super::{cuda, hip, opencl, opencl_probe};
use std::fmt;
use std::str::FromStr;

/// A device other than the CPU, as named in a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector {
    pub api: Api,
    /// Counted from zero, in the order of `isobit devices`.
    pub index: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Api {
    OpenCl,
    Cuda,
    Hip,
}

impl Api {
    pub const ALL: [Self; 3] = [Self::OpenCl, Self::Cuda, Self::Hip];

    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenCl => "opencl",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.api.name(), self.index)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, index) = text.split_once(':').unwrap_or((text, ""));
        let api = Api::ALL.into_iter().find(|api| api.name() == name);
        let api = api.ok_or_else(|| format!("unknown device `{text}`: auto, cpu, opencl:N, cuda:N and hip:N exist"))?;
        let index = index.parse().map_err(|_| format!("`{text}` lacks a device number: write `{name}:0`"))?;
        Ok(Self { api, index })
    }
}

/// One device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The name used in a configuration.
    pub selector: String,
    pub name: String,
    /// Interface and driver versions.
    pub runtime: String,
    /// Bytes.
    pub memory: u64,
    /// Bytes that no program uses, if the driver says so.
    pub memory_free: Option<u64>,
    /// Compute units or multiprocessors.
    pub units: u32,
    /// Compute capability, if applicable: (9, 0) on Hopper.
    pub architecture: Option<(u32, u32)>,
    /// Why it cannot be used, if so.
    pub objection: Option<String>,
}

/// Devices of one API, or why there are none.
pub fn list(api: Api) -> Result<Vec<Listing>, String> {
    let listings = match api {
        Api::OpenCl => opencl::list(),
        Api::Cuda => cuda::list(),
        Api::Hip => hip::list(),
    };
    crate::float_state::restore();
    listings
}

/// What a driver of the API did to the child process that listed its devices, if it took it down:
/// this process does not load it.
pub fn driver_failure(api: Api) -> Option<String> {
    match api {
        Api::OpenCl => opencl_probe::check().err(),
        Api::Hip => hip::failure(),
        Api::Cuda => None,
    }
}

/// Whether a device is a GPU. OpenCL also offers processors.
pub fn is_gpu(selector: Selector) -> bool {
    let is_gpu = selector.api != Api::OpenCl || opencl::is_gpu(selector.index);
    crate::float_state::restore();
    is_gpu
}

/// The error for a device number that an API does not have.
pub(super) fn no_such(api: &str, index: usize, count: usize) -> String {
    match count {
        0 => format!("{api} has no device"),
        1 => format!("{api} has one device, number 0; there is no number {index}"),
        _ => format!("{api} has {count} devices, numbers 0 to {}; there is no number {index}", count - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_round_trip_and_refuse_nonsense() {
        for text in ["opencl:0", "cuda:12", "hip:1"] {
            assert_eq!(text.parse::<Selector>().map(|selector| selector.to_string()), Ok(text.to_string()));
        }
        for text in
            ["", "opencl", "cuda:", "cuda:-1", "cuda:x", "vulkan:0", "opencl:0:1", "opencl:99999999999999999999"]
        {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
    }
}
