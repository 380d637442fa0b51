//! How much memory a run may take on this machine: the least of what the system can give a new
//! process without swapping, what is left in its control group (a container or a batch job) and
//! what is left of `ulimit -v`. Only plans use it; no result depends on it.

use std::path::{Path, PathBuf};

/// An amount and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    pub bytes: u64,
    pub of: &'static str,
}

/// None if the system does not report it.
pub fn free_memory() -> Option<FreeMemory> {
    free_memory_beside(0)
}

/// The same for a process that takes `mapped` bytes of address space without using as much memory:
/// files that it maps, and stacks. Only `ulimit -v` counts them.
pub fn free_memory_beside(mapped: u64) -> Option<FreeMemory> {
    let free = |of| move |bytes| FreeMemory { bytes, of };
    let all = [
        available(&text("/proc/meminfo")).map(free("available memory of the system")),
        group(Path::new("/sys/fs/cgroup"), &text("/proc/self/cgroup")).map(free("limit of the control group")),
        address_space().map(|bytes| bytes.saturating_sub(mapped)).map(free("`ulimit -v`")),
    ];
    all.into_iter().flatten().min_by_key(|free| free.bytes)
}

fn text(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The number after `name` in lines of names and numbers.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([':', ' ', '\t']))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn available(meminfo: &str) -> Option<u64> {
    field(meminfo, "MemAvailable")?.checked_mul(1024)
}

/// Files of a control group: its limit, its usage, and the page cache counted in that usage, which
/// is reclaimable.
struct Names {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const SECOND: Names = Names { limit: "memory.max", used: "memory.current", cached: ["inactive_file", "active_file"] };
const FIRST: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

/// Memory left in the control groups of this process, v1 or v2, and in all their ancestors.
fn group(mount: &Path, groups: &str) -> Option<u64> {
    let all = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, kinds, path) = (parts.next()?, parts.next()?, parts.next()?);
        match kinds {
            "" => left(mount, path, &SECOND),
            kinds if kinds.split(',').any(|kind| kind == "memory") => left(&mount.join("memory"), path, &FIRST),
            _ => None,
        }
    });
    all.min()
}

/// Inside a container the path may be the host's: missing folders are ignored, and the root always
/// counts.
fn left(root: &Path, path: &str, names: &Names) -> Option<u64> {
    let mut folders = vec![root.to_path_buf()];
    for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
        folders.push(folders[folders.len() - 1].join(part));
    }
    let free = |folder: &PathBuf| {
        let number = |name: &str| text(folder.join(name)).trim().parse::<u64>().ok();
        let limit = number(names.limit)?;
        let stat = text(folder.join("memory.stat"));
        let cached: u64 = names.cached.iter().filter_map(|name| field(&stat, name)).sum();
        Some(limit.saturating_sub(number(names.used).unwrap_or(0).saturating_sub(cached)))
    };
    folders.iter().filter_map(free).min()
}

/// What is left of the address space limit of this process.
fn address_space() -> Option<u64> {
    let limit = address_space_limit()?;
    let used = field(&text("/proc/self/status"), "VmSize").unwrap_or(0).saturating_mul(1024);
    Some(limit.saturating_sub(used))
}

/// `ulimit -v` in bytes; None if there is no such limit.
#[cfg(unix)]
pub(crate) fn address_space_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: space for the two numbers.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

#[cfg(not(unix))]
fn address_space_limit() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        let meminfo = "MemTotal:       24000000 kB\nMemFree:         700 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(available(meminfo), Some(1 << 20));
        assert_eq!(available("MemTotal: 5 kB\n"), None);
        assert_eq!(available("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn the_least_of_all_groups_counts_and_cached_files_are_room() {
        let mount = tempfile::tempdir().expect("a folder");
        let put = |folder: &str, files: &[(&str, &str)]| {
            let folder = mount.path().join(folder);
            std::fs::create_dir_all(&folder).expect("a folder");
            for (name, text) in files {
                std::fs::write(folder.join(name), text).expect("written");
            }
        };
        put("", &[("memory.stat", "inactive_file 5\n")]);
        put(
            "jobs",
            &[("memory.max", "1000\n"), ("memory.current", "900\n"), ("memory.stat", "anon 7\nactive_file 300\n")],
        );
        put("jobs/mine", &[("memory.max", "max\n"), ("memory.current", "900\n")]);
        assert_eq!(group(mount.path(), "0::/jobs/mine\n"), Some(400));
        // A path from outside the container, and no limit at all.
        assert_eq!(group(mount.path(), "0::/../../elsewhere\n"), None);
        put("", &[("memory.max", "50"), ("memory.current", "60")]);
        assert_eq!(group(mount.path(), "0::/elsewhere\n"), Some(0));
        let first = [
            ("memory.limit_in_bytes", "800"),
            ("memory.usage_in_bytes", "300"),
            ("memory.stat", "total_inactive_file 100\n"),
        ];
        put("memory/old", &first);
        assert_eq!(group(mount.path(), "4:cpu,memory:/old\n3:pids:/x\n"), Some(600));
        assert_eq!(group(mount.path(), "nonsense\n"), None);
    }
}
