// Stands before a CUDA program that is compiled for a CPU: the words of CUDA C++ that the kernels
// use, and the instructions of gpu/mma.cuh. What concerns more than one thread is a call into
// engine.cpp. No headers: a program is compiled once per set of options, and that should be quick.

#define __CUDA_ARCH__ 800
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// The mark by which the host finds the kernels of a program.
#define __global__ __attribute__((annotate("simt kernel")))
// The host writes SIMT_DYNAMIC for `extern __shared__`, whose memory stands behind the program.
#define __shared__ static __attribute__((section("simt_shared")))
#define SIMT_DYNAMIC extern __attribute__((visibility("hidden")))

struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};

// As the engine takes and gives them: in registers.
typedef float SimtFloats __attribute__((ext_vector_type(4)));
typedef int SimtInts __attribute__((ext_vector_type(4)));
typedef unsigned SimtWords __attribute__((ext_vector_type(4)));

// ---------------------------------------------------------------------------------------------------------------------
// The engine

extern "C" {
// The same for all that a thread asks: the compiler may keep them.
unsigned simt_thread(void) __attribute__((const));
unsigned simt_block(void) __attribute__((const));
unsigned simt_threads(void) __attribute__((const));
unsigned simt_blocks(void) __attribute__((const));
void simt_barrier(void);
void simt_warp_barrier(unsigned mask);
// The value of another lane; `source` is the lane to take, or this one's own where it takes none.
unsigned simt_shuffle(unsigned mask, unsigned value, unsigned source);
unsigned simt_reduce_max(unsigned mask, unsigned value);
SimtWords simt_load_matrices(unsigned address);
SimtInts simt_multiply_bytes(SimtInts sums, SimtWords a, unsigned b0, unsigned b1);
void simt_copy(unsigned to, const void *from, unsigned bytes);
void simt_copies_end(void);
void simt_copies_wait(unsigned pending);
unsigned simt_shared_address(const void *pointer);
SimtFloats simt_load_floats(unsigned address);
}

struct SimtThread {
    struct {
        inline __attribute__((always_inline)) operator unsigned() const { return simt_thread(); }
    } x;
};
struct SimtBlock {
    struct {
        inline __attribute__((always_inline)) operator unsigned() const { return simt_block(); }
    } x;
};
struct SimtThreads {
    struct {
        inline __attribute__((always_inline)) operator unsigned() const { return simt_threads(); }
    } x;
};
struct SimtBlocks {
    struct {
        inline __attribute__((always_inline)) operator unsigned() const { return simt_blocks(); }
    } x;
};
#define threadIdx (SimtThread())
#define blockIdx (SimtBlock())
#define blockDim (SimtThreads())
#define gridDim (SimtBlocks())

#define SIMT_INLINE static inline __attribute__((always_inline))

SIMT_INLINE void __syncthreads(void) { simt_barrier(); }
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { simt_warp_barrier(mask); }
SIMT_INLINE unsigned __cvta_generic_to_shared(const void *pointer) { return simt_shared_address(pointer); }

template <class T> SIMT_INLINE T simt_take(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4, "shuffles of 32 bits");
    return __builtin_bit_cast(T, simt_shuffle(mask, __builtin_bit_cast(unsigned, value), source));
}
template <class T> SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    unsigned lane = simt_thread() % 32u;
    return simt_take(mask, value, (lane & ~(width - 1u)) | ((unsigned)source & (width - 1u)));
}
template <class T> SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int other) {
    return simt_take(mask, value, simt_thread() % 32u ^ (unsigned)other);
}
template <class T> SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    unsigned lane = simt_thread() % 32u, inside = lane & (width - 1u);
    return simt_take(mask, value, inside + by < (unsigned)width ? lane + by : lane);
}
SIMT_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned value) { return simt_reduce_max(mask, value); }

// ---------------------------------------------------------------------------------------------------------------------
// One thread

