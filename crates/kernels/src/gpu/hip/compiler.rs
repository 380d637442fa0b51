//! hipRTC: source to a code object for one architecture. It compiles in a child process where the
//! program allows it (`child.rs`), and what it compiled is kept on disk (`gpu/code_cache.rs`).

use super::super::code_cache::{Cache, Key};
use super::super::library::{functions, open};
use super::super::runtime::Answer;
use super::library::{Object, Status, open_runtime, text};
use super::{child, settings};
use std::ffi::{CString, c_char, c_int};
use std::ptr::{null, null_mut};

functions!(Functions {
    create = c"hiprtcCreateProgram" (*mut Object, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy = c"hiprtcDestroyProgram" (*mut Object) -> Status;
    compile = c"hiprtcCompileProgram" (Object, c_int, *const *const c_char) -> Status;
    code_size = c"hiprtcGetCodeSize" (Object, *mut usize) -> Status;
    code = c"hiprtcGetCode" (Object, *mut c_char) -> Status;
    log_size = c"hiprtcGetProgramLogSize" (Object, *mut usize) -> Status;
    log = c"hiprtcGetProgramLog" (Object, *mut c_char) -> Status;
    error_text = c"hiprtcGetErrorString" (Status) -> *const c_char;
});

/// What hipRTC is told for every program. The bits depend on the first: HIP contracts by default.
/// Subnormals are kept by default.
pub const OPTIONS: [&str; 2] = ["-ffp-contract=off", "-O3"];
/// The folder of code objects.
const CACHE: &str = "hip";
const LOG_BYTES_MAX: usize = 1 << 20;
const CODE_BYTES_MAX: usize = 1 << 30;

/// What is to be compiled.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// `gfx906`
    pub architecture: &'a str,
    pub source: &'a str,
    /// Besides those that the bits need.
    pub options: &'a [String],
}

impl Request<'_> {
    /// Everything that the compiler is told.
    pub(super) fn line(&self) -> Vec<String> {
        let mut line = vec![format!("--offload-arch={}", self.architecture)];
        line.extend(OPTIONS.map(str::to_string));
        line.extend_from_slice(self.options);
        line
    }

    fn key(&self, version: &str) -> Key {
        Key::new(&self.line(), version, self.source)
    }
}

/// A code object, and whether it was on disk.
pub(super) struct Program {
    pub(super) code: Vec<u8>,
    pub(super) from_cache: bool,
}

/// From the disk, or compiled and put there. `version` tells compilers apart.
pub(super) fn compiled(request: &Request, version: &str) -> Answer<Program> {
    let kept = Cache::of(CACHE).and_then(|cache| cache.get(request.key(version)));
    if let Some(code) = kept {
        return Ok(Program { code, from_cache: true });
    }
    compiled_again(request, version).map(|code| Program { code, from_cache: false })
}

/// Compiled, whatever is on disk.
pub(super) fn compiled_again(request: &Request, version: &str) -> Answer<Vec<u8>> {
    let code = compile(request)?;
    if let Some(cache) = Cache::of(CACHE) {
        cache.put(request.key(version), &code);
    }
    Ok(code)
}

/// The code object of a program, without the cache.
pub fn compile(request: &Request) -> Result<Vec<u8>, String> {
    let line = request.line();
    if settings::current().children {
        child::compile(&line, request.source).map_err(|error| format!("{error} (hipRTC, for {})", request.architecture))
    } else {
        Compiler::open()?.code(&line, request.source)
    }
}

/// Whether hipRTC is installed, or what is missing.
pub fn has_compiler() -> Result<(), String> {
    Compiler::open().map(|_| ())
}

pub(super) struct Compiler {
    functions: Functions,
}

impl Compiler {
    /// Of the runtime's own version: a library of its own, or, in version 5, part of the runtime.
    pub(super) fn open() -> Result<Self, String> {
        let (runtime, name) = open_runtime()?;
        let own = open(&[&name.replace("libamdhip64", "libhiprtc")]);
        let functions = own.map_or_else(|| Functions::load(runtime), Functions::load);
        let missing = |error| format!("no hipRTC beside {name} ({error}): install ROCm's libhiprtc of that version");
        functions.map(|functions| Self { functions }).map_err(missing)
    }

    fn check(&self, what: &str, status: Status) -> Answer<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: for every status the compiler gives a constant string of its own, or null.
        let text = unsafe { text((self.functions.error_text)(status)) };
        Err(format!("{what} failed: {text}"))
    }

    fn log(&self, program: Object) -> String {
        let mut size = 0;
        // SAFETY: `size` has room for the number; the program is the caller's, not yet destroyed.
        let status = unsafe { (self.functions.log_size)(program, &raw mut size) };
        if status != 0 || size > LOG_BYTES_MAX {
            return String::new();
        }
        // The text need not end with a zero.
        let mut log = vec![0u8; size + 1];
        // SAFETY: the vector is larger than the size that the compiler stated for this log.
        unsafe { (self.functions.log)(program, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string()
    }

    pub(super) fn code(&self, line: &[String], source: &str) -> Answer<Vec<u8>> {
        let source = CString::new(source).map_err(|error| error.to_string())?;
        let mut program = null_mut();
        // SAFETY: `program` has room for the handle; source and name end with a zero and live until
        // the call returns; there are no headers.
        self.check("hiprtcCreateProgram", unsafe {
            (self.functions.create)(&raw mut program, source.as_ptr(), c"isobit.hip".as_ptr(), 0, null(), null())
        })?;
        let code = self.code_of(program, line);
        // SAFETY: made above and destroyed once; nothing uses it after.
        unsafe { (self.functions.destroy)(&raw mut program) };
        code
    }

    fn code_of(&self, program: Object, line: &[String]) -> Answer<Vec<u8>> {
        let options: Result<Vec<_>, _> = line.iter().map(|option| CString::new(option.as_str())).collect();
        let options = options.map_err(|error| error.to_string())?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: as many pointers as stated, each to an option that ends with a zero and outlives
        // the call.
        let status = unsafe { (self.functions.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        self.check("hiprtcCompileProgram", status).map_err(|error| format!("{error}\n{}", self.log(program)))?;
        let mut size = 0;
        // SAFETY: `size` has room for the number; the program was compiled.
        self.check("hiprtcGetCodeSize", unsafe { (self.functions.code_size)(program, &raw mut size) })?;
        if size == 0 || size > CODE_BYTES_MAX {
            return Err(format!("hiprtcGetCodeSize says {size} bytes"));
        }
        let mut code = vec![0u8; size];
        // SAFETY: the vector has the size that the compiler stated for this program's code.
        self.check("hiprtcGetCode", unsafe { (self.functions.code)(program, code.as_mut_ptr().cast()) })?;
        Ok(code)
    }
}
