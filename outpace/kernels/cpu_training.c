// Part of cpu.c: attention of whole sequences in training, forward and backward, in bfloat16 with sums of float32. Scores are formed with a key a line and
// a query a lane, so that a softmax goes down the lines; what weights and their gradients meet next is written as the next product reads it.
typedef struct { any q, k, v, sinks, ends, grad; void *out; float *lse, *inner; void *dq, *dk, *dv; int64_t rows, H, K, D, window; double scale; int64_t threads; } Sequences;
#ifdef __AVX512BF16__
enum { QUERIES = 64, STEP = 32, CELL = 256 };  // queries at once; values that a tile sums up; pairs of values of a tile
// c [16, 64] = or += a [16, STEP * steps] b; b: for each 16 columns `steps` tiles of pairs. Tiles of a are a_step bytes apart, its lines a_line.
INLINE void product_tiles(float *c, long c_line, int add, bytes a, long a_line, long a_step, const uint32_t *b, long steps) {
#if defined __AMX_BF16__ && defined __linux__
    if (has_tiles) {
#define BEGIN(t) if (add) _tile_loadd(t, c + 16 * t, 4 * c_line); else _tile_zero(t)
#define MULTIPLY(t) _tile_loadd(5, b + (t * steps + s) * CELL, 64); _tile_dpbf16ps(t, 4, 5)
#define END(t) _tile_stored(t, c + 16 * t, 4 * c_line)
        __asm__ volatile("" ::: "memory");  // what tiles read and write, which the compiler does not see
        BEGIN(0); BEGIN(1); BEGIN(2); BEGIN(3);
        for (long s = 0; s < steps; s++) {
            _tile_loadd(4, a + s * a_step, a_line);
            MULTIPLY(0); MULTIPLY(1); MULTIPLY(2); MULTIPLY(3);
        }
        END(0); END(1); END(2); END(3);
        __asm__ volatile("" ::: "memory");
        return;
    }
#endif
    for (int i = 0; i < 16; i++) {
        vf sums[4];
        UNROLL for (int j = 0; j < 4; j++) sums[j] = add ? load(c + i * c_line + 16 * j) : (vf){0};
        for (long s = 0; s < steps; s++) for (int p = 0; p < 16; p++) {
            int32_t pair;
            memcpy(&pair, a + s * a_step + i * a_line + 4 * p, 4);
            UNROLL for (int j = 0; j < 4; j++)
                sums[j] = (vf)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)load((floats)b + (j * steps + s) * CELL + 16 * p));
        }
        UNROLL for (int j = 0; j < 4; j++) store(c + i * c_line + 16 * j, sums[j]);
    }
}
static __m512i interleaved(__m512i ab) {  // 16 values and 16 more -> 16 pairs
    static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), ab);
}
INLINE __m512i both(vf a, vf b) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }  // 16 of a, then 16 of b
// 16 rows of STEP values -> their pairs as lines, a row a lane
static void turned_pairs(const uint16_t *x, long line, uint32_t *to) {
    vf v[16];
    for (int i = 0; i < 16; i++) v[i] = load((floats)(x + i * line));
    transpose(v);
    for (int i = 0; i < 16; i++) store((float *)to + 16 * i, v[i]);
}
// STEP rows of 16 values -> lines of two rows' pairs; or turned: 16 lines of the STEP rows
static void row_pairs(const uint16_t *x, long line, int turned, uint32_t *to) {
    vf v[16];
    for (int i = 0; i < 16; i++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(x + 2 * i * line)), b = _mm256_loadu_si256((const __m256i *)(x + (2 * i + 1) * line));
        v[i] = (vf)interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
    }
    if (turned) transpose(v);
    for (int i = 0; i < 16; i++) store((float *)to + 16 * i, v[i]);
}
static void take_rows(any from, long first, long apart, long n, long padded, long D, uint16_t *to) {  // zeros after n rows
    for (long i = 0; i < n; i++) memcpy(to + i * D, (const uint16_t *)from + first + i * apart, 2 * D);
    memset(to + n * D, 0, 2 * (padded - n) * D);
}
static void give_columns(floats from, const float *scale, long n, long D, void *to, long first, long apart) {  // [D, QUERIES], a query a row of `to`
    for (long j = 0; j < QUERIES; j += 16) for (long d = 0; d < D; d += 16) {
        vf v[16];
        for (int i = 0; i < 16; i++) v[i] = load(from + (d + i) * QUERIES + j) * (scale ? load(scale + j) : all(1.0f));
        transpose(v);
        for (int i = 0; i < MIN(16, n - j); i++) put(to, BF16, first + (j + i) * apart + d, 16, v[i]);
    }
}

typedef struct {  // of one sequence and kv head, and of QUERIES queries of one of its heads
    const Sequences *o;
    long T, padded, begin, head, at, low, n;  // keys low .. low + n - 1 are looked at from query `at` on
    uint16_t *k, *v, *q, *grad, *p_lines, *d_lines;
    uint32_t *turned, *q_pairs, *grad_pairs, *q_columns, *grad_columns, *by_keys;
    float *scores, *d_scores, *columns, *dk, *dv;
} Look;

