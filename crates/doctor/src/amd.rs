//! AMD's cards: the nodes of the kernel driver's topology (KFD), and what the display side (DRM)
//! says of the same PCI device. Neither needs an installation of ROCm.

use crate::tree::Tree;
use isobit_kernels::gpu::hip::architecture_of_version;
use serde::Serialize;
use std::collections::BTreeMap;

pub(crate) const TOPOLOGY: &str = "/sys/class/kfd/kfd/topology";
const DRM: &str = "/sys/class/drm";
/// AMD's number among PCI vendors, as DRM writes it.
const VENDOR: &str = "0x1002";
/// Memory of the card: visible to the host or not.
const FRAME_BUFFERS: [u64; 2] = [1, 2];
/// BOUND: nodes, memory banks and DRM devices that are looked at.
const DEVICES_MAX: usize = 256;

/// A card, or a part of one that is a device of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Card {
    /// Number of its node.
    pub node: String,
    pub pci: String,
    /// `gfx906`, or `unknown`.
    pub architecture: String,
    /// What such a device is usually sold as.
    pub product: Option<&'static str>,
    pub compute_units: Option<u64>,
    pub memory_bytes: u64,
    pub memory_used_bytes: Option<u64>,
    pub wavefront: Option<u64>,
    pub link: Option<Link>,
    /// Whether other cards are reached over xGMI.
    pub xgmi: bool,
    /// `SPX`, `CPX` and so on, where a card can be divided.
    pub partition: Option<String>,
    pub numa_node: Option<u64>,
}

/// PCI Express: as it is, and as it could be.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Link {
    pub speed: String,
    pub width: u64,
    pub speed_max: Option<String>,
    pub width_max: Option<u64>,
}

impl Link {
    /// Whether it has fewer lanes than the card has. The speed of an idle card is no sign: it is
    /// lowered to save power.
    pub fn is_narrow(&self) -> bool {
        self.width_max.is_some_and(|most| self.width < most)
    }
}

/// What DRM says of a PCI device.
struct Display {
    pci: String,
    folder: String,
}

/// Cards in the order of their nodes.
pub(crate) fn cards(tree: &Tree) -> Vec<Card> {
    let displays = displays(tree);
    let nodes = format!("{TOPOLOGY}/nodes");
    let names = tree.names(&nodes).into_iter().take(DEVICES_MAX);
    names.filter_map(|name| card(tree, &displays, &format!("{nodes}/{name}"), name)).collect()
}

/// PCI addresses of AMD's display devices, whether KFD knows them or not.
pub(crate) fn display_addresses(tree: &Tree) -> Vec<String> {
    displays(tree).into_iter().map(|display| display.pci).collect()
}

fn card(tree: &Tree, displays: &[Display], folder: &str, node: String) -> Option<Card> {
    let properties = properties(&tree.text(format!("{folder}/properties"))?);
    let of = |name: &str| properties.get(name).copied();
    // A processor has no SIMDs.
    let simds = of("simd_count").filter(|count| *count > 0)?;
    let version = of("gfx_target_version").unwrap_or(0);
    let named = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    let architecture = architecture_of_version(&named).filter(|_| version > 0).unwrap_or("unknown".to_string());
    let compute_units = of("simd_per_cu").filter(|per| *per > 0).map(|per| simds / per);
    let memory_bytes = frame_buffer_bytes(tree, folder);
    let location = of("location_id").unwrap_or(0);
    let domain = of("domain").unwrap_or(0);
    let pci = format!("{domain:04x}:{:02x}:{:02x}.{:x}", location >> 8 & 0xff, location >> 3 & 0x1f, location & 7);
    let display = displays.iter().find(|display| display.pci == pci).map(|display| display.folder.as_str());
    let file = |name: &str| display.map(|folder| format!("{folder}/{name}"));
    Some(Card {
        product: product(&architecture, compute_units, memory_bytes),
        compute_units,
        memory_bytes,
        memory_used_bytes: file("mem_info_vram_used").and_then(|path| tree.number(path)),
        wavefront: of("wave_front_size"),
        link: display.and_then(|folder| link(tree, folder)),
        xgmi: of("hive_id").is_some_and(|hive| hive != 0),
        partition: file("current_compute_partition").and_then(|path| tree.line(path)),
        numa_node: file("numa_node").and_then(|path| tree.number(path)),
        node,
        pci,
        architecture,
    })
}

/// Lines of a name and a number.
fn properties(text: &str) -> BTreeMap<String, u64> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.filter_map(|(name, value)| Some((name.to_string(), value.trim().parse().ok()?))).collect()
}

fn frame_buffer_bytes(tree: &Tree, folder: &str) -> u64 {
    let banks = format!("{folder}/mem_banks");
    let bytes = tree.names(&banks).into_iter().take(DEVICES_MAX).filter_map(|bank| {
        let properties = properties(&tree.text(format!("{banks}/{bank}/properties"))?);
        let is_frame_buffer = FRAME_BUFFERS.contains(properties.get("heap_type")?);
        properties.get("size_in_bytes").copied().filter(|_| is_frame_buffer)
    });
    bytes.fold(0, u64::saturating_add)
}

fn displays(tree: &Tree) -> Vec<Display> {
    let is_card =
        |name: &String| name.strip_prefix("card").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    let cards = tree.names(DRM).into_iter().filter(is_card).take(DEVICES_MAX);
    cards
        .filter_map(|name| {
            let folder = format!("{DRM}/{name}/device");
            if tree.line(format!("{folder}/vendor"))? != VENDOR {
                return None;
            }
            let events = tree.text(format!("{folder}/uevent"))?;
            let pci = events.lines().find_map(|line| line.strip_prefix("PCI_SLOT_NAME="))?.trim().to_lowercase();
            Some(Display { pci, folder })
        })
        .collect()
}

fn link(tree: &Tree, folder: &str) -> Option<Link> {
    // `16.0 GT/s PCIe`
    let speed = |name: &str| Some(tree.line(format!("{folder}/{name}"))?.trim_end_matches(" PCIe").to_string());
    Some(Link {
        speed: speed("current_link_speed")?,
        width: tree.number(format!("{folder}/current_link_width"))?,
        speed_max: speed("max_link_speed"),
        width_max: tree.number(format!("{folder}/max_link_width")),
    })
}

/// By what cannot be renamed: boards with another BIOS may carry any name.
fn product(architecture: &str, compute_units: Option<u64>, memory_bytes: u64) -> Option<&'static str> {
    let gib = memory_bytes >> 30;
    Some(match (architecture, compute_units?) {
        ("gfx906", 60) if gib > 16 => "MI50, 32 GB",
        ("gfx906", 60) => "MI50, Radeon VII or Pro VII",
        ("gfx906", 64) => "MI60",
        ("gfx908", 120) => "MI100",
        ("gfx90a", 104) => "MI210, or one of the two devices of an MI250",
        ("gfx90a", 110) => "one of the two devices of an MI250X",
        ("gfx942", 228) => "MI300A",
        ("gfx942", 304) if gib > 200 => "MI325X",
        ("gfx942", 304) => "MI300X",
        ("gfx942", 80) => "MI308X",
        ("gfx942", 38) => "one part of a divided MI300X",
        ("gfx950", 256) => "MI350X or MI355X",
        _ => return None,
    })
}
