//! Compiles kernels to assembly with clang in a child process, as the runtimes of AMD's devices
//! would, and remembers what it compiled.

use crate::program::Program;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Compilers to try, in order.
const COMPILERS: [&str; 2] = ["clang-19", "clang"];

/// A device that is emulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Architecture {
    /// MI50, MI60, Radeon VII.
    Gfx906,
    /// MI100.
    Gfx908,
}

impl Architecture {
    pub const ALL: [Self; 2] = [Self::Gfx906, Self::Gfx908];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Gfx906 => "gfx906",
            Self::Gfx908 => "gfx908",
        }
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
        found.ok_or_else(|| format!("no emulator of `{text}`: gfx906 and gfx908 exist"))
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

    /// The options that the runtimes compile with.
    fn options(self, architecture: Architecture) -> Vec<String> {
        let own: &[&str] = match self {
            Self::OpenCl => &[
                "-x",
                "cl",
                "-cl-std=CL1.2",
                "-Xclang",
                "-finclude-default-header",
                "-target",
                "amdgcn-amd-amdhsa",
                "-cl-fp32-correctly-rounded-divide-sqrt",
            ],
            Self::Hip => &["-x", "hip", "--cuda-device-only", "-nogpuinc", "-fno-gpu-rdc"],
        };
        let device = match self {
            Self::OpenCl => format!("-mcpu={architecture}"),
            Self::Hip => format!("--offload-arch={architecture}"),
        };
        // Lines of source cost nothing: no instruction differs.
        let common = ["-nogpulib", "-ffp-contract=off", "-O3", "-gline-tables-only"];
        own.iter().chain(&common).map(|option| (*option).to_string()).chain([device]).collect()
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
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
}

/// Assembles what is not known yet; cards of one process share the programs.
pub(crate) fn compile(request: &Request) -> Result<Arc<Program>, String> {
    static KNOWN: Mutex<BTreeMap<Request, Arc<Program>>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known().get(request) {
        return Ok(Arc::clone(program));
    }
    let program = Arc::new(crate::assembly::read(&assembly(request)?)?);
    known().insert(request.clone(), Arc::clone(&program));
    Ok(program)
}

fn assembly(request: &Request) -> Result<String, String> {
    let clang = compiler().ok_or("no clang that compiles for amdgcn; install clang-19")?;
    let options = request.dialect.options(request.architecture);
    let mut child = Command::new(clang)
        .args(options.iter().chain(&request.options))
        .args(["-S", "-o", "-", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{clang}: {error}"))?;
    let mut input = child.stdin.take().ok_or("the compiler has no input")?;
    let source = request.source.clone();
    // A thread of its own: the compiler may write before it has read everything.
    let writer = std::thread::spawn(move || input.write_all(source.as_bytes()));
    let output = child.wait_with_output().map_err(|error| format!("{clang}: {error}"))?;
    let written = writer.join().map_err(|_| "the compiler's input was not written".to_string())?;
    if !output.status.success() {
        return Err(format!("{clang} failed\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    written.map_err(|error| format!("{clang}: {error}"))?;
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}