SIMT_INLINE float2 make_float2(float x, float y) { return float2{x, y}; }
SIMT_INLINE float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
SIMT_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
SIMT_INLINE float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
SIMT_INLINE unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }
SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIMT_INLINE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
SIMT_INLINE float __int2float_rn(int x) { return (float)x; }
SIMT_INLINE unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
SIMT_INLINE unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
template <class T> SIMT_INLINE T __ldg(const T *from) { return *from; }
template <class T> SIMT_INLINE void __stcs(T *to, T value) { *to = value; }

SIMT_INLINE int __dp4a(int a, int b, int sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (int)(signed char)(a >> shift) * (int)(signed char)(b >> shift);
    return sum;
}

// Byte i of the result is byte number `selector >> 4 i` of y:x, or its sign.
SIMT_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned which = selector >> 4 * i & 15u, byte = (unsigned)(both >> 8 * (which & 7u)) & 255u;
        if (which & 8u) byte = byte & 128u ? 255u : 0u;
        result |= byte << 8 * i;
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// gpu/mma.cuh

SIMT_INLINE void copy_16(unsigned to, const void *from) { simt_copy(to, from, 16u); }
SIMT_INLINE void copy_16_or_zeros(unsigned to, const void *from, bool there) { simt_copy(to, from, there ? 16u : 0u); }
SIMT_INLINE void copies_end(void) { simt_copies_end(); }
template <int PENDING> SIMT_INLINE void copies_wait(void) { simt_copies_wait(PENDING); }
SIMT_INLINE unsigned lane_index(void) { return simt_thread() % 32u; }
SIMT_INLINE void load_matrices(unsigned (&to)[4], unsigned address) {
    SimtWords four = simt_load_matrices(address);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
SIMT_INLINE void multiply_bytes(int *sums, const unsigned (&a)[4], unsigned b0, unsigned b1) {
    SimtInts four = simt_multiply_bytes(SimtInts{sums[0], sums[1], sums[2], sums[3]}, SimtWords{a[0], a[1], a[2], a[3]}, b0, b1);
    sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
}
SIMT_INLINE void load_floats(float *to, unsigned address) {
    SimtFloats four = simt_load_floats(address);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
SIMT_INLINE float larger_or_nan(float a, float b) {
    if (a != a || b != b) return __uint_as_float(0x7fffffffu);
    // Zeros by sign: the larger one is positive.
    return a > b || (a == b && !(__float_as_uint(a) >> 31)) ? a : b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels as the host calls them

struct SimtEntry {
    void (*run)(void *const *arguments);
    unsigned count;
    const unsigned *bytes;   // of each parameter
};

template <class T> struct SimtPlain { typedef T type; };
template <class T> struct SimtPlain<const T> { typedef T type; };
template <class T, T... I> struct SimtSequence {};

template <class... P> struct SimtKernel {
    template <void (*kernel)(P...), unsigned... I>
    __attribute__((no_sanitize("thread"))) static void unpack(void *const *arguments, SimtSequence<unsigned, I...>) {
        kernel(*(typename SimtPlain<P>::type *)arguments[I]...);
    }
    template <void (*kernel)(P...)> static void run(void *const *arguments) {
        unpack<kernel>(arguments, __make_integer_seq<SimtSequence, unsigned, sizeof...(P)>());
    }
    static constexpr unsigned bytes[] = {(unsigned)sizeof(P)...};
    static constexpr unsigned count = sizeof...(P);
};
template <class... P> SimtKernel<P...> simt_kernel_of(void (*)(P...));

#define SIMT_ENTRY(kernel) \
    extern "C" __attribute__((visibility("default"))) const SimtEntry simt_entry_##kernel = { \
        decltype(simt_kernel_of(kernel))::run<kernel>, decltype(simt_kernel_of(kernel))::count, \
        decltype(simt_kernel_of(kernel))::bytes};
