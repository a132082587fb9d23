// Part of cpu.c: products with weights of bfloat16 by matrix tiles (AMX). A float32 is the sum of three bfloat16 numbers, so products are exact and
// sums float32's, as without tiles. 16 weight rows meet 16 columns, each a part of a row of x: five rows of x take as long as one, 16 as three columns of
// tiles. Every value of y has one accumulator for each part, over all of k in order, whatever columns stand beside it.
#if W == 16 && defined __AMX_BF16__ && defined __AVX512BF16__ && defined __linux__
#include <sys/syscall.h>
#include <unistd.h>
int has_tiles;  // where the system allows them: they enlarge what it saves of a thread
__attribute__((constructor)) static void ask(void) { has_tiles = !syscall(SYS_arch_prctl, 0x1023, 18); }  // ARCH_REQ_XCOMP_PERM, XTILEDATA
#ifndef TILED_FROM
#define TILED_FROM (3 << 16)  // bytes of weights: with fewer, one row of x takes longer in tiles
#endif
enum { ROUNDED_FROM = MIN(1 << 12, TILED_FROM) };  // one part a row: a seventh of the time with twelve rows, no more with one
INLINE int tiled(const Linear *o) {
    return has_tiles && o->kind == BF16 && 2 * o->N * o->K > (o->rounded ? ROUNDED_FROM : TILED_FROM);
}

static const struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } SHAPE = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
// The caller's, before each kernel: torch releases the tiles of its thread after its own products.
static void use_tiles(long me) {
    static __thread int used;
    if (me && used) return;
    _tile_loadconfig(&SHAPE);
    used = 1;
}

