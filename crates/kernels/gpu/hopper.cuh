// What the kernels for Hopper (sm_90a) share: clusters, mbarriers, bulk copies (TMA) and wgmma on
// bytes. CUDA C++ without headers, as NVRTC takes it.

namespace hopper {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// CUtensorMap, which the driver fills in and nobody here looks into.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int KBLOCK = 128;   // bytes of k per copy, and the width of the swizzle
constexpr int CLUSTER = 2;    // blocks of a cluster

// ---------------------------------------------------------------------------------------------------------------------
// Clusters

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block of the cluster; memory before it is visible after it.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::: "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers

__device__ inline void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ inline void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_try_wait(barrier, parity)) {
    }
}

__device__ inline void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives on the same barrier of another block of the cluster (or of this one). No explicit
// .release.cluster: what must be ordered are reads of the tensor cores, which wgmma.wait_group has
// seen to.
__device__ inline void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(barrier), "r"(rank)
                 : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// TMA

__device__ inline void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box of KBLOCK bytes by the map's number of rows to `target` and completes that many
// bytes on `barrier`. Rows beyond the tensor arrive as zeros and count as bytes.
__device__ inline void load_box(const TensorMap &map, u32 target, u32 barrier, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(row)
                 : "memory");
}

// The same for all blocks of the cluster, at the same offsets in each.
__device__ inline void load_box_for_all(const TensorMap &map, u32 target, u32 barrier, int k, int row) {
    const u16 all = (1u << CLUSTER) - 1;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target), "l"(&map), "r"(barrier), "r"(k), "r"(row), "h"(all)
                 : "memory");
}

// Copies `bytes` (a multiple of 16, both ends aligned to that).
__device__ inline void load_bytes(const void *from, u32 target, u32 barrier, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma

// Matrix descriptor, K-major, rows of KBLOCK bytes swizzled over KBLOCK: start address, (unused)
// leading offset 1, stride of 8 rows, layout 1 = 128-byte swizzle. All addresses in units of 16
// bytes.
__device__ inline u64 matrix(u32 address) {
    constexpr u64 fixed = (1ull << 16) | ((u64)(8 * KBLOCK >> 4) << 32) | (1ull << 62);
    return fixed | ((address & 0x3ffff) >> 4);
}
constexpr u64 NEXT_K = 32 >> 4;   // added to a descriptor: 32 elements further along k

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Operand lists: TEN("4") is "%40, ..., %49".
#define TEN(t) "%" t "0,%" t "1,%" t "2,%" t "3,%" t "4,%" t "5,%" t "6,%" t "7,%" t "8,%" t "9,"
#define OPERANDS_32 TEN("") TEN("1") TEN("2") "%30,%31"
#define OPERANDS_60 TEN("") TEN("1") TEN("2") TEN("3") TEN("4") TEN("5")
#define OPERANDS_64 OPERANDS_60 "%60,%61,%62,%63"
#define OPERANDS_96 OPERANDS_60 TEN("6") TEN("7") TEN("8") "%90,%91,%92,%93,%94,%95"
#define OPERANDS_128 OPERANDS_60 TEN("6") TEN("7") TEN("8") TEN("9") TEN("10") TEN("11") \
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define BIND_4(c, a, i) c(a[i]), c(a[i + 1]), c(a[i + 2]), c(a[i + 3])
#define BIND_16(c, a, i) BIND_4(c, a, i), BIND_4(c, a, i + 4), BIND_4(c, a, i + 8), BIND_4(c, a, i + 12)
#define BIND_32(c, a, i) BIND_16(c, a, i), BIND_16(c, a, i + 16)
#define BIND_64(c, a, i) BIND_16(c, a, i), BIND_16(c, a, i + 16), BIND_16(c, a, i + 32), BIND_16(c, a, i + 48)

}   // namespace hopper
