//! Memory of an NVIDIA card that no program uses. NVML, the library behind `nvidia-smi`, knows it
//! without a context, which would take half a second and half a gigabyte of that memory.

use crate::gpu::library::{functions, open};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

functions!(Nvml {
    init = c"nvmlInit_v2" () -> c_int;
    device = c"nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut *mut c_void) -> c_int;
    memory = c"nvmlDeviceGetMemoryInfo" (*mut c_void, *mut Memory) -> c_int;
});

/// `nvmlMemory_t`, in bytes. What the driver keeps for itself counts as used.
#[repr(C)]
#[derive(Default)]
pub(super) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// None if the library is missing or does not know the card.
pub(super) fn of(bus_address: &CStr) -> Option<u64> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let nvml = NVML.get_or_init(opened).as_ref()?;
    let (mut device, mut memory) = (null_mut(), Memory::default());
    // SAFETY: the library is initialised, the text ends with a zero, and `device` has room for the
    // handle.
    if unsafe { (nvml.device)(bus_address.as_ptr(), &raw mut device) } != 0 {
        return None;
    }
    // SAFETY: the handle is of the call before, and `memory` has room for the three numbers.
    (unsafe { (nvml.memory)(device, &raw mut memory) } == 0).then_some(memory.free)
}

fn opened() -> Option<Nvml> {
    let nvml = Nvml::load(open(&["libnvidia-ml.so.1", "nvml.dll"])?).ok()?;
    // SAFETY: the call takes nothing and may be repeated.
    (unsafe { (nvml.init)() } == 0).then_some(nvml)
}