// 32 values as three vectors of pairs, the largest part first.
INLINE void parts_of(floats x, long n, int parts, vf *to) {
    vf a = part(x, n), b = n > W ? part(x + W, n - W) : (vf){0};
    UNROLL for (int i = 0; i < parts; i++) {
        __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        to[i] = (vf)pairs;
        a -= (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pairs)), 16);
        b -= (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pairs, 1)), 16);
    }
}
// Rows of x as columns of tiles: of each 32 values of k, for each 16 columns, 16 pairs of each. Parts of a kind stand side by side.
enum { COLUMNS = 48, TILE = 256 };  // of a group; pairs of a tile
INLINE long steps_of(long k) { return (k + 31) / 32; }
INLINE int most_rows(int parts) { return COLUMNS / parts; }
INLINE int wide_of(int rows, int parts) { return (rows * parts + 15) / 16; }
INLINE int first_of(int i, int rows, int wide) { return i * (wide < 3 ? rows : 16); }  // column of the i-th parts
INLINE long tiles_for(long rows, int parts) {  // of 16 columns, for one step of k
    long most = most_rows(parts);
    return rows / most * (COLUMNS / 16) + wide_of(rows % most, parts);
}
INLINE void quads(vf *v) {  // 4 x 4 in each quarter: of four columns the 16 rows in order, or of 16 rows in four vectors the columns
    vf a = PAIRS(unpacklo_ps, v[0], v[1]), b = PAIRS(unpackhi_ps, v[0], v[1]), c = PAIRS(unpacklo_ps, v[2], v[3]), d = PAIRS(unpackhi_ps, v[2], v[3]);
    v[0] = TWINS(unpacklo_pd, a, c), v[1] = TWINS(unpackhi_pd, a, c), v[2] = TWINS(unpacklo_pd, b, d), v[3] = TWINS(unpackhi_pd, b, d);
}
static void into_columns(const floats *x, int rows, int parts, long K, uint32_t *to) {
    int wide = wide_of(rows, parts);
    vf v[COLUMNS] = {{0}}, p[3];
    for (long k = 0; k < K; k += 32, to += wide * TILE) {
        if (rows * parts <= 4) {  // the rest of a tile's columns is never looked at
            if (parts == 3) parts_of(x[0] + k, K - k, 3, v);
            else for (int r = 0; r < rows; r++) parts_of(x[r] + k, K - k, 1, v + r);
            quads(v);
#define ROW(i, q) _mm_store_ps((float *)to + 16 * (4 * q + i), _mm512_extractf32x4_ps((__m512)v[i], q))
            UNROLL for (int i = 0; i < 4; i++) ROW(i, 0), ROW(i, 1), ROW(i, 2), ROW(i, 3);
            continue;
        }
        for (int r = 0; r < rows; r++) {
            if (parts == 3) parts_of(x[r] + k, K - k, 3, p);
            else parts_of(x[r] + k, K - k, 1, p);
            for (int i = 0; i < parts; i++) v[first_of(i, rows, wide) + r] = p[i];
        }
        for (int j = 0; j < wide; j++) {
            transpose(v + 16 * j);
            for (int i = 0; i < 16; i++) store((float *)to + j * TILE + 16 * i, v[16 * j + i]);
        }
    }
}
// ---- a tile of 16 weight rows meets `wide` tiles of columns
#define MEMORY __asm__ volatile("" ::: "memory")  // what tiles read and write, which the compiler does not see
INLINE void meet(const int wide, bytes w, long apart, const uint32_t *x) {
    _tile_loadd(3, w, apart);
    _tile_loadd(4, x, 64); _tile_dpbf16ps(0, 3, 4);
    if (wide > 1) { _tile_loadd(5, x + TILE, 64); _tile_dpbf16ps(1, 3, 5); }
    if (wide > 2) { _tile_loadd(6, x + 2 * TILE, 64); _tile_dpbf16ps(2, 3, 6); }
}
static void copy_tile(const Rows *m, int rows, long k, uint16_t *to) {  // 32 values of each row from k on, zeros after the last
    bytes w = m->w + 2 * k;
    __mmask32 there = m->k - k < 32 ? (1u << (m->k - k)) - 1 : ~0u;
    for (int n = 0; n < rows; n++, w += 2 * m->apart) _mm512_store_si512(to + 32 * n, _mm512_maskz_loadu_epi16(there, w));
}
INLINE void keep_sums(const int wide, float *sums) {  // and begin anew
#define KEEP(t) _tile_stored(t, sums + 16 * t, COLUMNS * sizeof(float)); _tile_zero(t)
    KEEP(0);
    if (wide > 1) { KEEP(1); }
    if (wide > 2) { KEEP(2); }
}
// y[r][at..] = sums + bias, of one tile of weights: sums has a line of COLUMNS floats for each of its 16 rows.
INLINE vf permuted(vf a, vf b, int from) { return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)(PLACES + from), (__m512)b); }
static void place_tile(const float *sums, int rows, int parts, int cols, vf bias, float *const *y, int at) {
    int wide = wide_of(rows, parts);
    vf v[16];
    for (int r = 0; r < rows; r += 16) {
        if (rows == 1 && parts == 3) {
#define QUARTER(i, q) v[i] = (vf)_mm512_mask_broadcast_f32x4((__m512)v[i], 15 << 4 * q, _mm_load_ps(sums + (4 * q + i) * COLUMNS))
            UNROLL for (int i = 0; i < 4; i++) v[i] = (vf){0}, QUARTER(i, 0), QUARTER(i, 1), QUARTER(i, 2), QUARTER(i, 3);
            quads(v);
            v[0] += v[1] + v[2];
        } else {
            for (int i = 0; i < 16; i++) {
                vf a = load(sums + i * COLUMNS + r);
                if (parts == 1) { v[i] = a; continue; }
                vf b = wide > 1 ? load(sums + i * COLUMNS + 16) : a;
                v[i] = a + (wide < 3 ? permuted(a, b, rows) + permuted(a, b, 2 * rows) : b + load(sums + i * COLUMNS + 32));
            }
            transpose(v);
        }
        for (int i = 0; i < MIN(16, rows - r); i++) {
            vf sum = v[i] + bias;
            if (cols == 16) store(y[r + i] + at, sum);
            else memcpy(y[r + i] + at, &sum, cols * sizeof(float));
        }
    }
}
typedef struct { const uint32_t *to; int rows, parts; } Columns;
// As `dots`, of a group of rows that are columns. To wait for what was just stored takes as long as a tile: it is read a turn later.
INLINE void tile_products(const int wide, const Columns *x, float *const *y, const Rows *m, long n, int cols, any bias, long bias_kind) {
    float sums[2][16 * COLUMNS] __attribute__((aligned(64)));
    uint16_t copied[2][16 * 32] __attribute__((aligned(64)));
    long steps = steps_of(m->k), later = (cols + 15) / 16 * 16;
    _tile_zero(0); _tile_zero(1); _tile_zero(2);
    for (long c = 0; c <= later; c += 16) {
        Rows these = from_row(m, n + c);
        const uint32_t *to = x->to;
        int crossed = ((uintptr_t)these.w | 2 * m->apart) % 64;
        if (c + 16 <= cols && !crossed) {  // a row that crosses cache lines takes six times as long
            for (long i = 0; i < steps; i++, to += wide * TILE) meet(wide, these.w + 64 * i, 2 * m->apart, to);
        } else if (c < cols) for (long i = 0; i <= steps; i++) {
            if (i < steps) copy_tile(&these, MIN(16, cols - c), 32 * i, copied[i % 2]);
            MEMORY;
            if (i) meet(wide, (bytes)copied[(i - 1) % 2], 64, to), to += wide * TILE;
        }
        if (c < cols) keep_sums(wide, sums[c / 16 % 2]);
        MEMORY;
        if (!c) continue;
        int there = MIN(16, cols - c + 16);
        vf add = bias ? fetch(bias, bias_kind, n + c - 16, there) : (vf){0};
        place_tile(sums[(c / 16 + 1) % 2], x->rows, x->parts, there, add, y, c - 16);
    }
}
static void column_dots(const Columns *x, float *const *y, const Rows *m, long n, int cols, any bias, long bias_kind) {
    int wide = wide_of(x->rows, x->parts);
    if (wide == 1) tile_products(1, x, y, m, n, cols, bias, bias_kind);
    else if (wide == 2) tile_products(2, x, y, m, n, cols, bias, bias_kind);
    else tile_products(3, x, y, m, n, cols, bias, bias_kind);
}

