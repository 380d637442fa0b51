//! What the system says about AMD devices besides their runtime: the kernel driver's list and the
//! permissions on the device files.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;

use super::target::architecture_of_version;

/// The kernel driver's devices.
pub(super) const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";
/// Every device on the bus, by its address.
pub(super) const PCI: &str = "/sys/bus/pci/devices";
/// Device files.
pub(super) const DEVICES: &str = "/dev";

/// The architecture of the device with a PCI address (domain, bus, device), whatever the runtime
/// was told to believe. None if the driver has no such device.
pub(super) fn architecture(nodes: impl AsRef<Path>, address: [usize; 3]) -> Option<String> {
    let nodes = fs::read_dir(nodes).ok()?.filter_map(Result::ok);
    nodes.filter_map(|node| fs::read_to_string(node.path().join("properties")).ok()).find_map(|text| {
        let property = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|value| value.trim().parse::<usize>().ok())
        };
        let (domain, location) = (property("domain").unwrap_or(0), property("location_id")?);
        let here = [domain, location >> 8 & 0xff, location >> 3 & 0x1f] == address;
        let version = property("gfx_target_version").filter(|version| here && *version > 0)?;
        architecture_of_version(&format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    })
}

/// Bytes of the memory of the device with a PCI address (domain, bus, device) that no program uses,
/// as the kernel driver counts them.
pub(super) fn free_memory(devices: impl AsRef<Path>, address: [usize; 3]) -> Option<u64> {
    let [domain, bus, device] = address;
    let folder = devices.as_ref().join(format!("{domain:04x}:{bus:02x}:{device:02x}.0"));
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    number("mem_info_vram_total")?.checked_sub(number("mem_info_vram_used")?)
}

/// Why the runtime shows no device, and what to do.
pub(super) fn why_no_device(devices: impl AsRef<Path>, hidden_by: &[String]) -> String {
    if let Some(problem) = access_problem(devices.as_ref()) {
        return problem.to_string();
    }
    match hidden_by {
        [] => "this HIP runtime finds no AMD device".to_string(),
        hidden => format!("no AMD device is visible: unset {}, or correct it", hidden.join(" and ")),
    }
}

/// Why a device file cannot be used, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessProblem {
    pub what: String,
    pub remedy: &'static str,
}

impl fmt::Display for AccessProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what, self.remedy)
    }
}

/// Why the device files in a folder (`/dev`) cannot be used, if so.
pub fn access_problem(devices: &Path) -> Option<AccessProblem> {
    let driver = devices.join("kfd");
    let render = fs::read_dir(devices.join("dri")).into_iter().flatten().filter_map(Result::ok);
    let render = render
        .map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("renderD")));
    let mut files = vec![driver];
    files.extend(render);
    files.iter().find_map(|file| problem_of(file, &open(file).err()?))
}

fn open(file: &Path) -> std::io::Result<fs::File> {
    OpenOptions::new().read(true).write(true).open(file)
}

fn problem_of(file: &Path, error: &std::io::Error) -> Option<AccessProblem> {
    let name = file.display();
    match error.kind() {
        ErrorKind::NotFound => Some(AccessProblem {
            what: format!("no AMD device: there is no {name}"),
            remedy: "load the amdgpu driver, and start a container with `--device=/dev/kfd --device=/dev/dri`",
        }),
        ErrorKind::PermissionDenied => Some(AccessProblem {
            what: format!("no permission on {name}"),
            remedy: "add yourself to the group `render` (on older systems `video`) and log in again; start a \
                     container with `--group-add` and the host's number of that group",
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A folder of this test alone, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("isobit-hip-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }

        fn put(&self, name: &str, text: &str) {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_kernel_driver_knows_what_a_card_is() {
        let nodes = Folder::new("nodes");
        nodes.put("0/properties", "cpu_cores_count 16\ngfx_target_version 0\nlocation_id 0\ndomain 0\n");
        nodes.put("1/properties", "simd_count 240\ngfx_target_version 90006\nlocation_id 2304\ndomain 0\n");
        nodes.put("2/properties", "simd_count 416\ngfx_target_version 90010\nlocation_id 2304\ndomain 1\n");
        assert_eq!(architecture(&nodes.0, [0, 9, 0]).as_deref(), Some("gfx906"));
        assert_eq!(architecture(&nodes.0, [1, 9, 0]).as_deref(), Some("gfx90a"));
        assert_eq!(architecture(&nodes.0, [0, 0, 0]), None, "a processor");
        assert_eq!(architecture(nodes.0.join("nowhere"), [0, 9, 0]), None);
    }

    #[test]
    fn the_kernel_driver_knows_what_is_free() {
        let devices = Folder::new("pci");
        devices.put("0000:83:1f.0/mem_info_vram_total", "17163091968\n");
        devices.put("0000:83:1f.0/mem_info_vram_used", "1073741824\n");
        assert_eq!(free_memory(&devices.0, [0, 0x83, 0x1f]), Some(17_163_091_968 - (1 << 30)));
        devices.put("0000:83:1f.0/mem_info_vram_used", "99999999999\n");
        assert_eq!(free_memory(&devices.0, [0, 0x83, 0x1f]), None, "more than there is");
        devices.put("0000:83:1f.0/mem_info_vram_used", "much\n");
        assert_eq!(free_memory(&devices.0, [0, 0x83, 0x1f]), None);
        assert_eq!(free_memory(&devices.0, [0, 1, 0]), None);
    }

    #[test]
    fn a_missing_device_has_a_reason() {
        let devices = Folder::new("devices");
        let reason = |hidden: &[String]| why_no_device(&devices.0, hidden);
        assert!(reason(&[]).contains("there is no") && reason(&[]).contains("amdgpu"), "{}", reason(&[]));
        devices.put("kfd", "");
        devices.put("dri/renderD128", "");
        assert!(reason(&[]).contains("this HIP runtime finds no AMD device"), "{}", reason(&[]));
        let hidden = ["HIP_VISIBLE_DEVICES=".to_string()];
        assert!(reason(&hidden).contains("unset HIP_VISIBLE_DEVICES="), "{}", reason(&hidden));
    }

    #[test]
    fn a_missing_permission_names_the_group() {
        let denied = problem_of(Path::new("/dev/kfd"), &ErrorKind::PermissionDenied.into()).expect("a problem");
        assert!(denied.what.contains("/dev/kfd") && denied.remedy.contains("`render`"), "{denied}");
        assert_eq!(problem_of(Path::new("/dev/kfd"), &ErrorKind::Interrupted.into()), None);
    }
}
