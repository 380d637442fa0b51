//! Compiles kernels with clang, as the runtimes of AMD's devices would, or with AMD's own hipRTC,
//! and remembers what it compiled.

use crate::program::Program;
use isobit_kernels::gpu::{EXACT_DIVISION_OPTION, OPENCL_OPTIONS, hip};
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Compilers to try, in order.
pub const COMPILERS: [&str; 2] = ["clang-19", "clang"];

/// A device that is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Architecture {
    /// MI50, MI60, Radeon VII.
    Gfx906,
    /// MI100.
    Gfx908,
    /// MI210, MI250.
    Gfx90a,
    /// MI300.
    Gfx942,
}

impl Architecture {
    pub const ALL: [Self; 4] = [Self::Gfx906, Self::Gfx908, Self::Gfx90a, Self::Gfx942];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Gfx906 => "gfx906",
            Self::Gfx908 => "gfx908",
            Self::Gfx90a => "gfx90a",
            Self::Gfx942 => "gfx942",
        }
    }

    pub fn has_mfma(self) -> bool {
        hip::has_mfma(self.name())
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|architecture| architecture.name() == text);
        found.ok_or_else(|| format!("no emulator of `{text}`: there are {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// The language in which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dialect {
    Hip,
    OpenCl,
}

impl Dialect {
    pub const ALL: [Self; 2] = [Self::Hip, Self::OpenCl];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Hip => "HIP",
            Self::OpenCl => "OpenCL",
        }
    }

    /// What makes clang compile as the runtimes do, for any of AMD's architectures: the options
    /// that the host gives them, and those that they add by themselves.
    pub fn options(self, architecture: &str) -> Vec<String> {
        // clang alone does not optimise; OpenCL drivers do.
        const OPENCL: [&str; 7] =
            ["-x", "cl", "-Xclang", "-finclude-default-header", "-target", "amdgcn-amd-amdhsa", "-O3"];
        const HIP: [&str; 5] = ["-x", "hip", "--cuda-device-only", "-nogpuinc", "-fno-gpu-rdc"];
        let (own, given, device) = match self {
            Self::OpenCl => {
                let given = [&OPENCL_OPTIONS[..], &[EXACT_DIVISION_OPTION]].concat();
                (&OPENCL[..], given, format!("-mcpu={architecture}"))
            }
            Self::Hip => (&HIP[..], hip::OPTIONS.to_vec(), format!("--offload-arch={architecture}")),
        };
        let options = own.iter().chain(&given).chain(&["-nogpulib"]);
        options.map(|option| (*option).to_string()).chain([device]).collect()
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What turns source into machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Toolchain {
    /// clang's assembly.
    Assembly,
    /// clang and its linker; the code object is disassembled by `llvm-objdump`.
    CodeObject,
    /// hipRTC of an installed ROCm, as a run on a card calls it; disassembled likewise.
    HipRtc,
}

impl Toolchain {
    pub const ALL: [Self; 3] = [Self::Assembly, Self::CodeObject, Self::HipRtc];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Assembly => "clang",
            Self::CodeObject => "clang-object",
            Self::HipRtc => "hiprtc",
        }
    }

    /// Why it cannot be used here, if so.
    pub fn unavailable_because(self) -> Option<String> {
        let runs = |name: &str, argument: &str| Command::new(name).arg(argument).output().is_ok();
        match self {
            Self::Assembly | Self::CodeObject if compiler().is_none() => {
                Some("no clang that compiles for amdgcn".to_string())
            }
            Self::CodeObject | Self::HipRtc if disassembler().is_none() => Some("no llvm-objdump".to_string()),
            Self::CodeObject if !LINKERS.iter().any(|linker| runs(linker, "--version")) => {
                Some("no ld.lld".to_string())
            }
            Self::HipRtc => hip::has_compiler().err(),
            _ => None,
        }
    }
}

/// Lines of source, for messages. No instruction differs with them.
pub const LINES: &str = "-gline-tables-only";
const LINKERS: [&str; 2] = ["ld.lld-19", "ld.lld"];
const DISASSEMBLERS: [&str; 3] = ["llvm-objdump-19", "llvm-objdump", "llvm-objdump-15"];

