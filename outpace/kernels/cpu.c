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
enum { F32, BF16, MXFP4, F16, GGML_MXFP4, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, WHOLE, PAIRED };  // of weights; MXFP4: as in safetensors; WHOLE: see cpu_whole.c; PAIRED: cpu_pairs.c
enum { ROWS = 4, COLS = 6, MOST = 64, CHUNK = 512 };  // a register tile; rows at once; k values kept in the first cache
enum { THREADS = 128, KEYS = 128, MOST_D = 256 };     // KEYS: of an attention tile, anchored at its multiples
enum { ITEM = 48, SPREAD = 512 };                     // weight rows of an item, at least: of all tiles a multiple; values unpacked at a time
enum { CACHED = 512, NEAR = 1 << 20, BEYOND = 1 << 22 };  // rows of x that stay in the second cache; bytes of weights that do; that no cache keeps

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
enum { SCRATCH, PACKED, BUFFERS };  // PACKED: of x for tiles, while its caller uses scratch
static void *buffer(int which, size_t count) {  // of floats, kept per calling thread: fresh pages cost more than the kernels
    static __thread void *memory[BUFFERS];
    static __thread size_t size[BUFFERS];
    if (count <= size[which]) return memory[which];
    free(memory[which]);
    size[which] = count + count / 2;
    return memory[which] = aligned_alloc(64, (size[which] * sizeof(float) + 63) / 64 * 64);
}
static float *scratch(size_t count) { return buffer(SCRATCH, count); }

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
    switch (kind < PAIRED ? kind : kind - PAIRED) {
        case F32: return 4 * k;
        case BF16: case F16: return 2 * k;
        case MXFP4: return k >> 1;
        case GGML_MXFP4: case WHOLE: return (k >> 5) * 17;  // WHOLE: of 16 rows, each has its share
        case Q8_0: return (k >> 5) * 34;
        case Q4_0: return (k >> 5) * 18;
        case Q4_K: return (k >> 8) * 144;
        case Q5_K: return (k >> 8) * 176;
        default: return (k >> 8) * 210;
    }
}
#include "cpu_formats.c"
#include "cpu_pairs.c"
#include "cpu_products.c"
#include "cpu_whole.c"
#include "cpu_tiles.c"

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
#include "cpu_training.c"
#include "cpu_noise.c"
#include "cpu_drafts.c"
#include "cpu_suffix.c"
#include "cpu_step.c"
#include "cpu_program.c"
#include "cpu_rounds.c"
