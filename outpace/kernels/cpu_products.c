// Part of cpu.c: products of rows of x with weight rows. Every value of y has one accumulator of W lanes over all of k, whatever tile it is in.

// Weight rows of k values, `apart` values between them; s: MXFP4 scales; far: to be fetched ahead; stream: no cache keeps them, and
// memory is read fastest one row after the other.
typedef struct { bytes w, s; int64_t kind, k, apart, far, stream; } Rows;
INLINE Rows from_row(const Rows *m, long n) {
    Rows later = *m;
    later.w += n * at(m->kind, m->apart), later.s += n * (m->apart >> 5);
    return later;
}

// Values from..to of R rows of x times C weight rows; `every` so many steps, a cache line of each is fetched that is `ahead` bytes later.
INLINE void tile(const int R, const int C, const int kind, const floats *x, const Rows *m, long from, long to, long ahead, int every, vf *acc,
                 float *sums) {
    const int pairs = kind >= PAIRED, blocks = kind == MXFP4 || kind == GGML_MXFP4 || kind == Q8_0, step = pairs || blocks ? 32 : W;
    vf a[ROWS * COLS] = {{0}};
    long k = from, apart = at(kind, m->apart), s_apart = m->apart >> 5;
    bytes w = m->w + at(kind, from), s = m->s + (from >> 5), later = m->w + ahead;
    if (from) UNROLL for (int i = 0; i < R * C; i++) a[i] = acc[i];
    for (int wait = 1; k + step <= to; k += step, w += at(kind, step), s++) {
        if (!--wait) {
            UNROLL for (int c = 0; c < C; c++) __builtin_prefetch(later + c * apart, 0, 2);
            later += 64, wait = every;
        }
        UNROLL for (int c = 0; c < C; c++) {
            if (pairs) {
                meet_pairs(R, kind - PAIRED, x, k, w + c * apart, s + c * s_apart, a + c, C);
                continue;
            }
            vf v[32 / W];
            if (kind == MXFP4) unpack(w + c * apart, s[c * s_apart], v);
            else if (kind == GGML_MXFP4) unpack(w + c * apart + 1, w[c * apart], v);
            else if (kind == Q8_0) UNROLL for (int j = 0; j < step / W; j++) v[j] = q8_part(w + c * apart, j * W);
            else *v = kind == F32 ? load((floats)(w + c * apart)) : kind == F16 ? halves(w + c * apart) : widen(w + c * apart);
            UNROLL for (int j = 0; j < step / W; j++) {
                if (R > 1) HOLD(v[j]);
                UNROLL for (int r = 0; r < R; r++) a[r * C + c] += v[j] * load(x[r] + k + j * W);
            }
        }
    }
    if (k < to && pairs) {  // of bfloat16
        uint16_t xs[ROWS][32] = {{0}}, ws[32] = {0};
        floats ends[ROWS];
        for (int r = 0; r < R; r++) memcpy(xs[r], (const uint16_t *)x[r] + k, 2 * (to - k)), ends[r] = (floats)xs[r];
        UNROLL for (int c = 0; c < C; c++) memcpy(ws, w + c * apart, 2 * (to - k)), meet_pairs(R, BF16, ends, 0, (bytes)ws, 0, a + c, C);
    } else if (k < to) {
        float xs[ROWS][W] = {{0}}, ws[COLS + W][W] = {{0}};
        for (int r = 0; r < R; r++) for (long i = k; i < to; i++) xs[r][i - k] = x[r][i];
        for (int c = 0; c < C; c++) for (long i = k; i < to; i++) ws[c][i - k] = get(w + c * apart, kind, i - k);
        UNROLL for (int i = 0; i < R * C; i++) a[i] += load(ws[i % C]) * load(xs[i / C]);
    }
    if (to < m->k) UNROLL for (int i = 0; i < R * C; i++) acc[i] = a[i];
    else sums_of(a, R * C, sums);
}

INLINE int no_tile(long kind) { return kind > Q8_0 && kind < WHOLE; }

