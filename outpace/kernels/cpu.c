// CPU kernels: each output row is the same float operations in the same order, however many rows travel with it.
//
// That is why one accumulator of W lanes runs over k per output, why reductions are written with explicit vectors and why
// nothing here may be compiled with -ffast-math. Row and column tiles only put independent accumulators side by side.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
int omp_get_thread_num(void);
#else
#define omp_get_thread_num() 0
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#define W 16
#else
#define W 8
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (__typeof__((a) > (b))){__VA_ARGS__})
#endif
#if defined(__AVX512F__)
#define HOLD(v) __asm__("" : "+v"(v))  // in a register: the compiler would load a weight again for every row
#else
#define HOLD(v)
#endif
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define UNROLL _Pragma("GCC unroll 32")

typedef float vf __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
typedef float f4 __attribute__((vector_size(16)));
typedef float f4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef const uint8_t *bytes;
typedef const float *floats;

enum { F32, BF16, MXFP4 };                          // how a weight is stored
enum { ROWS = 4, COLS = 6, MOST = 64, CHUNK = 512 };  // a register tile; rows of one block; k values kept in the first cache
enum { THREADS = 128, KEYS = 128, MOST_D = 256 };               // keys of one attention tile, anchored at multiples of KEYS

// ---- vectors -----------------------------------------------------------------------------------------------------------

