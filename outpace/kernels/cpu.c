// CPU kernels: each output row is the same float operations in the same order, however many rows travel with it. That is why
// one accumulator of W lanes runs over k per output, why sums across lanes are written out, and why -ffast-math is forbidden.
#define _GNU_SOURCE  // for RUSAGE_THREAD
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __AVX512F__
#define W 16
#define HOLD(v) __asm__("" : "+v"(v))  // in a register: the compiler would load it again for every row
#define PLACES (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define LOW(a, b) MIX(vi, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) MIX(vi, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN(a, b) MIX(vi, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) MIX(vi, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define W 8
#define HOLD(v)
#define PLACES (vi){0, 1, 2, 3, 4, 5, 6, 7}
#define LOW(a, b) MIX(vi, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) MIX(vi, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define EVEN(a, b) MIX(vi, a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) MIX(vi, a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#endif
#ifdef __clang__
#define MIX(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(T, a, b, ...) __builtin_shuffle(a, b, (T){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vf __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef float f4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef const uint8_t *bytes;
typedef const float *floats;
typedef const void *any;  // float32, bfloat16 or float16, as the kind beside it says
enum { F32, BF16, MXFP4, F16, GGML_MXFP4, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K };  // of weights; MXFP4: as in safetensors
enum { ROWS = 4, COLS = 6, MOST = 64, CHUNK = 512 };  // a register tile; rows of a block; k values kept in the first cache
enum { THREADS = 128, KEYS = 128, MOST_D = 256 };     // KEYS: of an attention tile, anchored at its multiples
enum { UNITS = 48, SPREAD = 512 };                    // of a hidden layer, per item; values unpacked at a time
enum { CACHED = 512, BEYOND = 1 << 22 };              // rows of x that stay in the second cache; bytes of a matrix that no cache keeps

