// A HIP runtime and hipRTC without a card, for tests: memory is the host's, a code object carries a
// salt instead of code, and the one kernel that runs is the probe. Variables of the environment say
// what goes wrong; FAKE_HIP_LOG names a file that gets a line for every call of interest.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value != NULL ? value : otherwise;
}

static int is(const char *variable, const char *call) {
    return strcmp(setting(variable, ""), call) == 0;
}

// Whether this is `isobit train`, and not a child of it that looks whether the runtime works.
static int trains(void) {
    char line[512] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    if (file != NULL) {
        (void)!fread(line, 1, sizeof line - 8, file);
        fclose(file);
    }
    return strcmp(line + strlen(line) + 1, "train") == 0;
}

// Whether a call fails; it may not even come back.
static int fails(const char *call) {
    if (is("FAKE_HIP_CRASHES", call)) {
        *(volatile int *)8 = 1;
    }
    if (is("FAKE_HIP_ABORTS", call)) {
        fprintf(stderr, "%s: assertion failed\n", call);
        abort();
    }
    if (is("FAKE_HIP_EXITS", call) && trains()) {
        exit(1);
    }
    while (is("FAKE_HIP_HANGS", call)) {
        sleep(1);
    }
    // As fast as it can, or a line now and then.
    for (int quick = is("FAKE_HIP_FLOODS", call); quick || is("FAKE_HIP_CHATS", call);) {
        puts("warning: something is odd");
        if (!quick) {
            fflush(stdout);
            usleep(5000);
        }
    }
    return is("FAKE_HIP_FAILS", call);
}

static void note(const char *text) {
    const char *path = getenv("FAKE_HIP_LOG");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    if (file != NULL) {
        fprintf(file, "%s\n", text);
        fclose(file);
    }
}

__attribute__((constructor)) static void opened(void) {
    note("opened");
    fails("constructor");
}

__attribute__((destructor)) static void closed(void) {
    fails("destructor");
}

int hipGetDeviceCount(int *count) {
    *count = atoi(setting("FAKE_HIP_COUNT", "1"));
    return fails("hipGetDeviceCount") ? 999 : *count == 0 ? 100 : 0;
}

int hipRuntimeGetVersion(int *version) {
    *version = atoi(setting("FAKE_HIP_VERSION", "60241134"));
    return 0;
}

int hipDriverGetVersion(int *version) {
    return hipRuntimeGetVersion(version);
}

int hipSetDevice(int device) {
    return fails("hipSetDevice") || device < 0 ? 101 : 0;
}

int hipDeviceGetName(char *name, int length, int device) {
    snprintf(name, (size_t)length, "Fake Instinct %d", device);
    return 0;
}

int hipDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 63 ? 60 : 0;
    return fails("hipDeviceGetAttribute") ? 1 : 0;
}

int hipDeviceTotalMem(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)16 << 30;
    return 0;
}

#ifdef OLD_LAYOUT
#define ARCHITECTURE_OFFSET 396
int hipGetDeviceProperties(void *properties, int device)
#else
#define ARCHITECTURE_OFFSET 1160
int hipGetDevicePropertiesR0600(void *properties, int device)
#endif
{
    (void)device;
    strcpy((char *)properties + ARCHITECTURE_OFFSET, setting("FAKE_HIP_ARCHITECTURE", "gfx906:sramecc+:xnack-"));
    return fails("hipGetDeviceProperties") ? 1 : 0;
}

int hipDeviceSynchronize(void) {
    return fails("hipDeviceSynchronize") ? 719 : 0;
}

int hipMalloc(void **pointer, size_t bytes) {
    if (fails("hipMalloc")) {
        return 2;
    }
    *pointer = aligned_alloc(4096, bytes);
    memset(*pointer, 0xa5, bytes);
    return 0;
}

int hipFree(void *pointer) {
    fails("hipFree");
    free(pointer);
    note("free");
    return 0;
}

int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    if (fails("hipMemcpy") || (kind != 1 && kind != 2)) {
        return 1;
    }
    memcpy(to, from, bytes);
    return 0;
}

int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    return hipMemcpy(to, from, bytes, kind);
}

int hipHostRegister(void *host, size_t bytes, unsigned flags) {
    (void)host, (void)bytes, (void)flags;
    fails("hipHostRegister");
    note("lock");
    return 0;
}

int hipHostUnregister(void *host) {
    (void)host;
    note("unlock");
    return 0;
}

