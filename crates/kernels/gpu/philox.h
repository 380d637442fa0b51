// Philox4x32-10 and mix64 (docs/numerics.md, "Random numbers").

typedef struct {
    uint w[4];
} Words;

FUNCTION Words philox(uint c0, uint c1, uint c2, uint c3, uint k0, uint k1) {
    for (int round = 0; round < 10; round++) {
        uint n0 = mul_high(0xcd9e8d57u, c2) ^ c1 ^ k0;
        uint n1 = 0xcd9e8d57u * c2;
        uint n2 = mul_high(0xd2511f53u, c0) ^ c3 ^ k1;
        uint n3 = 0xd2511f53u * c0;
        c0 = n0;
        c1 = n1;
        c2 = n2;
        c3 = n3;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    Words words;
    words.w[0] = c0;
    words.w[1] = c1;
    words.w[2] = c2;
    words.w[3] = c3;
    return words;
}

FUNCTION ulong mix64(ulong z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ul;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebul;
    return z ^ (z >> 31);
}
