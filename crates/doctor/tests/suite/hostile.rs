//! Files that are missing, huge, binary or circular: the doctor finishes, and finds less.

use crate::machine::{ALL, Machine};
use isobit_doctor::{Facts, facts_text, findings, findings_text};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything that is said of a machine.
fn said(machine: &Machine) -> String {
    let facts = Facts::read_within(&machine.sources(), Duration::from_secs(20)).expect("an answer in time");
    let facts = facts.expect("no Python environment is named");
    facts_text(&facts) + &findings_text(&findings(&facts))
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").filter_map(Result::ok) {
        if entry.path().is_dir() {
            files(&entry.path(), found);
        } else {
            found.push(entry.path());
        }
    }
}

#[test]
fn every_file_spoiled_in_every_way() {
    let long = "7".repeat(1 << 18);
    let ways: [&[u8]; 7] = [
        b"",
        b"\xff\x00\x1b]0;title\x07\n\xfe",
        long.as_bytes(),
        b"-1\n",
        b"18446744073709551616\n",
        b"simd_count 18446744073709551615\nsimd_per_cu 0\ngfx_target_version 18446744073709551615\nlocation_id 18446744073709551615\ndomain 18446744073709551615\nwave_front_size x\n",
        b"heap_type 1\nsize_in_bytes 18446744073709551615\n",
    ];
    for name in ALL {
        let machine = Machine::of(name);
        let mut all = Vec::new();
        files(&machine.path(""), &mut all);
        for way in ways {
            for file in &all {
                std::fs::write(file, way).expect("written");
            }
            let text = said(&machine);
            assert!(!text.contains('\u{1b}') && text.len() < 1 << 16, "{name}: {} bytes", text.len());
        }
        for file in &all {
            std::fs::remove_file(file).expect("removed");
        }
        said(&machine);
    }
}

#[test]
fn one_file_spoiled_leaves_the_others() {
    let machine = Machine::of("two-mi100");
    machine.put("sys/class/kfd/kfd/topology/nodes/2/properties", [0xff; 4096]);
    let cards = machine.facts().cards;
    assert_eq!(cards.iter().map(|card| card.pci.as_str()).collect::<Vec<_>>(), ["0000:26:00.0"]);
}

#[cfg(unix)]
#[test]
fn links_in_circles_pipes_and_endless_files() {
    use std::os::unix::fs::symlink;
    let machine = Machine::of("mi50");
    let nodes = machine.path("sys/class/kfd/kfd/topology/nodes");
    symlink("..", nodes.join("7")).expect("a link");
    symlink("8", nodes.join("8")).expect("a link");
    let folder = nodes.join("9");
    std::fs::create_dir(&folder).expect("a folder");
    symlink("/dev/zero", folder.join("properties")).expect("a link");
    std::fs::create_dir(nodes.join("10")).expect("a folder");
    let pipe = nodes.join("10/properties");
    assert!(std::process::Command::new("mkfifo").arg(pipe).status().is_ok_and(|status| status.success()));
    for number in 100..600 {
        symlink("1", nodes.join(number.to_string())).expect("a link");
    }
    let text = said(&machine);
    assert!(text.contains("gfx906") && text.lines().count() < 600, "{}", text.lines().count());
}