INLINE vf load(floats p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf part(floats p, long n) {                  // the first n lanes, zeros after them
    if (n >= W) return load(p);
    vf v = {0};
    memcpy(&v, p, n * sizeof(float));
    return v;
}
INLINE void put(float *p, vf v, long n) { if (n < W) memcpy(p, &v, n * sizeof(float)); else store(p, v); }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf widen(bytes p) { return (vf)(__builtin_convertvector(*(const vh *)p, vi) << 16); }
INLINE float top(vf v) { float m = v[0]; UNROLL for (int i = 1; i < W; i++) m = MAX(m, v[i]); return m; }

INLINE float get(const void *p, int kind, long i) {
    if (kind == F32) return ((floats)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE f4 fold(vf v) {
    union { vf v; f4 q[W / 4]; } u = {v};
#if W == 16
    return (u.q[0] + u.q[2]) + (u.q[1] + u.q[3]);
#else
    return u.q[0] + u.q[1];
#endif
}

INLINE f4 sum4(const vf *v) {                       // the four sums of four vectors
    f4 a = fold(v[0]), b = fold(v[1]), c = fold(v[2]), d = fold(v[3]);
    f4 ab = MIX(a, b, 0, 4, 1, 5) + MIX(a, b, 2, 6, 3, 7), cd = MIX(c, d, 0, 4, 1, 5) + MIX(c, d, 2, 6, 3, 7);
    return MIX(ab, cd, 0, 1, 4, 5) + MIX(ab, cd, 2, 3, 6, 7);
}

#if W == 16
#define PLACES (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define LOW(a, b) MIX(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) MIX(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define PLACES (vi){0, 1, 2, 3, 4, 5, 6, 7}
#define LOW(a, b) MIX(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) MIX(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

INLINE void transpose(vf *a) {                      // W x W: log2(W) perfect shuffles
    UNROLL for (int round = 1; round < W; round *= 2) {
        vf b[W];
        UNROLL for (int i = 0; i < W / 2; i++) b[2 * i] = LOW(a[i], a[i + W / 2]), b[2 * i + 1] = HIGH(a[i], a[i + W / 2]);
        UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
    }
}

INLINE float sum(vf v) { f4 a = fold(v); return (a[0] + a[2]) + (a[1] + a[3]); }

INLINE vf expv(vf x) {                              // relative error about 1e-7; 0 below -87
    vi gone = x < -87.0f;
    x = pick(x > 88.0f, (vf){0} + 88.0f, x);
    vf z = x * 1.44269504f + 12582912.0f;           // 1.5 * 2^23: the rounded quotient is left in the low bits
    vf n = z - 12582912.0f, r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = ((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
            + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vf)((vi)(p * (vf)(((vi)z << 23) + 0x3f800000)) & ~gone);
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + expv(-x)); }

// ---- threads -----------------------------------------------------------------------------------------------------------

typedef struct { long next, end, pad[6]; } Share;   // a thread's own items, so that small weights stay in its cache; then it steals

static void deal(Share *s, long items, int threads) {
    for (int i = 0; i < threads; i++) s[i] = (Share){items * i / threads, items * (i + 1) / threads, {0}};
}

INLINE long take(Share *s, int me, int threads) {
    for (int i = 0; i < threads; i++) {
        Share *v = s + (me + i) % threads;
        if (__atomic_load_n(&v->next, __ATOMIC_RELAXED) >= v->end) continue;
        long item = __atomic_fetch_add(&v->next, 1, __ATOMIC_RELAXED);
        if (item < v->end) return item;
    }
    return -1;
}

// All threads or one: a team of another size would make the runtime end threads and start new ones.
INLINE int team(double work, double enough, int threads) { return work < enough ? 1 : MIN(threads, THREADS); }

static float *scratch(size_t count) {               // kept per calling thread: fresh pages cost more than the kernels
    static __thread float *memory;
    static __thread size_t size;
    if (count > size) {
        free(memory);
        size = count + count / 2;
        memory = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64);
    }
    return memory;
}

// ---- products ----------------------------------------------------------------------------------------------------------

static float E2M1[256][16];                         // the 16 values of a nibble times 2^(scale - 127)

__attribute__((constructor)) static void fill(void) {
    static const float value[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < 4096; i++) E2M1[i / 16][i % 16] = ldexpf(i & 8 ? -value[i & 7] : value[i & 7], i / 16 - 127);
}

// 16 bytes are 32 values: out = the 16 of the low nibbles (even places), then the 16 of the high nibbles (odd places).
INLINE void unpack(bytes p, uint8_t scale, vf *out) {
#if W == 16
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    out[0] = (vf)_mm512_permutexvar_ps(b, _mm512_loadu_ps(E2M1[scale]));
    out[1] = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), _mm512_loadu_ps(E2M1[scale]));
#else
    for (int i = 0; i < 4; i++) {
        vi b = __builtin_convertvector(*(const vb *)(p + i % 2 * 8), vi) >> (i / 2 * 4), m = b & 7;
        vi twice = m + ((m - 4) & (m > 3)) + ((m + m - 12) & (m > 5));
        out[i] = (vf)((vi)(__builtin_convertvector(twice, vf) * E2M1[scale][1]) | (b & 8) << 28);
    }
#endif
}

static void even_odd(floats x, long n, float *out) {  // puts activations in the order that unpack gives weights in
    for (long k = 0; k < n; k += 32)
        for (int j = 0; j < 16; j++) out[k + j] = x[k + 2 * j], out[k + 16 + j] = x[k + 2 * j + 1];
}

INLINE long at(int kind, long k) { return kind == F32 ? 4 * k : kind == BF16 ? 2 * k : k / 2; }  // bytes before weight k

typedef struct { bytes w, s; int kind; long k; } Rows;  // weight rows of k values, with their MXFP4 scales

