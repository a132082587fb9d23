// Part of cpu.c: the block formats of GGUF files, unpacked to float32 exactly as their definition says.
// A product that is followed by a difference must not be fused with it, or the values would differ in the last bit.
#ifdef __clang__
#define EXACT static
#define UNFUSED _Pragma("clang fp contract(off)")
#else
#define EXACT __attribute__((optimize("fp-contract=off"))) static
#define UNFUSED
#endif
INLINE float half(bytes p) {
    uint32_t h = p[0] | p[1] << 8, sign = (h & 0x8000) << 16, rest = h & 0x7fff;
    union { uint32_t bits; float f; } u = {rest << 13}, power = {0x77800000};  // 2^112: of the two biases
    u.f *= power.f;                                                            // exact, subnormal halves too
    if (rest >= 0x7c00) u.bits |= 0x7f800000;
    u.bits |= sign;
    return u.f;
}
static void f16(bytes p, long n, float *y) {
    for (long i = 0; i < n; i++) y[i] = half(p + 2 * i);
}
static void ggml_mxfp4(bytes p, float *y) {  // a scale, then 16 bytes: values 0..15 in their low nibbles, 16..31 in the high ones
    for (int i = 0; i < 16; i++) y[i] = E2M1[p[0]][p[1 + i] & 15], y[i + 16] = E2M1[p[0]][p[1 + i] >> 4];
}
static void q8_0(bytes p, float *y) {
    float d = half(p);
    for (int i = 0; i < 32; i++) y[i] = d * (int8_t)p[2 + i];
}
static void q4_0(bytes p, float *y) {  // nibbles as in ggml_mxfp4
    float d = half(p);
    for (int i = 0; i < 16; i++) y[i] = d * ((p[2 + i] & 15) - 8), y[i + 16] = d * ((p[2 + i] >> 4) - 8);
}
typedef struct { int scale, least; } Sixes;
INLINE Sixes sixes(bytes q, int j) {  // the j-th of eight pairs of 6-bit numbers in 12 bytes
    if (j < 4) return (Sixes){q[j] & 63, q[j + 4] & 63};
    return (Sixes){(q[j + 4] & 15) | q[j - 4] >> 6 << 4, q[j + 4] >> 4 | q[j] >> 6 << 4};
}
EXACT void q4_k(bytes p, float *y) {  // two halves, eight 6-bit scales and minima, 128 bytes of nibbles
    UNFUSED
    float d = half(p), least = half(p + 2);
    for (int j = 0; j < 8; j++, y += 32) {
        Sixes s = sixes(p + 4, j);
        float scale = d * s.scale, below = least * s.least;
        bytes q = p + 16 + j / 2 * 32;
        int shift = j % 2 * 4;
        for (int i = 0; i < 32; i++) y[i] = scale * (q[i] >> shift & 15) - below;
    }
}
EXACT void q5_k(bytes p, float *y) {  // the same with 32 bytes of fifth bits before the nibbles
    UNFUSED
    float d = half(p), least = half(p + 2);
    for (int j = 0; j < 8; j++, y += 32) {
        Sixes s = sixes(p + 4, j);
        float scale = d * s.scale, below = least * s.least;
        bytes fifth = p + 16, q = p + 48 + j / 2 * 32;
        int shift = j % 2 * 4;
        for (int i = 0; i < 32; i++) y[i] = scale * ((q[i] >> shift & 15) | (fifth[i] >> j & 1) << 4) - below;
    }
}
static void q6_k(bytes p, float *y) {  // 128 bytes of nibbles, 64 of upper bits, sixteen int8 scales, a half
    float d = half(p + 208);
    for (int j = 0; j < 8; j++, y += 32) {
        bytes q = p + j / 4 * 64 + j % 2 * 32, upper = p + 128 + j / 4 * 32;
        int shift = j % 4 / 2 * 4, shift2 = j % 4 * 2;
        for (int h = 0; h < 32; h += 16) {
            float scale = d * (int8_t)p[192 + 2 * j + h / 16];
            for (int i = h; i < h + 16; i++) y[i] = scale * (((q[i] >> shift & 15) | (upper[i] >> shift2 & 3) << 4) - 32);
        }
    }
}
// Values from..to of a row of blocks. Both are at block borders, but for `to` in f16.
static void expand(bytes row, long kind, long from, long to, float *y) {
    bytes p = row + at(kind, from);
    long n = to - from;
#define EACH(size, values, work) for (; n > 0; n -= values, p += size, y += values) work(p, y); break
    switch (kind) {
        case F16: f16(p, n, y); break;
        case GGML_MXFP4: EACH(17, 32, ggml_mxfp4);
        case Q8_0: EACH(34, 32, q8_0);
        case Q4_0: EACH(18, 32, q4_0);
        case Q4_K: EACH(144, 256, q4_k);
        case Q5_K: EACH(176, 256, q5_k);
        case Q6_K: EACH(210, 256, q6_k);
    }
}
