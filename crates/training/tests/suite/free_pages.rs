//! A tokenizer is a hundred thousand small blocks, and gone before the weights are loaded: its
//! pages must be, too, or a run takes more than its plan says. In a process of its own, since
//! the memory of others is not to be told from it.

use isobit_conformance::in_own_process;
use isobit_training::allocator::release_free_pages;

#[test]
fn pages_of_small_blocks_go_back() {
    in_own_process(concat!(module_path!(), "::pages_of_small_blocks_go_back"), |_| (), pages_in_this_process);
}

const BLOCKS: usize = 64 << 10;

fn pages_in_this_process() {
    let blocks: Vec<Box<[u8]>> = (0..BLOCKS).map(|_| vec![1; 1000].into_boxed_slice()).collect();
    let held = resident();
    // The last block stays, so that the others are not at the end of the heap.
    let last = blocks.into_iter().last();
    let kept = resident();
    release_free_pages();
    let left = resident();
    assert!(left + (48 << 20) < held, "{held} bytes were held, {kept} kept, {left} are left");
    assert_eq!(last.map(|block| block.len()), Some(1000));
}

/// Resident bytes of this process that are not pages of a file.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line");
    line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).expect("a number") << 10
}