// Adds values from..to of R rows of x times COLS weight rows (the last of cols again in place of missing ones).
INLINE void tile(const int R, const int kind, const floats *x, Rows m, int cols, long from, long to, long ahead, long hop, vf *acc,
                 float *sums) {
    vf a[ROWS * COLS] = {{0}};
    bytes w[COLS], s[COLS];
    long k = from;
    UNROLL for (int c = 0; c < COLS; c++) {
        w[c] = m.w + MIN(c, cols - 1) * at(kind, m.k);
        if (kind == MXFP4) s[c] = m.s + MIN(c, cols - 1) * (m.k / 32);
    }
    if (from) UNROLL for (int i = 0; i < R * COLS; i++) a[i] = acc[i];
    for (; k + (kind == MXFP4 ? 32 : W) <= to; k += kind == MXFP4 ? 32 : W) {
        if (kind == F32 || !(k & (kind == MXFP4 ? 96 : W)))
            UNROLL for (int c = 0; c < COLS; c++) __builtin_prefetch(w[c] + ahead, 0, 2);
        ahead += hop;
        UNROLL for (int c = 0; c < COLS; c++) {
            vf v[32 / W];
            if (kind == MXFP4) unpack(w[c] + (k >> 1), s[c][k >> 5], v);
            else *v = kind == F32 ? load((floats)(w[c] + 4 * k)) : widen(w[c] + 2 * k);
            UNROLL for (int j = 0; j < (kind == MXFP4 ? 32 / W : 1); j++) {
                if (R > 1) HOLD(v[j]);
                UNROLL for (int r = 0; r < R; r++) a[r * COLS + c] += v[j] * load(x[r] + k + j * W);
            }
        }
    }
    if (k < to) {
        float xs[ROWS][W] = {{0}}, ws[COLS][W] = {{0}};
        for (int r = 0; r < R; r++) for (long i = k; i < to; i++) xs[r][i - k] = x[r][i];
        for (int c = 0; c < COLS; c++) for (long i = k; i < to; i++) ws[c][i - k] = get(w[c], kind, i);
        UNROLL for (int i = 0; i < R * COLS; i++) a[i] += load(ws[i % COLS]) * load(xs[i / COLS]);
    }
    if (to < m.k) UNROLL for (int i = 0; i < R * COLS; i++) acc[i] = a[i];
    else UNROLL for (int i = 0; i < R * COLS; i += 4) *(f4u *)(sums + i) = sum4(a + i);
}

// sums[r * COLS + c] = x[r] . weight row c, for at most MOST rows of x and COLS of weights.
static void block(const floats *x, int rows, const Rows *m, int cols, float *sums) {
    vf acc[MOST * COLS];
    long chunk = rows > ROWS ? CHUNK : m->k, parts = (rows + ROWS - 1) / ROWS;  // several row tiles share weights in the first cache
    for (long k = 0; k < m->k; k += chunk)
        for (long i = 0; i < parts; i++) {          // each fetches its portion of the block after the next
            long to = MIN(k + chunk, m->k), hop = at(m->kind, m->kind == MXFP4 ? 32 : W) / parts;
            long ahead = 2 * COLS * at(m->kind, m->k) + at(m->kind, k) + at(m->kind, to - k) * i / parts;
#define TILE(R, kind) tile(R, kind, x + i * ROWS, *m, cols, k, to, ahead, hop, acc + i * ROWS * COLS, sums + i * ROWS * COLS); break
#define TILES(kind) switch (rows - i * ROWS) { case 1: TILE(1, kind); case 2: TILE(2, kind); case 3: TILE(3, kind); default: TILE(4, kind); }
            if (m->kind == F32) TILES(F32) else if (m->kind == BF16) TILES(BF16) else TILES(MXFP4)
        }
}

void linear(const float *x, const void *w, int kind, const void *bias, int bias_kind, const float *residual, float *y,
            long M, long N, long K, int threads) {
    long row = at(kind, K), some = MAX(1, 65536 / (COLS * row)) * COLS;
    Share shares[THREADS];
    threads = team((double)N * K * (M + 3), 2e5, threads);
    deal(shares, (N + some - 1) / some, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long item; (item = take(shares, omp_get_thread_num(), threads)) >= 0;)
        for (long m = 0; m < M; m += MOST) {
            int rows = MIN(MOST, M - m);
            floats xs[MOST];
            float sums[MOST * COLS + 2];
            for (int r = 0; r < rows; r++) xs[r] = x + (m + r) * K;
            for (long n = item * some; n < MIN(N, (item + 1) * some); n += COLS) {
                int cols = MIN(COLS, N - n);
                block(xs, rows, &(Rows){(bytes)w + n * row, 0, kind, K}, cols, sums);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < cols; c++) {
                        long i = (m + r) * N + n + c;
                        y[i] = sums[r * COLS + c] + (bias ? get(bias, bias_kind, n + c) : 0) + (residual ? residual[i] : 0);
                    }
            }
        }
}

