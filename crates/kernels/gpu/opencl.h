// Dialect of OpenCL C 1.2 and later. Kernels are written in OpenCL C with the words below; cuda.h
// gives the same words a meaning in CUDA C++ and HIP.

#pragma OPENCL FP_CONTRACT OFF

// A kernel whose groups have a fixed number of work items.
#define KERNEL(group) __kernel __attribute__((reqd_work_group_size(group, 1, 1))) void
#define FUNCTION static inline
#define GLOBAL __global
#define GLOBAL_SPACE __global
// A variable shared by the group, and a pointer to one.
#define LOCAL __local
#define LOCAL_POINTER __local
#define TABLE __constant
// Before the type of a shared array that load4 reads.
#define ALIGNED __attribute__((aligned(16)))

// to[0 .. 4] = from[0 .. 4]; `from` is a multiple of 16 bytes. One access where the dialect has
// such.
#define load4(to, from) \
    do { \
        for (uint four = 0u; four < 4u; four++) { \
            (to)[four] = (from)[four]; \
        } \
    } while (0)

#if defined(__AMDGCN__)
// Straight to the compiler's own functions: the audit compiles without AMD's device library.
#define local_index() ((uint)__builtin_amdgcn_workitem_id_x())
#define group_index() ((uint)__builtin_amdgcn_workgroup_id_x())
#define barrier_local() \
    do { \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
        __builtin_amdgcn_s_barrier(); \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
    } while (0)
#define fma_rn(a, b, c) __builtin_fmaf(a, b, c)
#else
#define local_index() ((uint)get_local_id(0))
#define group_index() ((uint)get_group_id(0))
#define barrier_local() barrier(CLK_LOCAL_MEM_FENCE)
#define fma_rn(a, b, c) fma((float)(a), (float)(b), (float)(c))
#define hardware_sqrt(x) sqrt((float)(x))
#endif

// Within a few ULP, of arguments far from subnormal: exact.h corrects them.
#if defined(__AMDGCN__)
#define reciprocal_estimate(x) __builtin_amdgcn_rcpf(x)
#define root_estimate(x) __builtin_amdgcn_sqrtf(x)
// Four bytes of eight by their numbers, those of `low` from 0 on; where a device has no such
// instruction it is not defined.
#define permute_bytes(high, low, numbers) __builtin_amdgcn_perm(high, low, numbers)
#else
#define reciprocal_estimate(x) (1.0f / (x))
#define root_estimate(x) sqrt((float)(x))
#endif

// Four neighbours in memory.
#define FLOAT4 float4
#define UINT4 uint4

#define as_f32(bits) as_float((uint)(bits))
#define as_u32(value) as_uint((float)(value))

// Upper half of a 32 x 32 bit product.
#define mul_high(a, b) ((uint)(((ulong)(a) * (ulong)(b)) >> 32))

// acc + the sum of four products of signed bytes.
#if defined(__NV_CL_C_VERSION)
FUNCTION int dot4(int a, int b, int acc) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(acc));
    return result;
}
#elif defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__) \
    || defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__)
#define dot4(a, b, acc) __builtin_amdgcn_sdot4(a, b, acc, false)
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1200__) || defined(__gfx1201__)
#define dot4(a, b, acc) __builtin_amdgcn_sudot4(true, a, true, b, acc, false)
#elif defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
#define dot4(a, b, acc) ((acc) + dot_4x8packed_ss_int((uint)(a), (uint)(b)))
#else
FUNCTION int dot4(int a, int b, int acc) {
    acc += (int)(char)a * (int)(char)b;
    acc += (int)(char)(a >> 8) * (int)(char)(b >> 8);
    acc += (int)(char)(a >> 16) * (int)(char)(b >> 16);
    return acc + (a >> 24) * (b >> 24);
}
#endif
