//! NVRTC: CUDA C++ to machine code for one architecture.

use super::super::library::{functions, open};
use super::super::runtime::{Answer, Language};
use super::{Object, Status};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};

functions!(Compiler {
    version = c"nvrtcVersion" (*mut c_int, *mut c_int) -> Status;
    create = c"nvrtcCreateProgram" (*mut Object, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    destroy = c"nvrtcDestroyProgram" (*mut Object) -> Status;
    compile = c"nvrtcCompileProgram" (Object, c_int, *const *const c_char) -> Status;
    code_size = c"nvrtcGetCUBINSize" (Object, *mut usize) -> Status;
    code = c"nvrtcGetCUBIN" (Object, *mut c_char) -> Status;
    log_size = c"nvrtcGetProgramLogSize" (Object, *mut usize) -> Status;
    log = c"nvrtcGetProgramLog" (Object, *mut c_char) -> Status;
    error_text = c"nvrtcGetErrorString" (Status) -> *const c_char;
});

impl Compiler {
    pub(super) fn open() -> Result<Self, String> {
        const NAMES: [&str; 6] = [
            "libnvrtc.so",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "libnvrtc.so.11.2",
            "nvrtc64_130_0.dll",
            "nvrtc64_120_0.dll",
        ];
        const FOLDER: &str = "/usr/local/cuda/lib64/libnvrtc.so";
        let library = open(&NAMES).or_else(|| open(&[FOLDER])).ok_or("no NVRTC library found")?;
        Self::load(library)
    }

    pub(super) fn version(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: `major` and `minor` have room for a number each.
        unsafe { (self.version)(&raw mut major, &raw mut minor) };
        format!("NVRTC {major}.{minor}")
    }

    fn check(&self, what: &str, status: Status) -> Answer<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: for every status the compiler gives a constant string of its own, which ends with
        // a zero.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) }.to_string_lossy();
        Err(format!("{what} failed: {text}"))
    }

    fn log(&self, program: Object) -> String {
        let mut size = 0;
        // SAFETY: `size` has room for the number; the program is the caller's, not yet destroyed.
        let status = unsafe { (self.log_size)(program, &raw mut size) };
        if status != 0 || size > 1 << 20 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the vector has the size that the compiler stated for this program's log.
        unsafe { (self.log)(program, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string()
    }

    /// Machine code of `source` for one architecture, and what the compiler says about it.
    pub(super) fn machine_code(&self, source: &str, options: &[String]) -> Answer<(Vec<u8>, String)> {
        let source = CString::new(source).map_err(|error| error.to_string())?;
        let mut program = null_mut();
        // SAFETY: `program` has room for the handle; source and name end with a zero and live until
        // the call returns; there are no headers.
        self.check("nvrtcCreateProgram", unsafe {
            (self.create)(&raw mut program, source.as_ptr(), c"isobit.cu".as_ptr(), 0, null(), null())
        })?;
        let code = self.code_of(program, options);
        // SAFETY: made above and destroyed once; nothing uses it after.
        unsafe { (self.destroy)(&raw mut program) };
        code
    }

    fn code_of(&self, program: Object, options: &[String]) -> Answer<(Vec<u8>, String)> {
        let options: Result<Vec<_>, _> = options.iter().map(|option| CString::new(option.as_str())).collect();
        let options = options.map_err(|error| error.to_string())?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: as many pointers as stated, each to an option that ends with a zero and outlives
        // the call.
        let status = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        self.check("nvrtcCompileProgram", status).map_err(|error| format!("{error}\n{}", self.log(program)))?;
        let mut size = 0;
        // SAFETY: `size` has room for the number; the program was compiled.
        self.check("nvrtcGetCUBINSize", unsafe { (self.code_size)(program, &raw mut size) })?;
        let mut code = vec![0u8; size];
        // SAFETY: the vector has the size that the compiler stated for this program's code.
        self.check("nvrtcGetCUBIN", unsafe { (self.code)(program, code.as_mut_ptr().cast()) })?;
        Ok((code, self.log(program)))
    }
}

/// The compiler's arguments for a program.
pub(super) fn command_line((major, minor): (u32, u32), language: Language, options: &[String]) -> Vec<String> {
    let own = if language == Language::Native { "a" } else { "" };
    let mut line: Vec<String> = [
        format!("--gpu-architecture=sm_{major}{minor}{own}"),
        "--std=c++17".to_string(),
        // The bits depend on these: no contraction, subnormals kept, division and square root
        // correctly rounded.
        "--fmad=false".to_string(),
        "--ftz=false".to_string(),
        "--prec-div=true".to_string(),
        "--prec-sqrt=true".to_string(),
    ]
    .to_vec();
    line.extend_from_slice(options);
    line
}