// ---- rows --------------------------------------------------------------------------------------------------------------

static void norm_row(floats x, const void *w, int kind, long n, float eps, float *y) {
    vf squares = {0};
    long i = 0;
    for (; i + W <= n; i += W) squares += load(x + i) * load(x + i);
    if (i < n) squares += part(x + i, n - i) * part(x + i, n - i);
    float scale = 1.0f / sqrtf(sum(squares) / n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * get(w, kind, i);
}

void rms_norm(const float *x, const void *w, int kind, float eps, float *y, long M, long C, int threads) {
    threads = team((double)M * C, 65536, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long m = 0; m < M; m++) norm_row(x + m * C, w, kind, C, eps, y + m * C);
}

void rope(float *x, const float *cosine, const float *sine, const void *q_norm, const void *k_norm, int q_kind, int k_kind,
          float eps, long M, long H, long K, long D, int threads) {
    long half = D / 2;
    threads = team((double)M * (H + K) * D, 32768, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long m = 0; m < M; m++)
        for (long h = 0; h < H + K; h++) {
            float *p = x + (m * (H + 2 * K) + h) * D;
            floats c = cosine + m * half, s = sine + m * half;
            const void *norm = h < H ? q_norm : k_norm;
            if (norm) norm_row(p, norm, h < H ? q_kind : k_kind, D, eps, p);
            for (long i = 0; i < half; i++) {
                float a = p[i], b = p[half + i];
                p[i] = a * c[i] - b * s[i];
                p[half + i] = b * c[i] + a * s[i];
            }
        }
}

void silu_mul(const float *x, float *y, long M, long F, int threads) {
    threads = team((double)M * F, 32768, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long m = 0; m < M; m++) {
        floats gate = x + 2 * m * F, up = gate + F;
        for (long i = 0, n; n = MIN(W, F - i), i < F; i += W) {
            vf g = part(gate + i, n);
            put(y + m * F + i, g * sigmoid(g) * part(up + i, n), n);
        }
    }
}

void unpack_mxfp4(const uint8_t *blocks, const uint8_t *scales, float *y, long count, int threads) {
    threads = team(count * 32.0, 65536, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long i = 0; i < count; i++) {
        float v[32] __attribute__((aligned(64)));
        unpack(blocks + 16 * i, scales[i], (vf *)v);
        for (int j = 0; j < 16; j++) y[32 * i + 2 * j] = v[j], y[32 * i + 2 * j + 1] = v[16 + j];
    }
}

// ---- experts -----------------------------------------------------------------------------------------------------------

// The k largest of E logits, descending, the lowest index first among equals; soft = softmax over all before choosing.
void route(const float *x, const void *w, int kind, const void *bias, int bias_kind, int64_t *index, float *weight,
           long M, long E, long C, long k, int soft, int renormalise, int threads) {
    float *logits = scratch(M * (E + W));
    linear(x, w, kind, bias, bias_kind, 0, logits, M, E, C, threads);
    for (long m = 0; m < M; m++) {
        float *p = logits + m * E, *chosen = weight + m * k, total = 0;
        int64_t *at = index + m * k;
        for (long i = 0; i < k; i++) {
            long best = -1;
            for (long e = 0; e < E; e++) {
                int used = 0;
                for (long j = 0; j < i; j++) used |= at[j] == e;
                if (!used && (best < 0 || p[e] > p[best])) best = e;
            }
            at[i] = best;
            chosen[i] = p[best];
        }
        vf all = {0};
        float high = chosen[0];
        for (long e = 0; soft && e < E; e += W) {
            vf v = (vf){0} - INFINITY;
            memcpy(&v, p + e, MIN(W, E - e) * sizeof(float));
            all += expv(v - high);
        }
        for (long i = 0; i < k; i++) chosen[i] = expv((vf){0} + (chosen[i] - high))[0], total += chosen[i];
        if (soft) for (long i = 0; i < k; i++) chosen[i] /= sum(all);
        if (soft && renormalise) { total = 0; for (long i = 0; i < k; i++) total += chosen[i]; }
        if (!soft || renormalise) for (long i = 0; i < k; i++) chosen[i] /= total;
    }
}

typedef struct { Rows rows; const void *bias; int bias_kind; long n; } Experts;  // weights [E, n, k], bias [E, n]

static void expert(const Experts *m, long e, long n, int cols, const floats *x, int rows, float *sums) {
    Rows part = m->rows;
    part.w += (e * m->n + n) * at(part.kind, part.k), part.s += (e * m->n + n) * (part.k / 32);
    block(x, rows, &part, cols, sums);
    if (m->bias)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) sums[r * COLS + c] += get(m->bias, m->bias_kind, e * m->n + n + c);
}