INLINE vi looked_at(const Look *w, long j, long key) {
    vi at = PLACES + (int)(w->at + 16 * j);
    vi seen = at >= (int)key;
    return w->o->window ? seen & (at - (int)w->o->window < (int)key) : seen;
}
INLINE vf scaled(const Look *w, long j, long i) {
    return pick(looked_at(w, j, w->low + i), load(w->scores + i * QUERIES + 16 * j) * (float)w->o->scale, all(-1e30f));
}
static void form_scores(const Look *w, const uint16_t *keys, const uint32_t *columns, float *to) {
    long D = w->o->D;
    for (long i = 0; i < w->n; i += 16) product_tiles(to + i * QUERIES, QUERIES, 0, (bytes)(keys + (w->low + i) * D), 2 * D, 64, columns, D / STEP);
}
// [D, QUERIES] sums of keys' values that weights in `by_keys` weigh
static void sum_keys(const Look *w) {
    long steps = w->padded / STEP;
    for (long d = 0; d < w->o->D; d += 16)
        product_tiles(w->columns + d * QUERIES, QUERIES, 0, (bytes)(w->turned + (d / 16 * steps + w->low / STEP) * CELL), 64, 4 * CELL, w->by_keys, w->n / STEP);
}
static void forward_queries(const Look *w) {
    const Sequences *o = w->o;
    float share[QUERIES] __attribute__((aligned(64)));
    form_scores(w, w->k, w->q_columns, w->scores);
    for (long j = 0; j < QUERIES / 16; j++) {
        float sink = o->sinks ? ((floats)o->sinks)[w->head] : -1e30f;
        vf best = all(sink), total;
        for (long i = 0; i < w->n; i++) {
            vf x = scaled(w, j, i);
            best = pick(x > best, x, best);
        }
        total = expv(sink - best);
        for (long i = 0; i < w->n; i += 2) {
            vf a = expv(scaled(w, j, i) - best), b = expv(scaled(w, j, i + 1) - best);
            total += a + b;
            _mm512_storeu_si512(w->by_keys + (j * w->n / STEP + i / STEP) * CELL + i % STEP / 2 * 16, interleaved(both(a, b)));
        }
        store(share + 16 * j, 1.0f / total);
        for (int i = 0; i < 16 && w->at + 16 * j + i < w->T; i++)
            o->lse[(w->begin + w->at + 16 * j + i) * o->H + w->head] = best[i] + logf(total[i]);
    }
    sum_keys(w);
    give_columns(w->columns, share, w->T - w->at, o->D, o->out, ((w->begin + w->at) * o->H + w->head) * o->D, o->H * o->D);
}
static void backward_queries(const Look *w) {
    const Sequences *o = w->o;
    long D = o->D;
    float lse[QUERIES] = {0}, inner[QUERIES] = {0};
    for (long i = 0; i < MIN(QUERIES, w->T - w->at); i++) {
        long place = (w->begin + w->at + i) * o->H + w->head;
        vf along = {0};
        for (long d = 0; d < D; d += W) along += widen((bytes)o->out + 2 * (place * D + d)) * widen((bytes)(w->grad + i * D + d));
        lse[i] = o->lse[place], o->inner[place] = inner[i] = sum(along);
    }
    form_scores(w, w->k, w->q_columns, w->scores);
    form_scores(w, w->v, w->grad_columns, w->d_scores);
    for (long j = 0; j < QUERIES / 16; j += 2) for (long i = 0; i < w->n; i += 2) {
        vf p[2][2], d[2][2];
        UNROLL for (int b = 0; b < 2; b++) UNROLL for (int l = 0; l < 2; l++) {
            p[l][b] = expv(scaled(w, j + b, i + l) - load(lse + 16 * (j + b)));
            d[l][b] = p[l][b] * (load(w->d_scores + (i + l) * QUERIES + 16 * (j + b)) - load(inner + 16 * (j + b))) * (float)o->scale;
        }
        UNROLL for (int l = 0; l < 2; l++) {
            _mm512_storeu_si512(w->p_lines + (i + l) * QUERIES + 16 * j, both(p[l][0], p[l][1]));
            _mm512_storeu_si512(w->d_lines + (i + l) * QUERIES + 16 * j, both(d[l][0], d[l][1]));
        }
        UNROLL for (int b = 0; b < 2; b++)
            _mm512_storeu_si512(w->by_keys + ((j + b) * w->n / STEP + i / STEP) * CELL + i % STEP / 2 * 16, interleaved(both(d[0][b], d[1][b])));
    }
    for (long i = 0; i < w->n; i += 16) for (long d = 0; d < D; d += 64) {
        long at = (w->low + i) * D + d, pairs = d / 16 * (QUERIES / STEP) * CELL;
        product_tiles(w->dv + at, D, 1, (bytes)(w->p_lines + i * QUERIES), 2 * QUERIES, 64, w->grad_pairs + pairs, QUERIES / STEP);
        product_tiles(w->dk + at, D, 1, (bytes)(w->d_lines + i * QUERIES), 2 * QUERIES, 64, w->q_pairs + pairs, QUERIES / STEP);
    }
    sum_keys(w);
    give_columns(w->columns, 0, w->T - w->at, D, o->dq, ((w->begin + w->at) * o->H + w->head) * D, o->H * D);
}
static void block_columns(const uint16_t *x, long D, uint32_t *to) {
    for (long j = 0; j < QUERIES; j += 16) for (long d = 0; d < D; d += STEP) turned_pairs(x + j * D + d, D, to), to += CELL;
}
static void block_pairs(const uint16_t *x, long D, uint32_t *to) {
    for (long d = 0; d < D; d += 16) for (long i = 0; i < QUERIES; i += STEP) row_pairs(x + i * D + d, D, 0, to), to += CELL;
}
static void ask_queries(Look *w, long at) {
    const Sequences *o = w->o;
    long first = ((w->begin + at) * o->H + w->head) * o->D, real = MIN(QUERIES, w->T - at);
    w->at = at, w->low = o->window ? MAX(0, at - o->window + 1) / STEP * STEP : 0, w->n = at + QUERIES - w->low;
    take_rows(o->q, first, o->H * o->D, real, QUERIES, o->D, w->q);
    block_columns(w->q, o->D, w->q_columns);
    if (!o->grad) {
        forward_queries(w);
        return;
    }
    take_rows(o->grad, first, o->H * o->D, real, QUERIES, o->D, w->grad);
    block_columns(w->grad, o->D, w->grad_columns), block_pairs(w->q, o->D, w->q_pairs), block_pairs(w->grad, o->D, w->grad_pairs);
    backward_queries(w);
}
static void *cut(char **memory, size_t bytes) {
    void *here = *memory;
    *memory += (bytes + 63) / 64 * 64;
    return here;
}
static void one_sequence(const void *with, long item, long me) {  // for one kv head: nobody else writes its gradients
    const Sequences *o = with;
    long row = item / o->K, kv = item % o->K, D = o->D, back = o->grad != 0;
    const int64_t *ends = o->ends;
    Look w = {.o = o, .begin = ends[row], .T = ends[row + 1] - ends[row]};
    long padded = w.padded = UP(w.T, QUERIES), first = (w.begin * o->K + kv) * D;
    size_t small = QUERIES * D * 2 + 64, whole = padded * D * 2, scores = padded * QUERIES * 4;
    char *memory = (char *)scratch((3 * whole + 6 * small + 4 * scores + QUERIES * D * 4 + (back ? 4 * whole : 0)) / 4 + 16);
    w.k = cut(&memory, whole), w.v = cut(&memory, whole), w.turned = cut(&memory, whole), w.columns = cut(&memory, QUERIES * D * 4);
    w.q = cut(&memory, small), w.grad = cut(&memory, small), w.q_columns = cut(&memory, small), w.grad_columns = cut(&memory, small);
    w.q_pairs = cut(&memory, small), w.grad_pairs = cut(&memory, small);
    w.scores = cut(&memory, scores), w.d_scores = cut(&memory, scores), w.by_keys = cut(&memory, scores / 2);
    w.p_lines = cut(&memory, scores / 2), w.d_lines = cut(&memory, scores / 2);
    take_rows(o->k, first, o->K * D, w.T, padded, D, w.k), take_rows(o->v, first, o->K * D, w.T, padded, D, w.v);
    const uint16_t *summed = back ? w.k : w.v;
    for (long d = 0; d < D; d += 16) for (long i = 0; i < padded; i += STEP) row_pairs(summed + i * D + d, D, 1, w.turned + (d / 16 * padded + i) / STEP * CELL);
    if (back) {
        w.dk = cut(&memory, 2 * whole), w.dv = cut(&memory, 2 * whole);
        memset(w.dk, 0, 2 * whole), memset(w.dv, 0, 2 * whole);
    }
#if defined __AMX_BF16__ && defined __linux__
    if (has_tiles) use_tiles(me);
#endif
    for (w.head = kv * (o->H / o->K); w.head < (kv + 1) * (o->H / o->K); w.head++)
        for (long at = 0; at < w.T; at += QUERIES) ask_queries(&w, at);
    for (long i = 0; back && i < w.T; i++) {
        put_row(o->dk, BF16, first + i * o->K * D, D, w.dk + i * D, 1.0f);
        put_row(o->dv, BF16, first + i * o->K * D, D, w.dv + i * D, 1.0f);
    }
}
int has_bfloat16 = 1;  // the instructions
#else
int has_bfloat16 = 0;
static void one_sequence(const void *with, long item, long me) {}
#endif
// `rows` sequences end to end: row i is the tokens ends[i] .. ends[i + 1] - 1. Backward where grad is given.
void sequences(const Sequences *o) { each_item(o->rows * o->K, one_sequence, o, MIN(o->threads, THREADS)); }
