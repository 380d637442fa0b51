// The instructions of NVIDIA devices from sm_80 on that CUDA C++ has no words for: copies to shared
// memory that run beside the program, and int8 tensor cores. Each function is one instruction.
// Where another compiler reads this (crates/simt runs kernels on a CPU), it has defined them
// before. Shared memory is addressed by 32 bits.

#ifdef __CUDACC__

// Sixteen bytes, both ends aligned to that.
FUNCTION void copy_16(uint to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// The same, or as many zeros: `from` is not read then.
FUNCTION void copy_16_or_zeros(uint to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Ends a group of copies.
FUNCTION void copies_end(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for this thread's groups except the last PENDING ones.
template <int PENDING> FUNCTION void copies_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

FUNCTION uint lane_index(void) {
    uint lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Four matrices of 8 rows of 16 bytes, each lane bringing the address of a row; a thread gets four
// bytes of each.
FUNCTION void load_matrices(uint (&to)[4], uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// sums (16 x 8) += a (16 x 32) times b (32 x 8).
FUNCTION void multiply_bytes(int *sums, const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four numbers from shared memory.
FUNCTION void load_floats(float *to, uint address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(address)
                 : "memory");
}

FUNCTION float larger_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

#endif
