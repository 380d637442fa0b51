// HIP's names on an NVIDIA card: the functions that crates/kernels/src/gpu/hip uses, passed on to
// the CUDA driver and NVRTC. With it the host side of `hip:N` runs on a machine without an AMD card:
// the kernels are compiled as CUDA, everything around them is HIP's. It pretends to be a gfx906 of
// ROCm 6. Build and use (README.md beside this file):
//
//     cc -O2 -Wall -Wextra -Werror -shared -fPIC -o libamdhip64.so.6 hip_over_cuda.c -ldl -lpthread
//     LD_LIBRARY_PATH=$PWD:$LD_LIBRARY_PATH conform --on hip

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long address;

// hipError_t; CUDA's driver numbers the same errors alike as far as anybody reads them.
enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

#define DEVICES_MAX 64
#define ARCHITECTURE "gfx906:sramecc+:xnack-"
// Major * 10^7 + minor * 10^5 + patch.
#define VERSION 60200000

// Functions of the CUDA driver and of NVRTC; null if a library is missing.
static struct {
    int (*init)(uint);
    int (*count)(int *);
    int (*device)(int *, int);
    int (*name)(char *, int, int);
    int (*attribute)(int *, int, int);
    int (*memory)(size_t *, int);
    int (*retain)(void **, int);
    int (*set_context)(void *);
    int (*synchronize)(void);
    int (*allocate)(address *, size_t);
    int (*free)(address);
    int (*to_device)(address, const void *, size_t);
    int (*to_host)(void *, address, size_t);
    int (*to_device_later)(address, const void *, size_t, void *);
    int (*to_host_later)(void *, address, size_t, void *);
    int (*lock_pages)(void *, size_t, uint);
    int (*unlock_pages)(void *);
    int (*create_event)(void **, uint);
    int (*destroy_event)(void *);
    int (*record_event)(void *, void *);
    int (*wait_for_event)(void *);
    int (*fill)(address, unsigned char, size_t, void *);
    int (*load)(void **, const void *);
    int (*unload)(void *);
    int (*function)(void **, void *, const char *);
    int (*launch)(void *, uint, uint, uint, uint, uint, uint, uint, void *, void **, void **);
    int (*error_name)(int, const char **);
    int (*error_text)(int, const char **);
} cuda;

static struct {
    int (*create)(void **, const char *, const char *, int, const char **, const char **);
    int (*destroy)(void **);
    int (*compile)(void *, int, const char **);
    int (*code_size)(void *, size_t *);
    int (*code)(void *, char *);
    int (*log_size)(void *, size_t *);
    int (*log)(void *, char *);
    const char *(*error_text)(int);
} nvrtc;

static int ready;
static int compiler_ready;
static void *contexts[DEVICES_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Sets a function pointer; 0 if the library lacks the function.
static int find(void *library, const char *name, void *place) {
    void *found = dlsym(library, name);
    memcpy(place, &found, sizeof found);
    return found != NULL;
}

static void open_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    ready = library != NULL && find(library, "cuInit", &cuda.init) && find(library, "cuDeviceGetCount", &cuda.count)
        && find(library, "cuDeviceGet", &cuda.device) && find(library, "cuDeviceGetName", &cuda.name)
        && find(library, "cuDeviceGetAttribute", &cuda.attribute)
        && find(library, "cuDeviceTotalMem_v2", &cuda.memory)
        && find(library, "cuDevicePrimaryCtxRetain", &cuda.retain)
        && find(library, "cuCtxSetCurrent", &cuda.set_context) && find(library, "cuCtxSynchronize", &cuda.synchronize)
        && find(library, "cuMemAlloc_v2", &cuda.allocate) && find(library, "cuMemFree_v2", &cuda.free)
        && find(library, "cuMemcpyHtoD_v2", &cuda.to_device) && find(library, "cuMemcpyDtoH_v2", &cuda.to_host)
        && find(library, "cuMemcpyHtoDAsync_v2", &cuda.to_device_later)
        && find(library, "cuMemcpyDtoHAsync_v2", &cuda.to_host_later)
        && find(library, "cuMemHostRegister_v2", &cuda.lock_pages)
        && find(library, "cuMemHostUnregister", &cuda.unlock_pages)
        && find(library, "cuEventCreate", &cuda.create_event)
        && find(library, "cuEventDestroy_v2", &cuda.destroy_event)
        && find(library, "cuEventRecord", &cuda.record_event)
        && find(library, "cuEventSynchronize", &cuda.wait_for_event)
        && find(library, "cuMemsetD8Async", &cuda.fill) && find(library, "cuModuleLoadData", &cuda.load)
        && find(library, "cuModuleUnload", &cuda.unload) && find(library, "cuModuleGetFunction", &cuda.function)
        && find(library, "cuLaunchKernel", &cuda.launch) && find(library, "cuGetErrorName", &cuda.error_name)
        && find(library, "cuGetErrorString", &cuda.error_text) && cuda.init(0) == 0;
}