// ---- vectors
INLINE vf load(floats p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf all(float x) { return (vf){0} + x; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
#if W == 16  // the compiler would convert two halves and join them
INLINE vf widen(bytes p) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16); }
#else
INLINE vf widen(bytes p) { return (vf)(__builtin_convertvector(*(const vh *)p, vi) << 16); }
#endif
INLINE vf part(floats p, long n) {  // the first n lanes, zeros after them
    vf v = {0};
    if (n >= W) return load(p);
    memcpy(&v, p, n * sizeof(float));
    return v;
}
INLINE float half(bytes p) {
    uint16_t h;
    memcpy(&h, p, 2);
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    union { uint32_t bits; float f; } u = {(uint32_t)(h & 0x7fff) << 13};
    u.f *= 0x1p112f;
    u.bits |= (uint32_t)(h & 0x8000) << 16 | ((h & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
    return u.f;
#endif
}
INLINE float get(any p, long kind, long i) {
    if (kind == F16) return half((bytes)p + 2 * i);
    union { uint32_t bits; float f; } u = {kind == F32 ? 0 : (uint32_t)((const uint16_t *)p)[i] << 16};
    return kind == F32 ? ((floats)p)[i] : u.f;
}
INLINE f4 fold(vf v) {
    union { vf v; f4 q[W / 4]; } u = {v};
    return W == 16 ? (u.q[0] + u.q[W / 4 - 2]) + (u.q[1] + u.q[W / 4 - 1]) : u.q[0] + u.q[1];
}
INLINE float sum(vf v) { f4 a = fold(v); return (a[0] + a[2]) + (a[1] + a[3]); }
INLINE float highest(vf v) {  // of numbers, none a NaN
#if W == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x = v[0];
    UNROLL for (int i = 1; i < W; i++) x = MAX(x, v[i]);
    return x;
#endif
}
INLINE f4 sum4(const vf *v) {  // of four vectors, each like sum
    f4 a = fold(v[0]), b = fold(v[1]), c = fold(v[2]), d = fold(v[3]);
    f4 ab = MIX(i4, a, b, 0, 4, 1, 5) + MIX(i4, a, b, 2, 6, 3, 7), cd = MIX(i4, c, d, 0, 4, 1, 5) + MIX(i4, c, d, 2, 6, 3, 7);
    return MIX(i4, ab, cd, 0, 1, 4, 5) + MIX(i4, ab, cd, 2, 3, 6, 7);
}
#if W == 16
#define HALVES(a, b, how) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), how)
#define WITHIN(a, b, how) _mm512_shuffle_ps((__m512)(a), (__m512)(b), how)
INLINE void sums_of(const vf *v, int n, float *out) {  // each like sum; out holds n rounded up to 16
    for (int at = 0; at < n; at += 16) {
        vf a[16], b[8], c[4], d[2];
        UNROLL for (int i = 0; i < 16; i++) a[i] = at + i < n ? v[at + i] : (vf){0};
        UNROLL for (int i = 0; i < 8; i++) b[i] = (vf)HALVES(a[i + i / 4 * 4], a[i + i / 4 * 4 + 4], 0x44) + (vf)HALVES(a[i + i / 4 * 4], a[i + i / 4 * 4 + 4], 0xee);
        UNROLL for (int i = 0; i < 4; i++) c[i] = (vf)HALVES(b[i], b[i + 4], 0x88) + (vf)HALVES(b[i], b[i + 4], 0xdd);
        UNROLL for (int i = 0; i < 2; i++) d[i] = (vf)WITHIN(c[2 * i], c[2 * i + 1], 0x44) + (vf)WITHIN(c[2 * i], c[2 * i + 1], 0xee);
        store(out + at, (vf)WITHIN(d[0], d[1], 0x88) + (vf)WITHIN(d[0], d[1], 0xdd));
    }
}
#else
INLINE void sums_of(const vf *v, int n, float *out) {
    for (int i = 0; i < n; i += 4) *(f4u *)(out + i) = sum4(v + i);
}
#endif
#if W == 16
#define PAIRS(how, a, b) (vf)_mm512_##how((__m512)(a), (__m512)(b))
#define TWINS(how, a, b) (vf)_mm512_##how((__m512d)(a), (__m512d)(b))
INLINE void transpose(vf *a) {  // 16 x 16: within quarters, then whole quarters
    vf b[16];
    UNROLL for (int i = 0; i < 16; i += 2) b[i] = PAIRS(unpacklo_ps, a[i], a[i + 1]), b[i + 1] = PAIRS(unpackhi_ps, a[i], a[i + 1]);
    UNROLL for (int i = 0; i < 16; i += 4) {
        a[i] = TWINS(unpacklo_pd, b[i], b[i + 2]), a[i + 1] = TWINS(unpackhi_pd, b[i], b[i + 2]);
        a[i + 2] = TWINS(unpacklo_pd, b[i + 1], b[i + 3]), a[i + 3] = TWINS(unpackhi_pd, b[i + 1], b[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        vf even[2], odd[2];
        UNROLL for (int i = 0; i < 2; i++) even[i] = (vf)HALVES(a[8 * i + c], a[8 * i + 4 + c], 0x88), odd[i] = (vf)HALVES(a[8 * i + c], a[8 * i + 4 + c], 0xdd);
        a[c] = (vf)HALVES(even[0], even[1], 0x88), a[8 + c] = (vf)HALVES(even[0], even[1], 0xdd);
        a[4 + c] = (vf)HALVES(odd[0], odd[1], 0x88), a[12 + c] = (vf)HALVES(odd[0], odd[1], 0xdd);
    }
}
#else
INLINE void transpose(vf *a) {  // W x W: log2(W) perfect shuffles
    UNROLL for (int round = 1; round < W; round *= 2) {
        vf b[W];
        UNROLL for (int i = 0; i < W / 2; i++) b[2 * i] = LOW(a[i], a[i + W / 2]), b[2 * i + 1] = HIGH(a[i], a[i + W / 2]);
        UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
    }
}
#endif
INLINE vf expv(vf x) {  // relative error about 1e-7; 0 below -87
    vi gone = x < -87.0f;
    x = pick(x > 88.0f, all(88.0f), x);
    vf z = x * 1.44269504f + 12582912.0f, n = z - 12582912.0f;  // 1.5 * 2^23 leaves the rounded quotient in the low bits
    vf r = x - n * 0.693359375f - n * -2.12194440e-4f, p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f;
    p = ((p * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vf)((vi)(p * (vf)(((vu)z << 23) + 0x3f800000)) & ~gone);
}
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + expv(-x)); }

#include "cpu_threads.c"
INLINE int team(double work, double enough, long threads) { return work < enough ? 1 : MIN(threads, THREADS); }
static float *scratch(size_t count) {  // kept per calling thread: fresh pages cost more than the kernels
    static __thread float *memory;
    static __thread size_t size;
    if (count <= size) return memory;
    free(memory);
    size = count + count / 2;
    return memory = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64);
}

// ---- products
static float E2M1[256][16];  // the 16 values of a nibble times 2^(scale - 127)
__attribute__((constructor)) static void fill(void) {
    static const float value[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < 4096; i++) E2M1[i / 16][i % 16] = ldexpf(i & 8 ? -value[i & 7] : value[i & 7], i / 16 - 127);
}
INLINE void unpack(bytes p, uint8_t scale, vf *out) {  // 16 bytes: the 16 values of low nibbles (even places), then the 16 odd ones
#if W == 16
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    out[0] = (vf)_mm512_permutexvar_ps(b, _mm512_loadu_ps(E2M1[scale]));
    out[1] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), _mm512_loadu_ps(E2M1[scale]));
#elif defined __AVX2__
    __m256 magnitudes = _mm256_loadu_ps(E2M1[scale]);  // of these the three lower bits choose
    UNROLL for (int i = 0; i < 4; i++) {
        vi b = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + i % 2 * 8))) >> (i / 2 * 4);
        out[i] = (vf)((vi)_mm256_permutevar8x32_ps(magnitudes, (__m256i)b) | (b & 8) << 28);
    }