int hipEventCreateWithFlags(void **event, unsigned flags) {
    *event = malloc(1);
    return fails("hipEventCreateWithFlags") || flags != 2 ? 1 : 0;
}

int hipEventRecord(void *event, void *stream) {
    return event == NULL || stream != NULL || fails("hipEventRecord") ? 1 : 0;
}

int hipEventSynchronize(void *event) {
    note("wait");
    return event == NULL || fails("hipEventSynchronize") ? 719 : 0;
}

int hipEventDestroy(void *event) {
    free(event);
    return 0;
}

int hipMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    (void)stream;
    fails("hipMemsetAsync");
    memset(to, value, bytes);
    return 0;
}

// A code object: the ELF mark, then the salt.
#define CODE "\177ELF fake "

int hipModuleLoadData(void **module, const void *image) {
    static int loaded;
    note("load");
    fails("hipModuleLoadData");
    const char *code = image;
    if (strncmp(code, CODE, strlen(CODE)) != 0 || strcmp(code + strlen(CODE), setting("FAKE_HIP_SALT", "")) != 0) {
        return 209;
    }
    *module = &loaded;
    return 0;
}

int hipModuleUnload(void *module) {
    (void)module;
    note("unload");
    return 0;
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
    static int probe;
    *function = module != NULL && strcmp(name, "probe") == 0 ? &probe : NULL;
    return *function != NULL ? 0 : 500;
}

#ifndef WITHOUT_LAUNCH
int hipModuleLaunchKernel(
    void *function, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *stream, void **params,
    void **extra
) {
    // Results of gpu/probe.cl, as a device gives them that rounds correctly.
    static const uint RESULTS[12] = {0x28800000, 0,          0x00400000, 0x01400000, 0x3f93eee0, 1,
                                     0x3fb504f3, 0x1a9cc471, 0x4b800002, 0xffffbe77, 6,          0x00400004};
    if (function == NULL || fails("hipModuleLaunchKernel") || gx * gy * gz != 1 || bx * by * bz != 1 || shared != 0
        || stream != NULL || extra != NULL) {
        return 1;
    }
    memcpy(*(void **)params[0], RESULTS, sizeof RESULTS);
    if (fails("arithmetic")) {
        (*(uint **)params[0])[4] ^= 1u;
    }
    note("launch");
    return 0;
}
#endif

const char *hipGetErrorName(int status) {
    return status == 2 ? "hipErrorOutOfMemory" : status == 209 ? "hipErrorNoBinaryForGpu" : "hipErrorOfTheFake";
}

const char *hipGetErrorString(int status) {
    return status == 2 ? "out of memory" : "a fake error";
}

int hiprtcCreateProgram(void **program, const char *source, const char *name, int count, const char **headers, const char **names) {
    (void)name, (void)count, (void)headers, (void)names;
    if (strstr(source, "probe(") == NULL) {
        note("another program");
        fails("another program");
        return 3;
    }
    *program = malloc(1);
    return 0;
}

int hiprtcDestroyProgram(void **program) {
    free(*program);
    return 0;
}

int hiprtcCompileProgram(void *program, int count, const char **options) {
    int arch = 0, contract = 0;
    (void)program;
    for (int i = 0; i < count; i++) {
        arch |= strcmp(options[i], "--offload-arch=gfx906") == 0;
        contract |= strcmp(options[i], "-ffp-contract=off") == 0;
    }
    note("compile");
    // A library may print what it likes.
    printf("a line of the compiler\n");
    fflush(stdout);
    if (fails("abort")) {
        fprintf(stderr, "munmap_chunk(): invalid pointer\n");
        abort();
    }
    return fails("hiprtcCompileProgram") || !arch || !contract ? 6 : 0;
}

int hiprtcGetProgramLogSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = 22;
    return 0;
}

int hiprtcGetProgramLog(void *program, char *log) {
    (void)program;
    memcpy(log, "the log of the fake\n:(", 22);
    return 0;
}

int hiprtcGetCodeSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = strlen(CODE) + strlen(setting("FAKE_HIP_SALT", "")) + 1;
    return 0;
}

int hiprtcGetCode(void *program, char *code) {
    (void)program;
    strcpy(code, CODE);
    strcat(code, setting("FAKE_HIP_SALT", ""));
    return 0;
}

const char *hiprtcGetErrorString(int status) {
    return status == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_ERROR_OF_THE_FAKE";
}
