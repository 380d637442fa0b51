//! The functions of AMD's runtime and what they say about a device. The library's versions differ
//! in one layout, that of the device properties.

use super::super::code_cache::library_files;
use super::super::library::{functions, open};
use super::super::runtime::Answer;
use super::settings;
use super::system;
use super::target::Target;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};

pub(super) type Status = c_int;
pub(super) type Object = *mut c_void;

pub(super) const OUT_OF_MEMORY: Status = 2;
/// Kinds of copies.
pub(super) const TO_DEVICE: c_int = 1;
pub(super) const TO_HOST: c_int = 2;

functions!(Symbols {
    count = c"hipGetDeviceCount" (*mut c_int) -> Status;
    runtime_version = c"hipRuntimeGetVersion" (*mut c_int) -> Status;
    driver_version = c"hipDriverGetVersion" (*mut c_int) -> Status;
    set_device = c"hipSetDevice" (c_int) -> Status;
    device_name = c"hipDeviceGetName" (*mut c_char, c_int, c_int) -> Status;
    attribute = c"hipDeviceGetAttribute" (*mut c_int, c_int, c_int) -> Status;
    memory = c"hipDeviceTotalMem" (*mut usize, c_int) -> Status;
    synchronize = c"hipDeviceSynchronize" () -> Status;
    allocate = c"hipMalloc" (*mut *mut c_void, usize) -> Status;
    free = c"hipFree" (*mut c_void) -> Status;
    copy = c"hipMemcpy" (*mut c_void, *const c_void, usize, c_int) -> Status;
    copy_later = c"hipMemcpyAsync" (*mut c_void, *const c_void, usize, c_int, Object) -> Status;
    lock_pages = c"hipHostRegister" (*mut c_void, usize, u32) -> Status;
    unlock_pages = c"hipHostUnregister" (*mut c_void) -> Status;
    create_event = c"hipEventCreateWithFlags" (*mut Object, u32) -> Status;
    destroy_event = c"hipEventDestroy" (Object) -> Status;
    record_event = c"hipEventRecord" (Object, Object) -> Status;
    wait_for_event = c"hipEventSynchronize" (Object) -> Status;
    fill = c"hipMemsetAsync" (*mut c_void, c_int, usize, Object) -> Status;
    load_module = c"hipModuleLoadData" (*mut Object, *const c_void) -> Status;
    unload_module = c"hipModuleUnload" (Object) -> Status;
    function = c"hipModuleGetFunction" (*mut Object, Object, *const c_char) -> Status;
    launch = c"hipModuleLaunchKernel" (Object, u32, u32, u32, u32, u32, u32, u32, Object, *mut *mut c_void, *mut *mut c_void) -> Status;
    error_name = c"hipGetErrorName" (Status) -> *const c_char;
    error_text = c"hipGetErrorString" (Status) -> *const c_char;
});

/// Fills a description of a device.
type Properties = unsafe extern "system" fn(*mut c_void, c_int) -> Status;

/// More than any machine has.
const DEVICES_MAX: c_int = 1024;

/// More than any version fills.
const PROPERTIES_BYTES: usize = 4096;
const ARCHITECTURE_BYTES: usize = 256;

/// Device attributes; the same numbers since version 5.0.
mod attribute {
    pub(super) const COMPUTE_UNITS: i32 = 63;
    pub(super) const PCI_BUS: i32 = 67;
    pub(super) const PCI_DEVICE: i32 = 68;
    pub(super) const PCI_DOMAIN: i32 = 69;
}

/// Where the loader looks, then AMD's own folder.
const FOLDERS: [&str; 2] = ["", "/opt/rocm/lib/"];

/// By soname, the newest version first wherever it is; then the names of development packages.
fn names() -> impl Iterator<Item = String> {
    let endings = [".7", ".6", ".5", ""];
    endings.into_iter().flat_map(|ending| FOLDERS.map(|folder| format!("{folder}libamdhip64.so{ending}")))
}

/// The runtime library and the name it was found by.
pub(super) fn open_runtime() -> Result<(&'static Library, String), String> {
    let found = names().find_map(|name| Some((open(&[&name])?, name)));
    found.ok_or_else(|| "no HIP runtime found (libamdhip64): install the one of ROCm 5, 6 or 7".to_string())
}

/// The runtime's functions. Opened anew for every device: the library itself stays loaded.
pub(super) struct Functions {
    symbols: Symbols,
    properties: Properties,
    /// Where the name of the architecture stands in the properties.
    architecture_offset: usize,
    library_name: String,
}

impl std::ops::Deref for Functions {
    type Target = Symbols;

    fn deref(&self) -> &Symbols {
        &self.symbols
    }
}

impl Functions {
    pub(super) fn open() -> Result<Self, String> {
        let (library, library_name) = open_runtime()?;
        let symbols = Symbols::load(library)?;
        // Versions 6 and later export the plain name too, with the old layout.
        let known = [(c"hipGetDevicePropertiesR0600", 1160), (c"hipGetDeviceProperties", 396)];
        let found = known.into_iter().find_map(|(name, offset)| {
            // SAFETY: the signature is that of the vendor's header, and the library is never
            // closed.
            let symbol = unsafe { library.get::<Properties>(name) };
            symbol.ok().map(|symbol| (*symbol, offset))
        });
        let (properties, architecture_offset) = found.ok_or("the library has no hipGetDeviceProperties")?;
        Ok(Self { symbols, properties, architecture_offset, library_name })
    }

