//! The line of `docs/doctor.md` that shows what a conformant device prints: how many test vectors
//! there are, and their hash, which no machine changes.

use isobit_conformance::vectors::{Sample, Subject};
use isobit_kernels::{Cpu, Path};

/// The line begins like this.
const LINE: &str = "    cpu/avx512 conformant, ";

pub(super) fn page(old: &str) -> Result<String, String> {
    let cpu = Cpu::new(1, Path::Scalar).map_err(|error| error.to_string())?;
    let checked = Subject::cpu(cpu).check(Sample::QUICK, &mut || true);
    if let Some(first) = checked.failures.first() {
        return Err(format!("a test vector fails: {first}"));
    }
    with_line(old, &format!("{LINE}{} vectors, {}", checked.compared, checked.hash))
}

fn with_line(old: &str, line: &str) -> Result<String, String> {
    let is_it = |old: &str| old.starts_with(LINE);
    if old.lines().filter(|old| is_it(old)).count() != 1 {
        return Err(format!("docs/doctor.md needs one line that begins with `{}`", LINE.trim_start()));
    }
    Ok(old.split('\n').map(|old| if is_it(old) { line } else { old }).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_line_changes() {
        let old = format!("above\n\n{LINE}1 vectors, 00\n\nbelow\n");
        assert_eq!(with_line(&old, "new").as_deref(), Ok("above\n\nnew\n\nbelow\n"));
        assert!(with_line("no such line\n", "new").is_err());
    }
}