// y[m] = sum over i of weight[m, i] * (down . act(up . x[m]) of expert index[m, i]); clamped: gpt-oss's activation, rows interleaved.
void moe(const float *x, const int64_t *index, const float *weight, const void *up_w, const void *up_s, const void *up_bias,
         int up_kind, int up_bias_kind, const void *down_w, const void *down_s, const void *down_bias, int down_kind,
         int down_bias_kind, float *y, long M, long C, long F, long E, long k, int clamped, float limit, float alpha, int threads) {
    enum { UNITS = 48 };                            // of the hidden layer, per item
    Experts up = {{up_w, up_s, up_kind, C}, up_bias, up_bias_kind, 2 * F};
    Experts down = {{down_w, down_s, down_kind, F}, down_bias, down_bias_kind, C};
    long A = M * k, groups = (F + UNITS - 1) / UNITS, distinct = 0;
    threads = team((double)A * C * F, 32768, threads);
    float *h = scratch(A * F + M * C + threads * A * COLS + 2 * (A + 2 * E + 2)), *mixed = h + A * F, *parts = mixed + M * C;
    long *first = (long *)((uintptr_t)(parts + threads * A * COLS + 1) & ~7ul), *used = first + E + 1, *order = used + E;
    memset(first, 0, (E + 1) * sizeof(long));       // order: the assignments of expert e are order[first[e]..first[e + 1]-1]
    for (long a = 0; a < A; a++) first[index[a] + 1]++;
    for (long e = 0; e < E; e++) if (first[e + 1]) used[distinct++] = e;
    for (long e = 0; e < E; e++) first[e + 1] += first[e];
    for (long a = 0; a < A; a++) order[first[index[a]]++] = a;
    memmove(first + 1, first, E * sizeof(long));
    first[0] = 0;
    if (up_kind == MXFP4) for (long m = 0; m < M; m++) even_odd(x + m * C, C, mixed + m * C);
    floats from = up_kind == MXFP4 ? mixed : x;
    Share ups[THREADS], downs[THREADS];
    deal(ups, distinct * groups, threads);
    deal(downs, (C + COLS - 1) / COLS, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int me = omp_get_thread_num();
        float sums[MOST * COLS + 2], raw[MOST][2 * UNITS], *mine = parts + me * A * COLS;
        floats xs[MOST];
        for (long item; (item = take(ups, me, threads)) >= 0;) {
            long e = used[item / groups], f0 = item % groups * UNITS, units = MIN(UNITS, F - f0);
            for (long a = first[e]; a < first[e + 1]; a += MOST) {
                int rows = MIN(MOST, first[e + 1] - a);
                for (int r = 0; r < rows; r++) xs[r] = from + order[a + r] / k * C;
                for (int half = 0; half < 2; half++) {  // interleaved: half of the pairs; else the gates, then the ups
                    long n0 = clamped ? 2 * f0 + half * units : f0 + half * F;
                    for (long n = 0; n < units; n += COLS) {
                        int cols = MIN(COLS, units - n);
                        expert(&up, e, n0 + n, cols, xs, rows, sums);
                        for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++) raw[r][half * units + n + c] = sums[r * COLS + c];
                    }
                }
                for (int r = 0; r < rows; r++) {
                    float gate[UNITS] = {0}, lift[UNITS] = {0}, *to = h + order[a + r] * F;
                    for (int u = 0; u < units; u++) {
                        gate[u] = clamped ? MIN(raw[r][2 * u], limit) : raw[r][u];
                        lift[u] = clamped ? MAX(MIN(raw[r][2 * u + 1], limit), -limit) + 1.0f : raw[r][units + u];
                    }
                    for (int u = 0; u < units; u += W)
                        store(gate + u, load(gate + u) * sigmoid(load(gate + u) * (clamped ? alpha : 1.0f)) * load(lift + u));
                    for (long f = f0; f < f0 + units; f++)
                        to[down_kind == MXFP4 ? f / 32 * 32 + f % 32 / 2 + f % 2 * 16 : f] = gate[f - f0];
                }
            }
        }
#pragma omp barrier
        for (long item; (item = take(downs, me, threads)) >= 0;) {
            int cols = MIN(COLS, C - item * COLS);
            for (long i = 0; i < distinct; i++)
                for (long e = used[i], a = first[e]; a < first[e + 1]; a += MOST) {
                    int rows = MIN(MOST, first[e + 1] - a);
                    for (int r = 0; r < rows; r++) xs[r] = h + order[a + r] * F;
                    expert(&down, e, item * COLS, cols, xs, rows, sums);
                    for (int r = 0; r < rows; r++) memcpy(mine + order[a + r] * COLS, sums + r * COLS, COLS * sizeof(float));
                }
            for (long m = 0; m < M; m++)
                for (int c = 0; c < cols; c++) {
                    float total = 0;
                    for (long i = 0; i < k; i++) total += weight[m * k + i] * mine[(m * k + i) * COLS + c];
                    y[m * C + item * COLS + c] = total;
                }
        }
    }
}

