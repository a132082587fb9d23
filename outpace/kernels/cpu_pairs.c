// Part of cpu.c: products of an x that is rounded to bfloat16, for weights that have no more digits themselves. Where the CPU multiplies pairs of
// bfloat16, 32 values meet at a time in sums of float32; elsewhere the rounded numbers go the way of all others.
INLINE vi rounded(vf v) { return (vi)(((vu)v + 0x7fff + (((vu)v >> 16) & 1)) >> 16); }  // to the nearest bfloat16, ties to even
#if W == 16 && defined __AVX512BF16__ && !defined __AMX_BF16__  // processors with tiles multiply pairs at half the rate
#define BY_PAIRS 1
#else
#define BY_PAIRS 0
#endif
int has_pairs = BY_PAIRS;
INLINE int rounds(long wanted, long kind) { return wanted && (kind == BF16 || kind == MXFP4 || kind == GGML_MXFP4 || kind == WHOLE); }
INLINE long paired(long wanted, long kind) { return BY_PAIRS && rounds(wanted, kind) ? PAIRED + kind : kind; }  // the kind for an x in pairs
INLINE long x_apart(long k, long kind) {  // between rows of x, in the size of a float
    return kind >= PAIRED ? (k + 31) / 32 * 16 : kind == WHOLE ? k / 32 * 28 : k;
}

static void round_row(floats x, long n, int pairs, void *to) {  // pairs: n is rounded up to 16
    for (long i = 0; i < n; i += W) {
        vf v = part(x + i, n - i);
#if BY_PAIRS
        if (pairs) { _mm256_storeu_si256((__m256i *)((uint16_t *)to + i), (__m256i)_mm512_cvtneps_pbh((__m512)v)); continue; }
#endif
        vi bits = rounded(v) << 16;
        memcpy((float *)to + i, &bits, MIN(W, n - i) * sizeof(float));
    }
}
typedef struct { floats x; float *to; long K, apart; int pairs; } Rounding;
static void one_rounded(const void *with, long m) {
    const Rounding *o = with;
    round_row(o->x + m * o->K, o->K, o->pairs, o->to + m * o->apart);
}
static floats round_rows(floats x, long M, long K, int pairs, float *to, long threads) {
    each_row(M, one_rounded, &(Rounding){x, to, K, x_apart(K, pairs ? PAIRED : F32), pairs}, team((double)M * K, 65536, threads));
    return to;
}

#if BY_PAIRS
static uint16_t E2M1_PAIRS[256][32] __attribute__((aligned(64)));  // E2M1's values twice: the fifth bit of a place is its neighbour's
__attribute__((constructor)) static void fill_pairs(void) {
    static const uint16_t value[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    for (int i = 0; i < 256 * 32; i++) {
        union { uint32_t bits; float f; } u = {(uint32_t)value[i & 7] << 16};
        u.f = ldexpf(i & 8 ? -u.f : u.f, i / 32 - 127);
        E2M1_PAIRS[i / 32][i % 32] = u.bits >> 16;
    }
}
INLINE __m512i pairs_of(const int kind, bytes w, bytes s) {  // 32 weights
    if (kind == BF16) return _mm512_loadu_si512(w);
    if (kind == MXFP4) {  // nibbles of a byte are neighbours
        __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)w));
        return _mm512_permutexvar_epi16(_mm512_or_si512(b, _mm512_slli_epi32(b, 12)), _mm512_load_si512(E2M1_PAIRS[*s]));
    }
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + 1)));  // low nibbles, then high ones
    return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(b), _mm256_srli_epi16(b, 4), 1), _mm512_load_si512(E2M1_PAIRS[*w]));
}
INLINE void meet_pairs(const int R, const int kind, const floats *x, long k, bytes w, bytes s, vf *a, const int C) {  // a[r * C] += values k.. of x[r] . w
    __m512bh v = (__m512bh)pairs_of(kind, w, s);
    UNROLL for (int r = 0; r < R; r++) a[r * C] = (vf)_mm512_dpbf16_ps((__m512)a[r * C], (__m512bh)_mm512_loadu_si512((const uint16_t *)x[r] + k), v);
}
static void expand_pairs(bytes w, bytes s, long kind, long from, long to, uint16_t *y) {  // as `expand`, of MXFP4
    for (long k = from; k < to; k += 32, y += 32)
        _mm512_storeu_si512(y, kind == MXFP4 ? pairs_of(MXFP4, w + at(MXFP4, k), s + (k >> 5)) : pairs_of(GGML_MXFP4, w + at(GGML_MXFP4, k), 0));
}
#else  // no kind is paired
INLINE void meet_pairs(const int R, const int kind, const floats *x, long k, bytes w, bytes s, vf *a, const int C) {}
static void expand_pairs(bytes w, bytes s, long kind, long from, long to, uint16_t *y) {}
#endif
