//! `cargo xtask hip-compile`: every GPU program through hipRTC as a run would compile it, in a
//! child process, for the devices that ROCm 5 knows. It needs ROCm's libraries, not a device.

use crate::amd_audit::{SLICES, programs, runs_on, source};
use crate::arguments::Arguments;
use crate::repository::now;
use isobit_gcn::Dialect;
use isobit_kernels::gpu::hip::{self, Request};

/// With the low byte of the flags in the header of their code objects.
const DEVICES: [(&str, u8); 3] = [("gfx906", 0x2f), ("gfx908", 0x30), ("gfx90a", 0x3f)];
/// hipRTC 5 aborts its process on it.
const UNKNOWN: &str = "gfx9999";

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let require = arguments.flag("--require");
    arguments.finish()?;
    if let Err(why) = hip::has_compiler() {
        if require {
            return Err(why);
        }
        println!("0 compiled, 1 skipped: {why}");
        return Ok(());
    }
    let start = now();
    let mut count = 0;
    for program in programs()? {
        let source = source(&program, Dialect::Hip, &[])?;
        for (architecture, flags) in DEVICES.into_iter().filter(|(device, _)| runs_on(&program, device)) {
            for slices in SLICES {
                let options = [format!("-DSLICES={slices}")];
                let request = Request { architecture, source: &source, options: &options };
                let code = hip::compile(&request).map_err(|error| format!("{program}: {error}"))?;
                if !is_code_object(&code, flags) {
                    return Err(format!("{program}: hipRTC gave no code object for {architecture}"));
                }
                count += 1;
            }
        }
    }
    println!("{count} compiled, {:.1} s", start.elapsed().as_secs_f64());
    let source = "extern \"C\" __attribute__((global)) void nothing() {}";
    let request = Request { architecture: UNKNOWN, source, options: &[] };
    match hip::compile(&request) {
        Ok(_) => Err(format!("hipRTC compiled for {UNKNOWN}, which does not exist")),
        Err(error) => {
            println!("{UNKNOWN}: {}", error.lines().next().unwrap_or_default());
            Ok(())
        }
    }
}

/// A linked ELF file for an AMD device.
fn is_code_object(code: &[u8], flags: u8) -> bool {
    const MACHINE: [u8; 2] = [224, 0];
    code.starts_with(b"\x7fELF") && code.get(18..20) == Some(&MACHINE) && code.get(48) == Some(&flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_objects_are_told_by_their_header() {
        let mut code = vec![0u8; 64];
        code[..4].copy_from_slice(b"\x7fELF");
        code[18] = 224;
        code[48] = 0x2f;
        assert!(is_code_object(&code, 0x2f) && !is_code_object(&code, 0x30) && !is_code_object(&code[..40], 0x2f));
        code[18] = 62;
        assert!(!is_code_object(&code, 0x2f));
    }
}
