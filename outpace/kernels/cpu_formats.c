// Part of cpu.c: the block formats of GGUF files, unpacked to float32 exactly as their definition says.
#if W == 16
#define ALONE(v) HOLD(v)  // a product that may not be fused with what follows: the last bit would differ
INLINE vi unsigneds(bytes p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi signeds(bytes p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf real(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
#elif defined __AVX2__
#define ALONE(v) __asm__("" : "+x"(v))
INLINE vi unsigneds(bytes p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi signeds(bytes p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vf real(vi v) { return (vf)_mm256_cvtepi32_ps((__m256i)v); }
#else
#define ALONE(v) __asm__("" : "+m"(v))
typedef int8_t vs __attribute__((vector_size(W), aligned(1), may_alias));
INLINE vi unsigneds(bytes p) { return __builtin_convertvector(*(const vb *)p, vi); }
INLINE vi signeds(bytes p) { return __builtin_convertvector(*(const vs *)p, vi); }
INLINE vf real(vi v) { return __builtin_convertvector(v, vf); }
#endif
INLINE vf halves(bytes p) {  // W float16
#if W == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined __F16C__
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vu h = (vu)widen(p), rest = h >> 3 & 0x0fffe000;
    vf v = (vf)rest * 0x1p112f;  // the difference of the two biases: exact, for subnormal halves too
    return (vf)((vu)v | (h & 0x80000000) | (0x7f800000 & (vu)(rest >= 0x0f800000)));
#endif
}
INLINE vf fetch(any p, long kind, long i, long n) {  // values i..i+W, of which n are there; zeros after them
    if (n >= W) return kind == F32 ? load((floats)p + i) : kind == F16 ? halves((bytes)p + 2 * i) : widen((bytes)p + 2 * i);
    float v[W] = {0};
    for (long j = 0; j < n; j++) v[j] = get(p, kind, i + j);
    return load(v);
}
static void f16(bytes p, long n, float *y) {
    long i = 0;
    for (; i + W <= n; i += W) store(y + i, halves(p + 2 * i));
    for (; i < n; i++) y[i] = half(p + 2 * i);
}
#define FOR(i, n) UNROLL for (int i = 0; i < n; i += W)
static void ggml_mxfp4(bytes p, float *y) {  // a scale, then 16 bytes: values 0..15 in their low nibbles, 16..31 in the high ones
    vf v[32 / W];
    unpack(p + 1, p[0], v);
    FOR(i, 32) store(y + i, v[i / W]);
}
INLINE vf q8_part(bytes p, int i) { return real(signeds(p + 2 + i)) * half(p); }
static void q8_0(bytes p, float *y) {
    FOR(i, 32) store(y + i, q8_part(p, i));
}
static void q4_0(bytes p, float *y) {  // nibbles as in ggml_mxfp4
    float d = half(p);
    FOR(i, 16) {
        vi b = unsigneds(p + 2 + i);
        store(y + i, real((b & 15) - 8) * d), store(y + 16 + i, real((b >> 4) - 8) * d);
    }
}
typedef struct { int scale, least; } Sixes;
INLINE Sixes sixes(bytes q, int j) {  // the j-th of eight pairs of 6-bit numbers in 12 bytes
    if (j < 4) return (Sixes){q[j] & 63, q[j + 4] & 63};
    return (Sixes){(q[j + 4] & 15) | q[j - 4] >> 6 << 4, q[j + 4] >> 4 | q[j] >> 6 << 4};
}
INLINE void k_block(bytes p, bytes fifth, bytes q, float *y) {  // two halves, eight scales and minima, then bits as said
    float d = half(p), least = half(p + 2);
    UNROLL for (int j = 0; j < 8; j++, y += 32) {
        Sixes s = sixes(p + 4, j);
        float scale = d * s.scale, below = least * s.least;
        FOR(i, 32) {
            vi b = unsigneds(q + j / 2 * 32 + i) >> (j % 2 * 4) & 15;
            if (fifth) b |= (unsigneds(fifth + i) >> j & 1) << 4;
            vf v = real(b) * scale;
            ALONE(v);
            store(y + i, v - below);
        }
    }
}
static void q4_k(bytes p, float *y) { k_block(p, 0, p + 16, y); }
static void q5_k(bytes p, float *y) { k_block(p, p + 16, p + 48, y); }
static void q6_k(bytes p, float *y) {  // 128 bytes of nibbles, 64 of upper bits, sixteen int8 scales, a half
    float d = half(p + 208);
    UNROLL for (int j = 0; j < 8; j++, y += 32) {
        bytes q = p + j / 4 * 64 + j % 2 * 32, upper = p + 128 + j / 4 * 32, scales = p + 192 + 2 * j;
        FOR(i, 32) {
            vi b = (unsigneds(q + i) >> (j % 4 / 2 * 4) & 15) | (unsigneds(upper + i) >> (j % 4 * 2) & 3) << 4;
            store(y + i, real(b - 32) * (d * (int8_t)scales[i / 16]));
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