static void open_nvrtc(void) {
    static const char *const NAMES[] = {"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"};
    void *library = NULL;
    for (size_t i = 0; library == NULL && i < sizeof NAMES / sizeof NAMES[0]; i++) {
        library = dlopen(NAMES[i], RTLD_NOW | RTLD_LOCAL);
    }
    compiler_ready = library != NULL && find(library, "nvrtcCreateProgram", &nvrtc.create)
        && find(library, "nvrtcDestroyProgram", &nvrtc.destroy) && find(library, "nvrtcCompileProgram", &nvrtc.compile)
        && find(library, "nvrtcGetCUBINSize", &nvrtc.code_size) && find(library, "nvrtcGetCUBIN", &nvrtc.code)
        && find(library, "nvrtcGetProgramLogSize", &nvrtc.log_size) && find(library, "nvrtcGetProgramLog", &nvrtc.log)
        && find(library, "nvrtcGetErrorString", &nvrtc.error_text);
}

static int has_cuda(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_cuda);
    return ready;
}

static int has_nvrtc(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_nvrtc);
    return compiler_ready;
}

// The driver's handle of a device, which is its number as far as anybody has seen.
static int handle(int device, int *found) {
    return has_cuda() ? cuda.device(found, device) : NO_DEVICE;
}

int hipGetDeviceCount(int *count) {
    *count = 0;
    int status = has_cuda() ? cuda.count(count) : NO_DEVICE;
    return status == SUCCESS && *count == 0 ? NO_DEVICE : status;
}

int hipRuntimeGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

int hipDriverGetVersion(int *version) {
    *version = VERSION;
    return SUCCESS;
}

// HIP has no contexts: a device's primary one is current on a thread from here on.
int hipSetDevice(int device) {
    int found, status = handle(device, &found);
    if (status != SUCCESS || device < 0 || device >= DEVICES_MAX) {
        return status != SUCCESS ? status : INVALID_DEVICE;
    }
    pthread_mutex_lock(&lock);
    if (contexts[device] == NULL) {
        status = cuda.retain(&contexts[device], found);
    }
    pthread_mutex_unlock(&lock);
    return status == SUCCESS ? cuda.set_context(contexts[device]) : status;
}

int hipDeviceGetName(char *name, int length, int device) {
    int found, status = handle(device, &found);
    return status == SUCCESS ? cuda.name(name, length, found) : status;
}

int hipDeviceGetAttribute(int *value, int attribute, int device) {
    // Compute units; PCI bus, device and domain: HIP's number, then CUDA's.
    static const int PAIRS[][2] = {{63, 16}, {67, 33}, {68, 34}, {69, 50}};
    int found, status = handle(device, &found);
    for (size_t i = 0; i < sizeof PAIRS / sizeof PAIRS[0]; i++) {
        if (PAIRS[i][0] == attribute) {
            return status == SUCCESS ? cuda.attribute(value, PAIRS[i][1], found) : status;
        }
    }
    return INVALID_VALUE;
}

int hipDeviceTotalMem(size_t *bytes, int device) {
    int found, status = handle(device, &found);
    return status == SUCCESS ? cuda.memory(bytes, found) : status;
}

// The layout of ROCm 6 and 7: 1472 bytes.
int hipGetDevicePropertiesR0600(void *properties, int device) {
    char *at = properties;
    size_t memory = 0;
    int units = 0, warp = 64;
    memset(at, 0, 1472);
    int status = hipDeviceGetName(at, 256, device);
    status = status == SUCCESS ? hipDeviceTotalMem(&memory, device) : status;
    status = status == SUCCESS ? hipDeviceGetAttribute(&units, 63, device) : status;
    memcpy(at + 288, &memory, sizeof memory);
    memcpy(at + 308, &warp, sizeof warp);
    memcpy(at + 388, &units, sizeof units);
    strcpy(at + 1160, ARCHITECTURE);
    return status;
}

int hipDeviceSynchronize(void) {
    return has_cuda() ? cuda.synchronize() : NO_DEVICE;
}

int hipMalloc(void **pointer, size_t bytes) {
    address found = 0;
    int status = has_cuda() ? cuda.allocate(&found, bytes) : NO_DEVICE;
    *pointer = (void *)(size_t)found;
    return status;
}

int hipFree(void *pointer) {
    return has_cuda() ? cuda.free((address)(size_t)pointer) : NO_DEVICE;
}

int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    if (!has_cuda()) {
        return NO_DEVICE;
    }
    switch (kind) {
    case 1:
        return cuda.to_device((address)(size_t)to, from, bytes);
    case 2:
        return cuda.to_host(to, (address)(size_t)from, bytes);
    default:
        return NOT_SUPPORTED;
    }
}

