// Digest (docs/numerics.md, "Digests"): the groups share out the blocks of 1024 words, four words per work item; each
// leaves the sums of its blocks' contributions. Sums modulo 2^64 have no order.

#define DIGEST_KEY_LOW 0x49534f42u
#define DIGEST_KEY_HIGH 0x44475354u
#define BLOCK_WORDS 1024u
// Work items that add up the 256 parts of a block, and parts that each adds.
#define ADDERS 16u

// Word `index` of `bytes` bytes; what is missing is zero, and nothing beyond the end is read.
FUNCTION uint digest_word(GLOBAL const uint *words, ulong index, ulong bytes) {
    if (index < bytes / 4u) {
        return words[index];
    }
    GLOBAL const uchar *tail = (GLOBAL const uchar *)words;
    uint word = 0u;
    for (uint i = 0u; i < 3u; i++) {
        ulong at = index * 4u + i;
        word |= at < bytes ? (uint)tail[at] << (8u * i) : 0u;
    }
    return word;
}

FUNCTION ulong digest_product(uint a, uint b) {
    return (ulong)a * (ulong)b;
}

KERNEL(GROUP) digest(GLOBAL ulong *out, GLOBAL const uint *words, ulong bytes, ulong blocks, uint groups) {
    LOCAL ulong parts[2 * GROUP];
    LOCAL ulong sums[2 * ADDERS];
    uint l = local_index();
    // Words 4l .. 4l + 3 meet these key words in the first sum and the four after them in the second.
    Words k = philox(l, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    Words further = philox(l + 1u, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    ulong s0 = 0;
    ulong s1 = 0;
    for (ulong block = group_index(); block < blocks; block += groups) {
        ulong first = block * BLOCK_WORDS + 4u * l;
        uint w0 = digest_word(words, first, bytes);
        uint w1 = digest_word(words, first + 1u, bytes);
        uint w2 = digest_word(words, first + 2u, bytes);
        uint w3 = digest_word(words, first + 3u, bytes);
        parts[l] = digest_product(w0 + k.w[0], w1 + k.w[1]) + digest_product(w2 + k.w[2], w3 + k.w[3]);
        parts[GROUP + l] = digest_product(w0 + further.w[0], w1 + further.w[1])
            + digest_product(w2 + further.w[2], w3 + further.w[3]);
        barrier_local();
        if (l < 2u * ADDERS) {
            ulong sum = 0;
            // Neighbours read neighbouring parts.
            for (uint i = l % ADDERS; i < GROUP; i += ADDERS) {
                sum += parts[l / ADDERS * GROUP + i];
            }
            sums[l] = sum;
        }
        barrier_local();
        // Everyone else is already at the next block, which does not touch `sums` before a barrier that this one
        // reaches too.
        if (l == 0u) {
            ulong h0 = 0;
            ulong h1 = 0;
            for (uint i = 0u; i < ADDERS; i++) {
                h0 += sums[i];
                h1 += sums[ADDERS + i];
            }
            ulong a = mix64(h0 + mix64(block + 1u));
            ulong c1 = mix64(h1 + a);
            s0 += mix64(a + c1);
            s1 += c1;
        }
    }
    if (l == 0u) {
        out[2u * group_index()] = s0;
        out[2u * group_index() + 1u] = s1;
    }
}