#else
    for (int i = 0; i < 4; i++) {
        vi b = __builtin_convertvector(*(const vb *)(p + i % 2 * 8), vi) >> (i / 2 * 4), m = b & 7;
        vi twice = m + ((m - 4) & (m > 3)) + ((m + m - 12) & (m > 5));
        out[i] = (vf)((vi)(__builtin_convertvector(twice, vf) * E2M1[scale][1]) | (b & 8) << 28);
    }
#endif
}
// Values k..k + 15 of y to where unpack puts them: of each 32 the even ones, then the odd ones.
INLINE void mix(floats x, long k, float *y) {
    vf a = load(x), b = load(x + 16 - W), even = EVEN(a, b), odd = ODD(a, b);
    memcpy(y + k / 32 * 32 + k % 32 / 2, &even, 8 * sizeof(float)), memcpy(y + k / 32 * 32 + k % 32 / 2 + 16, &odd, 8 * sizeof(float));
}
INLINE long at(long kind, long k) {  // bytes before value k; shifts, because small matrices would feel a division
    switch (kind) {
        case F32: return 4 * k;
        case BF16: case F16: return 2 * k;
        case MXFP4: return k >> 1;
        case GGML_MXFP4: return (k >> 5) * 17;
        case Q8_0: return (k >> 5) * 34;
        case Q4_0: return (k >> 5) * 18;
        case Q4_K: return (k >> 8) * 144;
        case Q5_K: return (k >> 8) * 176;
        default: return (k >> 8) * 210;
    }
}
#include "cpu_formats.c"

typedef struct { bytes w, s; int64_t kind, k, apart; } Rows;  // weight rows of k values, `apart` values between them, s: MXFP4 scales

