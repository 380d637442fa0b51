// First pass of the digests of many tensors in one launch, behind digest.cl: a group per TURNS
// turns of a tensor. CUDA C++: the table holds addresses, which the portable dialect does not know.

#define TURNS 8u

struct DigestedTensor {
    const uint *words;
    ulong bytes;
};

// `starts[i]` is how many groups the tensors before number i have.
KERNEL(GROUP) digest_many(ulong *pairs, const DigestedTensor *tensors, const uint *starts, uint count) {
    LOCAL ulong shared[SHARED];
    uint low = 0u, high = count;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (starts[middle] <= group_index()) low = middle;
        else high = middle;
    }
    DigestedTensor own = tensors[low];
    ulong blocks = (own.bytes + 4u * BLOCK_WORDS - 1u) / (4u * BLOCK_WORDS);
    ulong first = (ulong)(group_index() - starts[low]) * TURNS * TOGETHER;
    ulong end = first + TURNS * TOGETHER < blocks ? first + TURNS * TOGETHER : blocks;
    digest_blocks(pairs + 2u * group_index(), shared, own.words, own.bytes, first, end, TOGETHER);
}
