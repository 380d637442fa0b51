//! The emulator compiles kernels with line tables, for its messages; a card's runtime does not.
//! This holds the machine code of both to be the same.

use crate::emulated::available;
use isobit_gcn::{Architecture, Dialect, LINES, Toolchain, compiler};
use isobit_kernels::gpu::HEADER_NAMES;
use std::path::Path;
use std::process::Command;

/// Clang's assembly of a program, with one more option.
fn assembly(compiler: &str, program: &Path, architecture: Architecture, option: &str) -> String {
    let mut command = Command::new(compiler);
    command.args(Dialect::Hip.options(architecture.name())).args(["-DSLICES=2", "-S", "-o", "-", option]);
    let output = command.arg(program).output().expect("clang starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("assembly is text")
}

/// Instructions and what the descriptors of kernels say.
fn machine_code(assembly: &str) -> Vec<&str> {
    let lines = assembly.lines().map(|line| line.split(';').next().unwrap_or_default().trim());
    lines
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()) || line.starts_with(".amdhsa_"))
        .collect()
}

#[test]
fn lines_of_source_change_no_instruction() {
    if !available("emulated_lines::lines_of_source_change_no_instruction", Toolchain::Assembly) {
        return;
    }
    let compiler = compiler().expect("it is available");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/gpu");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("a file of device code");
    for (program, architecture) in [("product.cl", Architecture::Gfx906), ("product_mfma.cl", Architecture::Gfx908)] {
        let names = ["cuda.h"].into_iter().chain(HEADER_NAMES.iter().copied()).chain([program]);
        let path = std::env::temp_dir().join(format!("isobit-lines-{}-{program}", std::process::id()));
        std::fs::write(&path, names.map(read).collect::<String>()).expect("the temporary folder");
        let [with, without] = [LINES, "-g0"].map(|option| assembly(compiler, &path, architecture, option));
        std::fs::remove_file(&path).expect("the source is removed");
        let [code, plain] = [&with, &without].map(|assembly| machine_code(assembly));
        assert!(code.len() > 1000 && code == plain, "{program}");
        let lines = |assembly: &str| assembly.lines().filter(|line| line.trim().starts_with(".loc")).count();
        assert!(lines(&with) > 1000 && lines(&without) == 0, "{program}");
    }
}