// ---- attention ---------------------------------------------------------------------------------------------------------

INLINE void values(const int R, const int V, const floats *v, int n, floats p, long d, long D, float *o) {
    vf a[ROWS * 4] = {{0}};
    for (int j = 0; j < n; j++) {
        UNROLL for (int i = 0; i < V; i++) {
            vf x = load(v[j] + d + i * W);
            UNROLL for (int r = 0; r < R; r++) a[r * 4 + i] += x * p[r * KEYS + j];
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) store(o + r * D + d + i * W, a[r * 4 + i]);
}

INLINE void scores(const int R, const floats *q, floats k, long D, float *p) {  // k [D, 2W] -> p [R, KEYS]
    vf a[8 * 2] = {{0}};
    for (long d = 0; d < D; d++) {
        vf k0 = load(k + d * 2 * W), k1 = load(k + d * 2 * W + W);
        UNROLL for (int r = 0; r < R; r++) a[2 * r] += k0 * q[r][d], a[2 * r + 1] += k1 * q[r][d];
    }
    UNROLL for (int r = 0; r < R; r++) store(p + r * KEYS, a[2 * r]), store(p + r * KEYS + W, a[2 * r + 1]);
}

// One tile: the n keys at places from.. of it, of which query r sees the places lo[r]..hi[r]-1. Gives unscaled sums o, the highest
// score and the mass: the caller merges tiles in their order.
static void look(const floats *q, int rows, const floats *k, const floats *v, int from, int n, const int *lo, const int *hi,
                 long D, float scale, float *o, float *high, float *mass) {
    float p[MOST][KEYS], turned[(MOST_D + W) * 2 * W];
    int v0 = from / W * W, v1 = v0;
    for (; v1 < from + n; v1 += 2 * W) {            // lanes over keys, so that scores need no sum across lanes
        if (v1 + 2 * W > KEYS) v1 = KEYS - 2 * W;   // overlap: computed twice, alike
        for (int side = 0; side < 2; side++)
            for (long d = 0; d < D; d += W) {
                vf a[W];
                UNROLL for (int i = 0; i < W; i++) {
                    int j = MAX(0, MIN(v1 + side * W + i - from, n - 1));
                    floats key = k[j] + d;
                    __builtin_prefetch(key + 2 * W * D, 0, 2);
                    __builtin_prefetch(v[j] + d, 0, 2);
                    a[i] = part(key, D - d);
                }
                transpose(a);
                UNROLL for (int i = 0; i < W; i++) store(turned + (d + i) * 2 * W + side * W, a[i]);
            }
        for (int r = 0; r < rows; r += rows - r >= 8 ? 8 : rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1) {
            if (rows - r >= 8) scores(8, q + r, turned, D, p[r] + v1);
            else if (rows - r >= 4) scores(4, q + r, turned, D, p[r] + v1);
            else if (rows - r >= 2) scores(2, q + r, turned, D, p[r] + v1);
            else scores(1, q + r, turned, D, p[r] + v1);
        }
    }
    for (int r = 0; r < rows; r++) {
        vf m = (vf){0} - INFINITY, l = {0};
        for (int j = v0; j < v1; j += W) {
            vf x = pick((PLACES + j >= MAX(lo[r], from)) & (PLACES + j < MIN(hi[r], from + n)), load(p[r] + j) * scale, (vf){0} - INFINITY);
            store(p[r] + j, x);
            m = pick(x > m, x, m);
        }
        high[r] = top(m);
        for (int j = v0; j < v1; j += W) {
            vf e = expv(load(p[r] + j) - MAX(high[r], -1e30f));  // nothing seen: every weight is 0
            store(p[r] + j, e);
            l += e;
        }
        mass[r] = sum(l);
    }
    for (int r = 0; D < W && r < rows; r++)
        for (int d = 0; d < D; d++) {
            o[r * D + d] = 0;
            for (int j = 0; j < n; j++) o[r * D + d] += v[j][d] * p[r][from + j];
        }
    for (int r = 0; D >= W && r < rows; r += rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1)
        for (long d = 0; d < D; d += D - d >= 4 * W ? 4 * W : W) {
            long at = MIN(d, D - W);  // the last vector overlaps: its lanes are computed twice, alike
            float *to = o + r * D, *w = p[r] + from;
            int wide = D - d >= 4 * W;
            if (rows - r >= 4) wide ? values(4, 4, v, n, w, at, D, to) : values(4, 1, v, n, w, at, D, to);
            else if (rows - r >= 2) wide ? values(2, 4, v, n, w, at, D, to) : values(2, 1, v, n, w, at, D, to);
            else wide ? values(1, 4, v, n, w, at, D, to) : values(1, 1, v, n, w, at, D, to);
        }
}

// q [B, T, H, D] with strides, k and v [B, K, S, D] rings with strides. tree [B, T, T]: which new tokens a new token sees, else a chain.
void attend(const float *q, const float *k, const float *v, const int64_t *start, const uint8_t *tree, const int64_t *depth,
            const void *sinks, int sink_kind, float *y, long q_b, long q_t, long k_b, long k_h, long B, long T, long H, long K,
            long D, long S, long window, float scale, int threads) {
    long G = H / K, some = MAX(1, MOST / G), longest = 0;
    for (long b = 0; b < B; b++) longest = MAX(longest, start[b] + T);
    threads = team((double)B * T * H * D * (window ? MIN(window + T, longest) : longest), 1e5, threads);
#define LOWEST(b, t) (window ? MAX(0, start[b] + (tree ? depth[(b) * T + (t)] : (t)) - window + 1) : 0)
    for (long t0 = 0; t0 < T; t0 += some) {
        long steps = MIN(some, T - t0), rows = steps * G, tiles = 0;
        long base[B], low[B];
        for (long b = 0; b < B; b++) {
            low[b] = start[b] + t0;
            for (long t = t0; t < t0 + steps; t++) low[b] = MIN(low[b], LOWEST(b, t));
            base[b] = low[b] / KEYS;
            tiles = MAX(tiles, (start[b] + (tree ? T : t0 + steps) + KEYS - 1) / KEYS - base[b]);
        }
        float *o = scratch(B * K * tiles * rows * (D + 2)), *high = o + B * K * tiles * rows * D, *mass = high + B * K * tiles * rows;
        Share looks[THREADS], merges[THREADS];
        deal(looks, B * K * tiles, threads);
        deal(merges, B * K * rows, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            int me = omp_get_thread_num();
            for (long item; (item = take(looks, me, threads)) >= 0;) {
                long b = item / tiles / K, h = item / tiles % K, edge = (base[b] + item % tiles) * KEYS, s = start[b];
                floats kb = k + b * k_b + h * k_h, vb = v + b * k_b + h * k_h, qs[MOST], ks[KEYS], vs[KEYS];
                int lo[MOST], hi[MOST], alone = tree && edge + KEYS > s;  // then each new token has its own list of keys
                for (long t = t0; t < t0 + steps; t += alone ? 1 : steps) {
                    int n = 0, count = alone ? G : rows;
                    long from = MAX(edge, alone ? MIN(LOWEST(b, t), s) : low[b]), to = MIN(edge + KEYS, tree ? s : s + t0 + steps);
                    for (long j = from, slot = from % S * D; j < to; j++, n++) {
                        ks[n] = kb + slot, vs[n] = vb + slot;
                        if ((slot += D) == S * D) slot = 0;
                    }
                    long place = s;                 // a seen proposal takes the place it would have in plain decoding
                    for (long u = 0; alone && u < T; u++) {
                        if (!tree[(b * T + t) * T + u]) continue;
                        if (place >= edge && place < edge + KEYS) ks[n] = kb + (s + u) % S * D, vs[n++] = vb + (s + u) % S * D;
                        place++;
                    }
                    for (int r = 0; r < count; r++) {
                        long tr = t + r / G;
                        qs[r] = q + b * q_b + tr * q_t + (h * G + r % G) * D;
                        lo[r] = MAX(LOWEST(b, tr) - edge, 0) * !alone;
                        hi[r] = alone ? KEYS : tree ? s - edge : s + tr + 1 - edge;
                    }
                    long at = item * rows + (t - t0) * G;
                    if (n) look(qs, count, ks, vs, from - edge, n, lo, hi, D, scale, o + at * D, high + at, mass + at);
                    else for (int r = 0; r < count; r++) high[at + r] = -INFINITY;
                }
            }
#pragma omp barrier
            for (long item; (item = take(merges, me, threads)) >= 0;) {
                long bh = item / rows, r = item % rows, head = bh % K * G + r % G;
                float *to = y + ((bh / K * T + t0 + r / G) * H + head) * D, total = 0, best = -INFINITY, sink = sinks ? get(sinks, sink_kind, head) : 0;
                if (sinks) best = sink;
                for (long i = 0; i < tiles; i++) best = MAX(best, high[(bh * tiles + i) * rows + r]);
                if (sinks) total = expv((vf){0} + (sink - best))[0];
                memset(to, 0, D * sizeof(float));
                for (long i = 0; i < tiles; i++) {
                    long at = (bh * tiles + i) * rows + r;
                    if (high[at] == -INFINITY) continue;
                    float part = expv((vf){0} + (high[at] - best))[0];
                    total += part * mass[at];
                    for (long d = 0; d < D; d++) to[d] += part * o[at * D + d];
                }
                for (long d = 0; d < D; d++) to[d] /= total > 0 ? total : 1.0f;
            }
        }
    }
}