fn disassembler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        DISASSEMBLERS.into_iter().find(|name| {
            let output = Command::new(name).arg("--version").output();
            output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
        })
    })
}

/// A compiler that supports AMD's devices, if there is one.
pub fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        COMPILERS.into_iter().find(|name| {
            let output = Command::new(name).arg("--print-targets").output();
            output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
        })
    })
}

/// A compilation: source, options after those of the dialect, device and dialect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Request {
    pub(crate) source: String,
    pub(crate) options: Vec<String>,
    pub(crate) architecture: Architecture,
    pub(crate) dialect: Dialect,
    pub(crate) toolchain: Toolchain,
}

/// Assembles what is not known yet; cards of one process share the programs.
pub(crate) fn compile(request: &Request) -> Result<Arc<Program>, String> {
    static KNOWN: Mutex<BTreeMap<Request, Arc<Program>>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known().get(request) {
        return Ok(Arc::clone(program));
    }
    let program = match request.toolchain {
        Toolchain::Assembly => {
            let text = clang(request, &["-S", LINES])?;
            crate::assembly::read(&String::from_utf8(text).map_err(|error| error.to_string())?)?
        }
        Toolchain::CodeObject => {
            let bundle = (request.dialect == Dialect::Hip).then_some("--no-gpu-bundle-output");
            let options: Vec<&str> = bundle.into_iter().chain([LINES]).collect();
            disassembled(&clang(request, &options)?)?
        }
        Toolchain::HipRtc => disassembled(&hiprtc(request)?)?,
    };
    let program = Arc::new(program);
    known().insert(request.clone(), Arc::clone(&program));
    Ok(program)
}

/// What clang makes of the source, with options that decide about its output.
fn clang(request: &Request, output: &[&str]) -> Result<Vec<u8>, String> {
    let clang = compiler().ok_or("no clang that compiles for amdgcn; install clang-19")?;
    let options = request.dialect.options(request.architecture.name());
    let mut command = Command::new(clang);
    command.args(options.iter().chain(&request.options));
    command.args(output).args(["-o", "-", "-"]);
    piped(command, request.source.clone().into_bytes())
}

fn hiprtc(request: &Request) -> Result<Vec<u8>, String> {
    if request.dialect != Dialect::Hip {
        return Err("hipRTC compiles HIP only".to_string());
    }
    let Request { source, options, architecture, .. } = request;
    let options: Vec<String> = options.iter().cloned().chain([LINES.to_string()]).collect();
    hip::compile(&hip::Request { architecture: architecture.name(), source, options: &options })
}

/// A code object as a program.
fn disassembled(object: &[u8]) -> Result<Program, String> {
    let mut command = Command::new(disassembler().ok_or("no llvm-objdump; install llvm-19")?);
    command.args(["-d", "-l", "-"]);
    let text = piped(command, object.to_vec())?;
    crate::code_object::read(object, &String::from_utf8_lossy(&text))
}

/// What a command prints when it is given `input`.
fn piped(mut command: Command, input: Vec<u8>) -> Result<Vec<u8>, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{name}: {error}"))?;
    let mut pipe = child.stdin.take().ok_or("a command without input")?;
    // A thread of its own: the command may write before it has read everything.
    let writer = std::thread::spawn(move || pipe.write_all(&input));
    let output = child.wait_with_output().map_err(|error| format!("{name}: {error}"))?;
    let written = writer.join().map_err(|_| format!("{name}: its input was not written"))?;
    if !output.status.success() {
        return Err(format!("{name} failed\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    written.map_err(|error| format!("{name}: {error}"))?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_architecture_of_the_kernels_is_emulated() {
        assert_eq!(Architecture::ALL.map(Architecture::name), hip::architectures());
        assert!(Architecture::ALL.into_iter().all(|known| known.name().parse() == Ok(known)));
        assert!("gfx803".parse::<Architecture>().is_err_and(|error| error.contains("gfx906, gfx908, gfx90a, gfx942")));
    }
}
