//! Compiles programs with clang for the host, loads them, and remembers what it loaded.

use isobit_kernels::gpu::source_line;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Compilers to try, in order.
const COMPILERS: [&str; 2] = ["clang++-19", "clang++"];
const SYMBOLIZERS: [&str; 2] = ["llvm-symbolizer-19", "llvm-symbolizer"];
const PRELUDE: &str = include_str!("../device/prelude.h");
const ENGINE: &str = include_str!("../device/engine.cpp");
/// Contraction would change bits. Vectors of the compiler's own making would hide misaligned
/// accesses of the program.
const OPTIONS: [&str; 9] = [
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-w",
];
/// Calls the engine at every access to memory that is not the thread's own, and at every address
/// that is not aligned.
const HOOKS: [&str; 5] = [
    "-fsanitize=thread,alignment",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-atomics=0",
];
/// What `__global__` becomes.
const KERNEL_MARK: &str = "annotate(\"simt kernel\")";
const DYNAMIC: &str = "extern __shared__";

/// Behind every program: where its shared memory is, and the program itself.
const PLACES: &str = "
extern \"C\" {
extern char __start_simt_shared[] __attribute__((weak, visibility(\"hidden\")));
extern char __stop_simt_shared[] __attribute__((weak, visibility(\"hidden\")));
extern char __ehdr_start[] __attribute__((visibility(\"hidden\")));
extern char _end[] __attribute__((visibility(\"hidden\")));
extern char simt_dynamic[] __attribute__((visibility(\"hidden\")));
extern char *const simt_places[] __attribute__((visibility(\"default\"))) =
    {__start_simt_shared, __stop_simt_shared, simt_dynamic, __ehdr_start, _end};
}
// Whatever type a program gives it.
asm(\".pushsection .bss.simt_dynamic, \\\"aw\\\", @nobits\\n.balign 1024\\n.globl shared\\n.hidden shared\\nshared:\\n\"
    \".globl simt_dynamic\\n.hidden simt_dynamic\\nsimt_dynamic:\\n.skip 262144\\n.popsection\");
";

/// Why nothing can be compiled here, if so.
pub fn objection() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("the fibers are for Linux on x86-64".to_string());
    }
    compiler().is_none().then(|| format!("no compiler; tried {}", COMPILERS.join(", ")))
}

fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<&str>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|it| it.status.success());
        COMPILERS.into_iter().find(runs)
    })
}

/// A kernel as the program describes it: `SimtEntry` in the prelude.
#[repr(C)]
struct Entry {
    run: usize,
    count: u32,
    bytes: *const u32,
}

/// A kernel that can be launched.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) run: usize,
    /// Bytes of each parameter.
    pub(crate) parameters: Vec<u32>,
}

/// Addresses in a loaded program: `simt_places`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) declared: usize,
    pub(crate) declared_end: usize,
    pub(crate) dynamic: usize,
    pub(crate) image: usize,
    pub(crate) image_end: usize,
}

/// A loaded program.
pub(crate) struct Program {
    _library: Library,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) places: Places,
    /// Held by a launch: shared memory that a program declares exists once.
    pub(crate) busy: Mutex<()>,
    source: String,
    object: Vec<u8>,
}

/// A compilation: source and options.
pub(crate) type Request = (String, Vec<String>);

/// Compiles what is not known yet; cards of one process share the programs.
pub(crate) fn compile(request: &Request) -> Result<Arc<Program>, String> {
    static KNOWN: Mutex<BTreeMap<Request, Arc<Program>>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known().get(request) {
        return Ok(Arc::clone(program));
    }
    let program = Arc::new(load(request)?);
    known().insert(request.clone(), Arc::clone(&program));
    Ok(program)
}

fn load((source, options): &Request) -> Result<Program, String> {
    engine()?;
    let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let (text, object) = (folder.path().join("program.cpp"), folder.path().join("program.so"));
    let marked = source.replace(DYNAMIC, "SIMT_DYNAMIC");
    let write = |tail: &str| {
        let whole = format!("{PRELUDE}\n{marked}\n#line 1 \"entries\"\n{tail}");
        std::fs::write(&text, whole).map_err(|error| format!("{}: {error}", text.display()))
    };
    write("")?;
    let preprocessed = clang(&text, options, &["-E", "-P"], Path::new("-"))?;
    let names = kernels(&String::from_utf8_lossy(&preprocessed));
    let entries: Vec<String> = names.iter().map(|name| format!("SIMT_ENTRY({name})\n")).collect();
    write(&format!("{}{PLACES}", entries.concat()))?;
    clang(&text, options, &HOOKS, &object)?;
    let bytes = std::fs::read(&object).map_err(|error| format!("{}: {error}", object.display()))?;
    // SAFETY: compiled just now; its only initialiser is the hooks' own, which the engine has.
    let library = unsafe { Library::open(Some(&object), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| error.to_string())?;
    let kernels = names.iter().map(|name| kernel(&library, name)).collect::<Result<_, _>>()?;
    // SAFETY: the symbol is an array of five addresses, defined in `PLACES`.
    let places: [usize; 5] = unsafe { **library.get::<*const [usize; 5]>(b"simt_places").map_err(|e| e.to_string())? };
    let [declared, declared_end, dynamic, image, image_end] = places;
    let places = Places { declared, declared_end, dynamic, image, image_end };
    let source = source.clone();
    Ok(Program { _library: library, kernels, places, busy: Mutex::new(()), source, object: bytes })
}

/// The kernels of a preprocessed program: the name behind each mark.
fn kernels(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let parts = text.split(KERNEL_MARK).skip(1);
    let names = parts.filter_map(|part| {
        let (_, declaration) = part.split_once("void")?;
        Some(declaration.split('(').next()?.trim().to_string())
    });
    names.filter(|name| !name.is_empty() && name.chars().all(is_name)).collect()
}

fn kernel(library: &Library, name: &str) -> Result<Kernel, String> {
    let symbol = format!("simt_entry_{name}");
    // SAFETY: `SIMT_ENTRY` defines the symbol with this layout; the library outlives the read.
    let entry = unsafe { &**library.get::<*const Entry>(symbol.as_bytes()).map_err(|error| error.to_string())? };
    // SAFETY: `bytes` is a constant array of `count` numbers in the library.
    let parameters = unsafe { std::slice::from_raw_parts(entry.bytes, entry.count as usize) }.to_vec();
    Ok(Kernel { name: name.to_string(), run: entry.run, parameters })
}

/// Runs the compiler on a file and returns what it prints.
fn clang(text: &Path, options: &[String], own: &[&str], output: &Path) -> Result<Vec<u8>, String> {
    let name = compiler().ok_or_else(|| objection().unwrap_or_default())?;
    let mut command = Command::new(name);
    command.args(OPTIONS).arg("-march=native").arg("-gline-tables-only");
    command.args(own).args(options).arg("-o").arg(output).arg(text);
    let ran = command.output().map_err(|error| format!("{name}: {error}"))?;
    if !ran.status.success() {
        return Err(format!("{name} failed\n{}", String::from_utf8_lossy(&ran.stderr)));
    }
    Ok(ran.stdout)
}

/// `simt_launch` of the engine, whose symbols all programs see.
pub(crate) type Launcher = unsafe extern "C" fn(*mut c_void) -> i32;

pub(crate) fn engine() -> Result<Launcher, String> {
    static LOADED: OnceLock<Result<(Library, Launcher), String>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let (text, object) = (folder.path().join("engine.cpp"), folder.path().join("engine.so"));
        std::fs::write(&text, ENGINE).map_err(|error| format!("{}: {error}", text.display()))?;
        clang(&text, &[], &[], &object)?;
        // SAFETY: compiled just now; it has no initialisers of its own.
        let library = unsafe { Library::open(Some(&object), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|error| error.to_string())?;
        // SAFETY: the engine defines the function with this signature, and is never closed.
        let launcher = unsafe { *library.get::<Launcher>(b"simt_launch").map_err(|error| error.to_string())? };
        Ok((library, launcher))
    });
    loaded.as_ref().map(|&(_, launcher)| launcher).map_err(Clone::clone)
}

impl Program {
    /// The line of the source that an address of the program belongs to, with its number.
    pub(crate) fn line(&self, address: usize) -> Option<String> {
        let folder = tempfile::tempdir().ok()?;
        let object = folder.path().join("program.so");
        std::fs::write(&object, &self.object).ok()?;
        let found = SYMBOLIZERS.into_iter().find_map(|name| {
            let mut command = Command::new(name);
            // The address is that of a return: the call is before it.
            command.arg("--obj").arg(&object).arg("--inlining=true").arg(format!("{:#x}", address.checked_sub(1)?));
            command.output().ok().filter(|output| output.status.success())
        })?;
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        // The innermost function that is the program's own, not the prelude's.
        text.lines().find_map(|line| {
            let (file, rest) = line.rsplit('/').next()?.split_once(':')?;
            let number: usize = rest.split(':').next()?.parse().ok()?;
            Some(format!("at {file}:{number} `{}`", source_line(&self.source, file, number)?.trim()))
        })
    }
}

/// A message of the engine, which ends with a zero.
pub(crate) fn message(bytes: &[c_char]) -> String {
    let text: Vec<u8> = bytes.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_mark() {
        let text = format!(
            "void plain(int a); extern \"C\" __attribute__(({KERNEL_MARK})) void first(float *y) {{}}\n\
             extern \"C\" __attribute__(({KERNEL_MARK}))\nvoid second_2(\n) {{}}"
        );
        assert_eq!(kernels(&text), ["first", "second_2"]);
        assert!(kernels("void plain(int a);").is_empty());
    }

    #[test]
    fn a_message_ends_with_a_zero() {
        assert_eq!(message(&[b'n' as c_char, b'o' as c_char, 0, b'x' as c_char]), "no");
    }
}
