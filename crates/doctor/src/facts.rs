//! All that is known of a machine without opening a driver.

use crate::amd::{self, Card};
use crate::nvidia::{self, Nvidia};
use crate::python::{self, Python};
use crate::system;
use crate::tree::Tree;
use isobit_kernels::gpu::hip::access_problem;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

/// Variables that steer AMD's stack and PyTorch on it, or the compiler that Isobit uses.
pub const VARIABLES: [&str; 29] = [
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
    "HSA_ENABLE_SDMA",
    "HSA_ENABLE_PEER_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    "HSA_XNACK",
    "HSA_NO_SCRATCH_RECLAIM",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "PYTORCH_ROCM_ARCH",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "AMD_SERIALIZE_KERNEL",
    "AMD_SERIALIZE_COPY",
    "HIP_LAUNCH_BLOCKING",
    "AMD_LOG_LEVEL",
    "ROCBLAS_TENSILE_LIBPATH",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "HIPRTC_COMPILE_OPTIONS_APPEND",
    "HIPRTC_LINK_OPTIONS_APPEND",
    "AMD_COMGR_DRIVER_OPTIONS_APPEND",
    "AMD_COMGR_CACHE",
    "AMD_COMGR_SAVE_TEMPS",
    "LD_PRELOAD",
];

/// BOUND: characters of a variable that are shown.
const VALUE_MAX: usize = 200;

/// Where facts come from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The root of the machine's files: `/`, or a recorded machine.
    pub root: PathBuf,
    /// Variables of the environment.
    pub variables: BTreeMap<String, String>,
    /// A Python environment, as its folder or its interpreter.
    pub python: Option<PathBuf>,
}

impl Sources {
    /// This machine; `variable` gives the value of an environment variable.
    pub fn here(variable: impl Fn(&str) -> Option<String>, python: Option<PathBuf>) -> Self {
        let set = VARIABLES.into_iter().filter_map(|name| Some((name.to_string(), variable(name)?)));
        Self { root: PathBuf::from("/"), variables: set.collect(), python }
    }
}

/// Why a device file cannot be opened, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AccessProblem {
    pub what: String,
    pub remedy: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Facts {
    pub kernel: Option<String>,
    pub command_line: Vec<String>,
    /// Whether the kernel driver that computing needs is there.
    pub kfd: bool,
    pub cards: Vec<Card>,
    /// PCI addresses of AMD's display devices.
    pub displays: Vec<String>,
    /// Of AMD's cards.
    pub access_problem: Option<AccessProblem>,
    pub amdgpu: Option<String>,
    pub rocm: Option<String>,
    pub nvidia: Option<Nvidia>,
    /// Libraries of OpenCL's drivers.
    pub opencl: Vec<String>,
    pub variables: BTreeMap<String, String>,
    pub python: Option<Python>,
}

/// Why the device files of AMD's cards cannot be used. Without a card nobody misses them.
fn unusable_files(tree: &Tree, cards: &[Card]) -> Option<AccessProblem> {
    if cards.is_empty() {
        return None;
    }
    let devices = tree.path("/dev");
    if !devices.join("kfd").exists() {
        return Some(AccessProblem {
            what: "the driver knows the card, but there is no /dev/kfd: this is a container that was not given it"
                .to_string(),
            remedy: "start the container with `--device=/dev/kfd --device=/dev/dri`".to_string(),
        });
    }
    access_problem(&devices).map(|problem| AccessProblem { what: problem.what, remedy: problem.remedy.to_string() })
}

impl Facts {
    /// Reads everything. An error is one of the Python environment, which a user has named.
    pub fn read(sources: &Sources) -> Result<Self, String> {
        let tree = Tree::new(&sources.root);
        let python = sources.python.as_deref().map(python::python).transpose()?;
        let cards = amd::cards(&tree);
        let short =
            |value: &String| value.chars().take(VALUE_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
        Ok(Self {
            kernel: system::kernel(&tree),
            command_line: system::command_line(&tree),
            kfd: tree.has_folder(amd::TOPOLOGY),
            displays: amd::display_addresses(&tree),
            access_problem: unusable_files(&tree, &cards),
            cards,
            amdgpu: system::amdgpu(&tree),
            rocm: system::rocm(&tree),
            nvidia: nvidia::nvidia(&tree),
            opencl: system::opencl(&tree),
            variables: sources.variables.iter().map(|(name, value)| (name.clone(), short(value))).collect(),
            python,
        })
    }

    /// The same, given up after a while: files of a card that hangs may never answer. None then.
    pub fn read_within(sources: &Sources, limit: Duration) -> Option<Result<Self, String>> {
        let (send, receive) = mpsc::channel();
        let cloned = sources.clone();
        // The thread is left behind if it hangs; it ends with the process.
        let work = move || drop(send.send(Self::read(&cloned)));
        match std::thread::Builder::new().spawn(work) {
            Ok(_) => receive.recv_timeout(limit).ok(),
            // The system has no thread to give.
            Err(_) => Some(Self::read(sources)),
        }
    }
}