int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    if (!has_cuda()) {
        return NO_DEVICE;
    }
    switch (kind) {
    case 1:
        return cuda.to_device_later((address)(size_t)to, from, bytes, stream);
    case 2:
        return cuda.to_host_later(to, (address)(size_t)from, bytes, stream);
    default:
        return NOT_SUPPORTED;
    }
}

int hipHostRegister(void *host, size_t bytes, uint flags) {
    return has_cuda() ? cuda.lock_pages(host, bytes, flags) : NO_DEVICE;
}

int hipHostUnregister(void *host) {
    return has_cuda() ? cuda.unlock_pages(host) : NO_DEVICE;
}

// Both number the flag that turns timing off alike.
int hipEventCreateWithFlags(void **event, uint flags) {
    return has_cuda() ? cuda.create_event(event, flags) : NO_DEVICE;
}

int hipEventDestroy(void *event) {
    return has_cuda() ? cuda.destroy_event(event) : NO_DEVICE;
}

int hipEventRecord(void *event, void *stream) {
    return has_cuda() ? cuda.record_event(event, stream) : NO_DEVICE;
}

int hipEventSynchronize(void *event) {
    return has_cuda() ? cuda.wait_for_event(event) : NO_DEVICE;
}

int hipMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    return has_cuda() ? cuda.fill((address)(size_t)to, (unsigned char)value, bytes, stream) : NO_DEVICE;
}

int hipModuleLoadData(void **module, const void *image) {
    return has_cuda() ? cuda.load(module, image) : NO_DEVICE;
}

int hipModuleUnload(void *module) {
    return has_cuda() ? cuda.unload(module) : NO_DEVICE;
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
    return has_cuda() ? cuda.function(function, module, name) : NO_DEVICE;
}

int hipModuleLaunchKernel(
    void *function, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *stream, void **params,
    void **extra
) {
    // As HIP does: work items are counted in 32 bits.
    if ((address)gx * bx > 0xffffffffu) {
        return 9;
    }
    return has_cuda() ? cuda.launch(function, gx, gy, gz, bx, by, bz, shared, stream, params, extra) : NO_DEVICE;
}

const char *hipGetErrorName(int status) {
    const char *text = NULL;
    return has_cuda() && cuda.error_name(status, &text) == 0 && text != NULL ? text : "unknown";
}

const char *hipGetErrorString(int status) {
    const char *text = NULL;
    return has_cuda() && cuda.error_text(status, &text) == 0 && text != NULL ? text : "unknown error";
}

int hiprtcCreateProgram(
    void **program, const char *source, const char *name, int count, const char **headers, const char **names
) {
    return has_nvrtc() ? nvrtc.create(program, source, name, count, headers, names) : 2;
}

int hiprtcDestroyProgram(void **program) {
    return has_nvrtc() ? nvrtc.destroy(program) : 4;
}

// NVRTC's words for hipRTC's options; what both know is passed on.
int hiprtcCompileProgram(void *program, int count, const char **options) {
    char architecture[64];
    int major = 0, minor = 0, device, written = 0;
    if (!has_nvrtc() || handle(0, &device) != 0 || cuda.attribute(&major, 75, device) != 0
        || cuda.attribute(&minor, 76, device) != 0) {
        return 11;
    }
    const char **line = malloc(((size_t)count * 4 + 2) * sizeof *line);
    if (line == NULL) {
        return 1;
    }
    snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d%d", major, minor);
    line[written++] = "--std=c++17";
    for (int i = 0; i < count; i++) {
        if (strncmp(options[i], "--offload-arch=", 15) == 0) {
            line[written++] = architecture;
        } else if (strcmp(options[i], "-ffp-contract=off") == 0) {
            line[written++] = "--fmad=false";
            line[written++] = "--ftz=false";
            line[written++] = "--prec-div=true";
            line[written++] = "--prec-sqrt=true";
        } else if (strcmp(options[i], "-O3") != 0) {
            line[written++] = options[i];
        }
    }
    int status = nvrtc.compile(program, written, line);
    free(line);
    return status;
}

int hiprtcGetCodeSize(void *program, size_t *bytes) {
    return has_nvrtc() ? nvrtc.code_size(program, bytes) : 4;
}

int hiprtcGetCode(void *program, char *code) {
    return has_nvrtc() ? nvrtc.code(program, code) : 4;
}

int hiprtcGetProgramLogSize(void *program, size_t *bytes) {
    return has_nvrtc() ? nvrtc.log_size(program, bytes) : 4;
}

int hiprtcGetProgramLog(void *program, char *log) {
    return has_nvrtc() ? nvrtc.log(program, log) : 4;
}

const char *hiprtcGetErrorString(int status) {
    return has_nvrtc() ? nvrtc.error_text(status) : "no NVRTC library found";
}
