//! `docs/add-an-op.md` quotes the files of one op; this holds the page to them.

const PAGE: &str = include_str!("../../../../docs/add-an-op.md");
const LIST: &str = include_str!("../../../kernels/src/backend.rs");
const FILES: [&str; 6] = [
    include_str!("../../../kernels/src/op/add.rs"),
    include_str!("../../../kernels/src/reference/add.rs"),
    include_str!("../../src/cases/add.rs"),
    include_str!("../../../kernels/src/cpu/add.rs"),
    include_str!("../../../kernels/gpu/add.cl"),
    include_str!("../../../kernels/src/gpu/add.rs"),
];

/// Every block of code on the page appears in one of the files, and every implementation and kernel
/// of the files appears on the page.
#[test]
fn the_page_about_adding_an_op_shows_its_files() {
    let blocks: Vec<&str> =
        PAGE.split("```").skip(1).step_by(2).filter_map(|block| Some(block.split_once('\n')?.1)).collect();
    for block in &blocks {
        assert!(FILES.iter().chain([&LIST]).any(|file| file.contains(block)), "not in the files: {block}");
    }
    for file in FILES {
        let items = file.lines().filter(|line| ["impl", "multiversion!", "KERNEL"].iter().any(|w| line.starts_with(w)));
        for item in items {
            assert!(blocks.iter().any(|block| block.lines().any(|line| line == item)), "not on the page: {item}");
        }
    }
    assert_eq!(blocks.len(), 9, "blocks of code on the page");
}