// How many weight rows a tile of so many rows of x has. Few rows take many: the sums of 16 accumulators cost what those of one do.
static const int WIDTH[ROWS + 1] = {0, W, W / 2, COLS, COLS};
typedef void (*Tiles)(const floats *x, int rows, int C, const Rows *m, long from, long to, long ahead, int every, vf *acc, float *sums);
#define TILE(R, C, kind) tile(R, C, kind, x, m, from, to, ahead, every, acc, sums); break
#define TILES(name, kind) \
    static void name(const floats *x, int rows, int C, const Rows *m, long from, long to, long ahead, int every, vf *acc, float *sums) { \
        switch (rows + (C == 1) * ROWS) { \
            case 1: TILE(1, W, kind); case 2: TILE(2, W / 2, kind); case 3: TILE(3, COLS, kind); case 4: TILE(4, COLS, kind); \
            case 5: TILE(1, 1, kind); case 6: TILE(2, 1, kind); case 7: TILE(3, 1, kind); default: TILE(4, 1, kind); \
        } \
    }
TILES(f32_tiles, F32)
TILES(bf16_tiles, BF16)
TILES(mxfp4_tiles, MXFP4)
TILES(f16_tiles, F16)
TILES(ggml_mxfp4_tiles, GGML_MXFP4)
TILES(q8_0_tiles, Q8_0)
TILES(bf16_pair_tiles, PAIRED + BF16)
TILES(mxfp4_pair_tiles, PAIRED + MXFP4)
TILES(ggml_mxfp4_pair_tiles, PAIRED + GGML_MXFP4)
static const Tiles TILES_OF[] = {  // by kind
    [F32] = f32_tiles, [BF16] = bf16_tiles, [MXFP4] = mxfp4_tiles, [F16] = f16_tiles, [GGML_MXFP4] = ggml_mxfp4_tiles, [Q8_0] = q8_0_tiles,
    [PAIRED + BF16] = bf16_pair_tiles, [PAIRED + MXFP4] = mxfp4_pair_tiles, [PAIRED + GGML_MXFP4] = ggml_mxfp4_pair_tiles,
};

// sums[r * C + c] = x[r] . weight row c, for less than ROWS rows of x or a multiple of ROWS.
static void block(const floats *x, int rows, int C, const Rows *m, float *sums) {
    vf acc[MOST * COLS];
    int R = MIN(rows, ROWS), parts = rows / R;
    for (long k = 0, chunk = parts > 1 ? CHUNK : m->k; k < m->k; k += chunk) for (int i = 0; i < parts; i++) {  // parts share weights in the first cache
        long to = MIN(k + chunk, m->k), every = INT32_MAX, ahead = 0;
        if (m->far) {  // each part fetches its share of the block after the next
            every = 64 / at(m->kind, m->kind == F32 || m->kind == BF16 || m->kind == F16 ? W : 32) * parts;
            ahead = 2 * MAX(C, COLS) * at(m->kind, m->k) + at(m->kind, k) + at(m->kind, to - k) * i / parts;
        }
        TILES_OF[m->kind](x + i * R, R, C, m, k, to, ahead, every, acc + i * R * C, sums + i * R * C);
    }
}

// The same for the first `cols` of C weight rows, of which first some values each are unpacked into the first cache, for all rows of x. The formats
// without a tile need it, and for many rows of x those that take long to unpack.
static void unpacked(const floats *x, int rows, int C, int cols, const Rows *m, float *sums) {
    vf acc[MOST * COLS];
    float w[(W > COLS ? W : COLS) * SPREAD] __attribute__((aligned(64)));
    int R = MIN(rows, ROWS), pairs = m->kind > PAIRED, kind = pairs ? PAIRED + BF16 : F32;
    for (long k = 0; k < m->k; k += SPREAD) {
        long to = MIN(k + SPREAD, m->k);
        for (int c = 0; c < C; c++) {
            Rows one = from_row(m, MIN(c, cols - 1));
            bytes later = one.w + 2 * C * at(m->kind, m->k);
            for (long b = at(m->kind, k); b < at(m->kind, to); b += 64) __builtin_prefetch(later + b, 0, 2);
            if (pairs) expand_pairs(one.w, one.s, m->kind - PAIRED, k, to, (uint16_t *)w + c * SPREAD);
            else expand(one.w, m->kind, k, to, w + c * SPREAD);
        }
        Rows these = {(bytes)w - at(kind, k), 0, kind, m->k, SPREAD};
        for (int i = 0; i < rows; i += R) TILES_OF[kind](x + i, R, C, &these, k, to, 0, INT32_MAX, acc + i * C, sums + i * C);
    }
}

