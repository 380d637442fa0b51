// Dialect of CUDA C++ (NVRTC) and HIP (hipRTC): the words of opencl.h. Contraction is switched off
// on the command line.

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

#if defined(__HIP__)
// Not a typedef: hipRTC has one of this name, of another type. Attributes instead of `__device__`
// and its like: hipRTC defines those, a bare compiler does not.
#define ulong unsigned long long
#define KERNEL(group) extern "C" __attribute__((global, amdgpu_flat_work_group_size(group, group))) void
#define FUNCTION static __attribute__((device, always_inline)) inline
#define LOCAL __attribute__((shared))
#define ALIGNED __attribute__((aligned(16)))
#define TABLE static __attribute__((device)) const
typedef float FLOAT4 __attribute__((ext_vector_type(4)));
typedef uint UINT4 __attribute__((ext_vector_type(4)));
#else
typedef unsigned long long ulong;
#define KERNEL(group) extern "C" __global__ __launch_bounds__(group) void
#define FUNCTION static __device__ __forceinline__
#define LOCAL __shared__
#define ALIGNED __align__(16)
#define TABLE static __device__ const
#define FLOAT4 float4
#define UINT4 uint4
#endif
#define GLOBAL
#define LOCAL_POINTER

#if defined(__HIP__)
// Where pointers do not name their memory, of one into global memory for sure.
#define GLOBAL_SPACE __attribute__((address_space(1)))
#define local_index() ((uint)__builtin_amdgcn_workitem_id_x())
#define group_index() ((uint)__builtin_amdgcn_workgroup_id_x())
#define barrier_local() \
    do { \
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
        __builtin_amdgcn_s_barrier(); \
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
    } while (0)
#define fma_rn(a, b, c) __builtin_fmaf(a, b, c)
// Within one ULP: exact.h corrects them.
#define reciprocal_estimate(x) __builtin_amdgcn_rcpf(x)
#define root_estimate(x) __builtin_amdgcn_sqrtf(x)
// Four bytes of eight by their numbers, those of `low` from 0 on; where a device has no such
// instruction it is not defined.
#define permute_bytes(high, low, numbers) __builtin_amdgcn_perm(high, low, numbers)
#define as_f32(bits) __builtin_bit_cast(float, (uint)(bits))
#define as_u32(value) __builtin_bit_cast(uint, (float)(value))
#if defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1200__) || defined(__gfx1201__)
#define dot4(a, b, acc) __builtin_amdgcn_sudot4(true, a, true, b, acc, false)
#else
#define dot4(a, b, acc) __builtin_amdgcn_sdot4(a, b, acc, false)
#endif
#else
#define GLOBAL_SPACE
#define local_index() ((uint)threadIdx.x)
#define group_index() ((uint)blockIdx.x)
#define barrier_local() __syncthreads()
#define fma_rn(a, b, c) __fmaf_rn(a, b, c)
#define hardware_sqrt(x) __fsqrt_rn(x)
#define as_f32(bits) __uint_as_float(bits)
#define as_u32(value) __float_as_uint(value)
#define dot4(a, b, acc) __dp4a((int)(a), (int)(b), (int)(acc))
// A number of the lane `distance` further on in a warp of 32, and of its first lane; not defined
// where a warp may have more.
#define lane_below(value, distance) __shfl_down_sync(0xffffffffu, value, distance)
#define first_lane(value) __shfl_sync(0xffffffffu, value, 0)
#endif

#if defined(__HIP__)
#define load4(to, from) \
    do { \
        for (uint four = 0u; four < 4u; four++) { \
            (to)[four] = (from)[four]; \
        } \
    } while (0)
#else
#define load4(to, from) \
    do { \
        const float4 four = *(const float4 *)(from); \
        (to)[0] = four.x; \
        (to)[1] = four.y; \
        (to)[2] = four.z; \
        (to)[3] = four.w; \
    } while (0)
#endif

#define mul_high(a, b) ((uint)(((ulong)(a) * (ulong)(b)) >> 32))