typedef struct { const Linear *o; uint32_t *columns; int parts; } Tiled;
static void group_columns(const void *with, long group) {
    const Tiled *t = with;
    const Linear *o = t->o;
    int most = most_rows(t->parts);
    floats xs[COLUMNS];
    long m = group * most, rows = MIN(most, o->M - m);
    for (int r = 0; r < rows; r++) xs[r] = o->x + (m + r) * o->K;
    into_columns(xs, rows, t->parts, o->K, t->columns + tiles_for(m, t->parts) * steps_of(o->K) * TILE);
}
static void tiled_products(const void *with, long item, long me) {
    const Tiled *t = with;
    const Linear *o = t->o;
    float *ys[COLUMNS];
    long some = some_columns(o), n = item * some, cols = MIN(some, o->N - n), most = most_rows(t->parts);
    Rows weights = {o->w, 0, o->kind, o->K, o->K, 0, 0};
    if (me) use_tiles(me);
    for (long m = 0; m < o->M; m += most) {
        int rows = MIN(most, o->M - m);
        for (int r = 0; r < rows; r++) ys[r] = o->y + (m + r) * o->apart + n;
        Columns x = {t->columns + tiles_for(m, t->parts) * steps_of(o->K) * TILE, rows, t->parts};
        column_dots(&x, ys, &weights, n, cols, o->bias, o->bias_kind);
    }
}
static void tiled_linear(const Linear *o) {
    int parts = o->rounded ? 1 : 3;
    long some = some_columns(o), most = most_rows(parts);
    use_tiles(0);
    long at_once = CACHED / most * most;
    Linear rows = *o;
    for (; rows.M > 0; rows.x += at_once * o->K, rows.y += at_once * o->apart, rows.M -= at_once) {
        Linear now = rows;
        now.M = MIN(rows.M, at_once);
        Tiled t = {&now, buffer(PACKED, tiles_for(now.M, parts) * steps_of(o->K) * TILE), parts};
        each_row((now.M + most - 1) / most, group_columns, &t, team((double)now.M * o->K, 65536, o->threads));
        each_item((o->N + some - 1) / some, tiled_products, &t, team((double)o->N * o->K * (now.M + 3), 6e4, o->threads));
    }
}
#else
int has_tiles = 0;
INLINE int tiled(const Linear *o) { return 0; }
static void tiled_linear(const Linear *o) {}
#endif
void linear(const Linear *o) {
    if (tiled(o)) tiled_linear(o);
    else plain_linear(o);
}
