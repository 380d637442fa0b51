// A CUDA driver and NVRTC without a card, under tools/hip_over_cuda: memory is the host's, and the
// one kernel that runs is the probe. FAKE_HIP_LOG names a file that gets a line for every call of
// interest.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long address;

static int current;

static int note(const char *text, int status) {
    const char *path = getenv("FAKE_HIP_LOG");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    if (file != NULL) {
        fprintf(file, "%s\n", text);
        fclose(file);
    }
    return status;
}

int cuInit(uint flags) {
    return (int)flags;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int index) {
    *device = index;
    return index == 0 ? 0 : 101;
}

int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "Fake H200 %d", device);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
    return device;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)8 << 30;
    return device;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &current;
    return note("retain", device);
}

int cuCtxSetCurrent(void *context) {
    current = context == &current;
    return current ? 0 : 201;
}

// As the driver: nothing works on a thread without a context.
static int checked(int status) {
    return current ? status : 201;
}

int cuCtxSynchronize(void) {
    return checked(0);
}

int cuMemAlloc_v2(address *pointer, size_t bytes) {
    *pointer = (address)(size_t)aligned_alloc(4096, bytes);
    return checked(0);
}

int cuMemFree_v2(address pointer) {
    free((void *)(size_t)pointer);
    return note("free", checked(0));
}

int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) {
    memcpy((void *)(size_t)to, from, bytes);
    return checked(0);
}

int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) {
    memcpy(to, (void *)(size_t)from, bytes);
    return checked(0);
}

int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, bytes);
}

int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, bytes);
}

int cuMemHostRegister_v2(void *host, size_t bytes, uint flags) {
    (void)host, (void)bytes, (void)flags;
    return 0;
}

int cuMemHostUnregister(void *host) {
    (void)host;
    return 0;
}

int cuEventCreate(void **event, uint flags) {
    *event = &current;
    return flags == 2 ? checked(0) : 1;
}

int cuEventDestroy_v2(void *event) {
    return event == &current ? 0 : 400;
}

int cuEventRecord(void *event, void *stream) {
    return event == &current && stream == NULL ? checked(0) : 400;
}

int cuEventSynchronize(void *event) {
    return event == &current ? checked(0) : 400;
}

int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) {
    memset((void *)(size_t)to, value, bytes);
    return stream == NULL ? checked(0) : 400;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = &current;
    return note("load", strcmp(image, "\177ELF cubin") == 0 ? checked(0) : 200);
}

int cuModuleUnload(void *module) {
    return note("unload", module == &current ? 0 : 400);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "probe") == 0 ? 0 : 500;
}

int cuLaunchKernel(
    void *function, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *stream, void **params,
    void **extra
) {
    // Results of gpu/probe.cl.
    static const uint RESULTS[12] = {0x28800000, 0,          0x00400000, 0x01400000, 0x3f93eee0, 1,
                                     0x3fb504f3, 0x1a9cc471, 0x4b800002, 0xffffbe77, 6,          0x00400004};
    if (function != &current || gx * gy * gz * bx * by * bz != 1 || shared != 0 || stream != NULL || extra != NULL) {
        return 1;
    }
    memcpy(*(void **)params[0], RESULTS, sizeof RESULTS);
    return note("launch", checked(0));
}

int cuGetErrorName(int status, const char **text) {
    *text = "CUDA_ERROR_OF_THE_FAKE";
    return status == 0;
}

int cuGetErrorString(int status, const char **text) {
    *text = "a fake error";
    return status == 0;
}

int nvrtcCreateProgram(
    void **program, const char *source, const char *name, int count, const char **headers, const char **names
) {
    (void)name, (void)headers, (void)names;
    *program = malloc(1);
    return strstr(source, "probe(") != NULL ? count : 3;
}

int nvrtcDestroyProgram(void **program) {
    free(*program);
    return 0;
}

int nvrtcCompileProgram(void *program, int count, const char **options) {
    static const char *const WANTED[] = {"--std=c++17",    "--gpu-architecture=sm_90", "--fmad=false", "--ftz=false",
                                         "--prec-div=true", "--prec-sqrt=true",         "-DSLICES=2"};
    (void)program;
    int same = count == (int)(sizeof WANTED / sizeof WANTED[0]);
    for (int i = 0; same && i < count; i++) {
        same = strcmp(options[i], WANTED[i]) == 0;
    }
    return note("compile", same ? 0 : 5);
}

int nvrtcGetCUBINSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = sizeof "\177ELF cubin";
    return 0;
}

int nvrtcGetCUBIN(void *program, char *code) {
    (void)program;
    strcpy(code, "\177ELF cubin");
    return 0;
}

int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = 0;
    return 0;
}

int nvrtcGetProgramLog(void *program, char *log) {
    (void)program, (void)log;
    return 0;
}

const char *nvrtcGetErrorString(int status) {
    return status == 5 ? "NVRTC_ERROR_INVALID_OPTION" : "NVRTC_ERROR_OF_THE_FAKE";
}