// Values from..to of R rows of x times C weight rows; the last of cols stands in for missing ones.
INLINE void tile(const int R, const int C, const int kind, const floats *x, Rows m, int cols, long from, long to, long ahead, int every,
                 vf *acc, float *sums) {
    const int blocks = kind == MXFP4 || kind == GGML_MXFP4 || kind == Q8_0, step = blocks ? 32 : W, parts = step / W;
    vf a[ROWS * COLS] = {{0}};
    bytes w[COLS], s[COLS];
    long k = from;
    UNROLL for (int c = 0; c < C; c++) w[c] = m.w + MIN(c, cols - 1) * at(kind, m.apart), s[c] = m.s + MIN(c, cols - 1) * (m.apart >> 5);
    if (from) UNROLL for (int i = 0; i < R * C; i++) a[i] = acc[i];
    for (int wait = 1; k + step <= to; k += step) {
        if (!--wait) {
            UNROLL for (int c = 0; c < C; c++) __builtin_prefetch(w[c] + ahead, 0, 2);
            ahead += 64, wait = every;
        }
        UNROLL for (int c = 0; c < C; c++) {
            vf v[32 / W];
            if (kind == MXFP4) unpack(w[c] + (k >> 1), s[c][k >> 5], v);
            else if (kind == GGML_MXFP4) unpack(w[c] + (k >> 5) * 17 + 1, w[c][(k >> 5) * 17], v);
            else if (kind == Q8_0) UNROLL for (int j = 0; j < parts; j++) v[j] = q8_part(w[c] + (k >> 5) * 34, j * W);
            else *v = kind == F32 ? load((floats)(w[c] + 4 * k)) : kind == F16 ? halves(w[c] + 2 * k) : widen(w[c] + 2 * k);
            UNROLL for (int j = 0; j < parts; j++) {
                if (R > 1) HOLD(v[j]);
                UNROLL for (int r = 0; r < R; r++) a[r * C + c] += v[j] * load(x[r] + k + j * W);
            }
        }
    }
    if (k < to) {
        float xs[ROWS][W] = {{0}}, ws[COLS][W] = {{0}};
        for (int r = 0; r < R; r++) for (long i = k; i < to; i++) xs[r][i - k] = x[r][i];
        for (int c = 0; c < C; c++) for (long i = k; i < to; i++) ws[c][i - k] = get(w[c], kind, i);
        UNROLL for (int i = 0; i < R * C; i++) a[i] += load(ws[i % C]) * load(xs[i / C]);
    }
    if (to < m.k) UNROLL for (int i = 0; i < R * C; i++) acc[i] = a[i];
    else sums_of(a, R * C, sums);
}

// Weight rows in a format the tile does not read: SPREAD values of each are unpacked into the first cache, for all rows of x.
static void unpacked(const floats *x, int rows, const Rows *m, int cols, float *sums) {
    vf acc[MOST * COLS];
    float w[COLS * SPREAD] __attribute__((aligned(64)));
    for (long k = 0; k < m->k; k += SPREAD) {
        long to = MIN(k + SPREAD, m->k);
        for (int c = 0; c < cols; c++) {
            bytes row = m->w + c * at(m->kind, m->k), later = row + 2 * COLS * at(m->kind, m->k);
            for (long b = at(m->kind, k); b < at(m->kind, to); b += 64) __builtin_prefetch(later + b, 0, 2);
            expand(row, m->kind, k, to, w + c * SPREAD);
        }
        Rows these = {(bytes)w - 4 * k, 0, F32, m->k, SPREAD};
        for (int i = 0; i < rows; i += ROWS) {
            const floats *xs = x + i;
            vf *a = acc + i * COLS;
            float *y = sums + i * COLS;
#define SPREADS(R) tile(R, COLS, F32, xs, these, cols, k, to, 0, INT32_MAX, a, y); break
            switch (rows - i) { case 1: SPREADS(1); case 2: SPREADS(2); case 3: SPREADS(3); default: SPREADS(4); }
        }
    }
}