INLINE void place(const int cols, const float *sums, int apart, floats bias, float *const *y, int rows, int c) {  // y[r][c..] = sums + bias
    for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < cols; i++) y[r][c + i] = sums[r * apart + i] + bias[i];
}
// y[r][c] = x[r] . weight row n + c + bias[n + c], for c < cols and at most MOST rows.
static void dots(const floats *x, float *const *y, int rows, const Rows *m, long n, int cols, any bias, long bias_kind) {
    float sums[MOST * COLS + 16], b[W > COLS ? W : COLS] = {0};
    for (int r = 0, some; r < rows; r += some) {
        some = rows - r < ROWS ? rows - r : (rows - r) / ROWS * ROWS;
        int wide = m->stream ? 1 : WIDTH[MIN(some, ROWS)], spread = no_tile(m->kind) || (some > 2 * ROWS && (m->kind == Q8_0 || m->kind > PAIRED + BF16));
        for (int c = 0, C; c < cols; c += C) {
            Rows these = from_row(m, n + c);
            int left = cols - c, apart = spread || left >= wide ? wide : 1;
            C = MIN(left, apart);
            if (spread) unpacked(x + r, some, wide, C, &these, sums);
            else block(x + r, some, C, &these, sums);
            for (int i = 0; bias && i < C; i++) b[i] = get(bias, bias_kind, n + c + i);
            if (C == W) place(W, sums, apart, b, y + r, some, c);
            else if (C == COLS) place(COLS, sums, apart, b, y + r, some, c);
            else place(C, sums, apart, b, y + r, some, c);
        }
    }
}

// apart: values between rows of y; rounded: see cpu_pairs.c
typedef struct { floats x; any w; int64_t kind; any bias; int64_t bias_kind; float *y; int64_t M, N, K, apart, rounded, threads; } Linear;
INLINE long some_columns(const Linear *o) {  // of one item: weights that a cache holds, and enough items for all threads
    return MAX(1, MIN(65536 / (ITEM * at(o->kind, o->K)), o->N / (ITEM * 2 * o->threads))) * ITEM;
}
static void products(const void *with, long item, long me) {
    const Linear *o = with;
    floats xs[MOST];
    float *ys[MOST];
    long size = o->N * at(o->kind, o->K), some = some_columns(o), n = item * some, cols = MIN(some, o->N - n);
    int alone = W == 16 && (o->kind == F32 || o->kind == BF16 || o->kind == F16), kind = paired(o->rounded, o->kind);
    Rows weights = {o->w, 0, kind, o->K, o->K, o->M > 1 || size > NEAR, alone && o->M <= ROWS && size >= BEYOND};
    for (long m = 0; m < o->M; m += MOST) {
        int rows = MIN(MOST, o->M - m);
        for (int r = 0; r < rows; r++) xs[r] = o->x + (m + r) * x_apart(o->K, kind), ys[r] = o->y + (m + r) * o->apart + n;
        dots(xs, ys, rows, &weights, n, cols, o->bias, o->bias_kind);
    }
}
static void plain_linear(const Linear *o) {
    long some = some_columns(o), apart = x_apart(o->K, paired(o->rounded, o->kind));
    Linear part = *o;
    if (rounds(o->rounded, o->kind)) part.x = round_rows(o->x, o->M, o->K, BY_PAIRS, scratch(o->M * apart), o->threads);
    for (; part.M > 0; part.x += CACHED * apart, part.y += CACHED * o->apart, part.M -= CACHED) {
        Linear rows = part;
        rows.M = MIN(part.M, CACHED);
        each_item((o->N + some - 1) / some, products, &rows, team((double)o->N * o->K * (rows.M + 3), 6e4, o->threads));
    }
}
