"""Compiles HIP source from standard input with hipRTC and writes the code object to standard output.

hipRTC aborts the process on an architecture that it does not know, so it runs in a process of its
own. No card is needed. `hiprtc_compile.py --check` succeeds if the library is there; otherwise the
arguments are options of hipRTC. Used by the emulator's tests.
"""

import ctypes
import sys

RUNTIMES = ["libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libamdhip64.so.5"]


def library():
    for name in RUNTIMES:
        try:
            found = ctypes.CDLL(name)
            if hasattr(found, "hiprtcCreateProgram"):
                return found
        except OSError:
            pass
    sys.exit("no hipRTC: tried " + ", ".join(RUNTIMES))


def main():
    rtc = library()
    if sys.argv[1:] == ["--check"]:
        return
    program = ctypes.c_void_p()
    source = sys.stdin.buffer.read()

    def check(call, status):
        if status != 0:
            size = ctypes.c_size_t()
            rtc.hiprtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value + 1)
            rtc.hiprtcGetProgramLog(program, log)
            sys.exit(f"{call} failed with status {status}\n" + log.value.decode(errors="replace"))

    check("hiprtcCreateProgram", rtc.hiprtcCreateProgram(ctypes.byref(program), source, b"kernels.hip", 0, None, None))
    options = [option.encode() for option in sys.argv[1:]]
    array = (ctypes.c_char_p * len(options))(*options)
    check("hiprtcCompileProgram", rtc.hiprtcCompileProgram(program, len(options), array))
    size = ctypes.c_size_t()
    check("hiprtcGetCodeSize", rtc.hiprtcGetCodeSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    check("hiprtcGetCode", rtc.hiprtcGetCode(program, code))
    sys.stdout.buffer.write(code.raw)


main()