// sums[r * COLS + c] = x[r] . weight row c, for at most MOST rows of x and COLS of weights.
static void block(const floats *x, int rows, const Rows *m, int cols, float *sums) {
    vf acc[MOST * COLS];
    if (m->kind > Q8_0) return unpacked(x, rows, m, cols, sums);
    long chunk = rows > ROWS ? CHUNK : m->k, parts = (rows + ROWS - 1) / ROWS;  // row tiles share weights in the first cache
    for (long k = 0; k < m->k; k += chunk) for (long i = 0; i < parts; i++) {   // each fetches its portion of the block after the next
        long to = MIN(k + chunk, m->k), every = 64 / at(m->kind, m->kind == F32 || m->kind == BF16 || m->kind == F16 ? W : 32) * parts;
        long ahead = 2 * COLS * at(m->kind, m->k) + at(m->kind, k) + at(m->kind, to - k) * i / parts;
#define TILE(R, kind) tile(R, COLS, kind, x + i * ROWS, *m, cols, k, to, ahead, every, acc + i * ROWS * COLS, sums + i * ROWS * COLS); break
#define TILES(kind) switch (rows - i * ROWS) { case 1: TILE(1, kind); case 2: TILE(2, kind); case 3: TILE(3, kind); default: TILE(4, kind); }
        if (m->kind == F32) TILES(F32) else if (m->kind == BF16) TILES(BF16) else if (m->kind == MXFP4) TILES(MXFP4)
        else if (m->kind == F16) TILES(F16) else if (m->kind == Q8_0) TILES(Q8_0) else TILES(GGML_MXFP4)
    }
}

// One row of x and weights that come from memory, which is read fastest one row after the other. Of weights in a cache the sums would be late:
// each addition waits for the one before.
static void streamed(const floats *x, const Rows *m, int cols, float *sums) {
    for (int c = 0; c < cols; c++) {
        Rows row = {m->w + c * at(m->kind, m->k), 0, m->kind, m->k, m->k};
        long ahead = 2 * COLS * at(m->kind, m->k), every = 64 / at(m->kind, W);
        float sum[16];
#define STREAM(kind) tile(1, 1, kind, x, row, 1, 0, m->k, ahead, every, 0, sum)
        if (m->kind == F32) STREAM(F32); else if (m->kind == BF16) STREAM(BF16); else STREAM(F16);
        sums[c] = sum[0];
    }
}

typedef struct { floats x; any w; int64_t kind; any bias; int64_t bias_kind; float *y; int64_t M, N, K, apart, threads; } Linear;  // apart: values between rows of y
INLINE void add(any bias, long kind, long n, int cols, float *sums, int rows) {  // bias[n..] to every row
    float b[COLS] = {0};
    for (int c = 0; bias && c < cols; c++) b[c] = get(bias, kind, n + c);
    for (int r = 0; bias && r < rows; r++) UNROLL for (int c = 0; c < COLS; c++) sums[r * COLS + c] += b[c];
}
INLINE void place(float *to, const float *sums, int cols) {
    if (cols == COLS) memcpy(to, sums, COLS * sizeof(float));
    else for (int c = 0; c < cols; c++) to[c] = sums[c];
}
INLINE long some_columns(const Linear *o) {  // of one item: weights that a cache holds, and enough items for all threads
    return MAX(1, MIN(65536 / (COLS * at(o->kind, o->K)), o->N / (COLS * 4 * o->threads))) * COLS;
}
static void products(const void *with, long item, long me) {
    const Linear *o = with;
    floats xs[MOST];
    float sums[MOST * COLS + 16];
    int wide = o->kind == F32 || o->kind == BF16 || o->kind == F16, alone = wide && o->M == 1 && o->N * at(o->kind, o->K) >= BEYOND;
    for (long m = 0, some = some_columns(o); m < o->M; m += MOST) {
        int rows = MIN(MOST, o->M - m);
        for (int r = 0; r < rows; r++) xs[r] = o->x + (m + r) * o->K;
        for (long n = item * some; n < MIN(o->N, (item + 1) * some); n += COLS) {
            int cols = MIN(COLS, o->N - n);
            Rows weights = {(bytes)o->w + n * at(o->kind, o->K), 0, o->kind, o->K, o->K};
            if (alone) streamed(xs, &weights, cols, sums);
            else block(xs, rows, &weights, cols, sums);
            add(o->bias, o->bias_kind, n, cols, sums, rows);
            for (int r = 0; r < rows; r++) place(o->y + (m + r) * o->apart + n, sums + r * COLS, cols);
        }
    }
}
void linear(const Linear *o) {
    long some = some_columns(o);
    for (Linear part = *o; part.M > 0; part.x += CACHED * o->K, part.y += CACHED * o->apart, part.M -= CACHED) {
        Linear rows = part;
        rows.M = MIN(part.M, CACHED);
        each_item((o->N + some - 1) / some, products, &rows, team((double)o->N * o->K * (rows.M + 3), 6e4, o->threads));
    }
}