    pub(super) fn check(&self, what: &str, status: Status) -> Answer<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: for every status the runtime gives constant strings of its own, or null.
        let [name, text] = [self.error_name, self.error_text].map(|ask| unsafe { text(ask(status)) });
        Err(format!("{what} failed: {text} ({name}, {status})"))
    }

    /// Fails with a reason if there is none.
    pub(super) fn device_count(&self) -> Answer<c_int> {
        const NO_DEVICE: [Status; 2] = [100, 101];
        let mut count = 0;
        // SAFETY: `count` has room for the number.
        let status = unsafe { (self.count)(&raw mut count) };
        if status == 0 && count > DEVICES_MAX {
            return Err(format!("the HIP runtime reports {count} devices: it cannot be trusted"));
        }
        if status == 0 && count > 0 {
            return Ok(count);
        }
        if status == 0 || NO_DEVICE.contains(&status) {
            return Err(system::why_no_device(system::DEVICES, &settings::current().hidden_by));
        }
        self.check("hipGetDeviceCount", status)?;
        Ok(count)
    }

    fn attribute(&self, device: c_int, which: i32) -> Answer<usize> {
        let mut value = 0;
        // SAFETY: `value` has room for the number; the runtime refuses attributes that it does not
        // know.
        self.check("hipDeviceGetAttribute", unsafe { (self.attribute)(&raw mut value, which, device) })?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    pub(super) fn compute_units(&self, device: c_int) -> Answer<usize> {
        self.attribute(device, attribute::COMPUTE_UNITS)
    }

    /// Domain, bus and device.
    pub(super) fn pci_address(&self, device: c_int) -> Option<[usize; 3]> {
        let ask = |which| self.attribute(device, which).ok();
        Some([ask(attribute::PCI_DOMAIN)?, ask(attribute::PCI_BUS)?, ask(attribute::PCI_DEVICE)?])
    }

    pub(super) fn total_memory(&self, device: c_int) -> Answer<u64> {
        let mut bytes = 0;
        // SAFETY: `bytes` has room for the number, and the device exists.
        self.check("hipDeviceTotalMem", unsafe { (self.memory)(&raw mut bytes, device) })?;
        Ok(bytes as u64)
    }

    pub(super) fn name(&self, device: c_int) -> String {
        let mut bytes = [0u8; 256];
        // SAFETY: the size is less than that of the array, which ends with a zero.
        let status = unsafe { (self.device_name)(bytes.as_mut_ptr().cast(), 255, device) };
        let text = if status == 0 { CStr::from_bytes_until_nul(&bytes).ok() } else { None };
        // Some boards have an empty name.
        let text = text.map(CStr::to_string_lossy).filter(|text| !text.trim().is_empty());
        text.map_or("AMD GPU".to_string(), |text| text.trim().to_string())
    }

    pub(super) fn target(&self, device: c_int) -> Answer<Target> {
        #[repr(C, align(16))]
        struct Room([u8; PROPERTIES_BYTES]);
        let mut room = Room([0; PROPERTIES_BYTES]);
        // SAFETY: the room is larger than the properties of any version, and aligned for them.
        let status = unsafe { (self.properties)((&raw mut room).cast(), device) };
        self.check("hipGetDeviceProperties", status)?;
        let name = &room.0[self.architecture_offset..][..ARCHITECTURE_BYTES];
        let name = CStr::from_bytes_until_nul(name).map_err(|_| "the name of the architecture has no end")?;
        Target::parse(&name.to_string_lossy())
    }

    /// Zero if the runtime does not say: version 5 does not without a device.
    fn version(ask: unsafe extern "system" fn(*mut c_int) -> Status) -> c_int {
        let mut version = 0;
        // SAFETY: `version` has room for the number.
        let status = unsafe { ask(&raw mut version) };
        if status == 0 { version } else { 0 }
    }

    /// Versions of the runtime and of the driver.
    pub(super) fn versions(&self) -> String {
        let [runtime, driver] = [self.runtime_version, self.driver_version].map(|ask| {
            let version = Self::version(ask);
            format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000)
        });
        format!("HIP {runtime}, driver {driver}")
    }

    /// The major version of ROCm.
    pub(super) fn major(&self) -> i32 {
        Self::version(self.runtime_version) / 10_000_000
    }

    /// Changes whenever the compiler may: versions, and the files of the libraries.
    pub(super) fn compiler_version(&self) -> String {
        let stems = ["libamdhip64", "libhiprtc", "libamd_comgr"];
        format!("{}, {}", self.versions(), library_files(&self.library_name, &stems))
    }
}

/// # Safety
/// Null, or a string that ends with a zero and lives as long as the library.
pub(super) unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "unknown error".to_string();
    }
    // SAFETY: not null, so as promised.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_comes_first_in_any_folder() {
        let names: Vec<String> = names().collect();
        let at = |name: &str| names.iter().position(|found| found == name).expect(name);
        let newest = at("/opt/rocm/lib/libamdhip64.so.7");
        assert!(at("libamdhip64.so.7") < newest && newest < at("libamdhip64.so.5"), "{names:?}");
        assert!(at("/opt/rocm/lib/libamdhip64.so.5") < at("libamdhip64.so"), "{names:?}");
    }
}