// ---- rows
static void norm(floats x, any w, long kind, long n, float eps, float *y) {
    vf squares = {0};
    for (long i = 0; i < n; i += W) squares += part(x + i, n - i) * part(x + i, n - i);
    float scale = 1.0f / sqrtf(sum(squares) / n + eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * scale * get(w, kind, i);
}

typedef struct { float *x; floats cos, sin; any norm[2]; int64_t kind[2]; double eps; int64_t M, H, K, D, threads; } Rope;
static void turn(const void *with, long m) {
    const Rope *o = with;
    floats cosine = o->cos + m * (o->D / 2), sine = o->sin + m * (o->D / 2);
    float *a = o->x + m * (o->H + 2 * o->K) * o->D;
    for (long h = 0; h < o->H + o->K; h++, a += o->D) {
        float *b = a + o->D / 2;
        int k = h >= o->H;
        if (o->norm[k]) norm(a, o->norm[k], o->kind[k], o->D, o->eps, a);
        for (long i = 0; i < o->D / 2; i++) {
            float u = a[i], v = b[i];
            a[i] = u * cosine[i] - v * sine[i], b[i] = v * cosine[i] + u * sine[i];
        }
    }
}
void rope(const Rope *o) {
    each_row(o->M, turn, o, team((double)o->M * (o->H + o->K) * o->D, 32768, o->threads));
}

static void spread(bytes p, uint8_t scale, float *y) {
    vf v[32 / W];
    unpack(p, scale, v);
    for (int j = 0; j < 16 / W; j++) store(y + 2 * W * j, LOW(v[j], v[j + 16 / W])), store(y + 2 * W * j + W, HIGH(v[j], v[j + 16 / W]));
}
typedef struct { bytes w; float *y; int64_t kind, M, K, threads; } Expand;
static void expand_row(const void *with, long m) {
    const Expand *o = with;
    expand(o->w + m * at(o->kind, o->K), o->kind, 0, o->K, o->y + m * o->K);
}
void expand_rows(const Expand *o) { each_row(o->M, expand_row, o, team((double)o->M * o->K, 65536, o->threads)); }
typedef struct { bytes blocks, scales; float *y; int64_t count, threads; } Packed;
static void spread_block(const void *with, long m) {
    const Packed *o = with;
    spread(o->blocks + 16 * m, o->scales[m], o->y + 32 * m);
}
void unpack_mxfp4(const Packed *o) { each_row(o->count, spread_block, o, team(o->count * 32.0, 65536, o->threads)); }

#include "cpu_rows.c"
#include "cpu_experts.c"
#include "cpu_attention.c"
#include "cpu_index.c"
#include "cpu_latent.c"
#include "cpu_cache.c"
#include "cpu_blocks.c"
#include "cpu_noise.c"
#include "cpu_drafts.c"
#include "cpu_suffix.c"
#include "cpu_step.c"
#include "cpu_program.c"
