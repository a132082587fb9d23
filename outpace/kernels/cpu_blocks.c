// Part of cpu.c: a draft's training attention. Many small blocks, each over the context of its own row and over itself,
// forward and backward. All queries of a block see the same keys, but for a window and where slots hide what follows: a block is one tile, nothing is gathered.
enum { STRIP = 64, TALL = W == 16 ? 8 : 4 };  // keys of a tile; rows of a register tile
#define UP(n, to) (((n) + (to) - 1) / (to) * (to))

typedef struct { any q, k, v, context_k, context_v; int64_t kind; const int64_t *first, *context, *seen; float *out, *lse; any grad;
                 void *dq, *dk, *dv, *d_context_k, *d_context_v; int64_t rows, B, H, K, D, window, causal; double scale; int64_t threads; } Blocks;
typedef struct { float *k, *v, *k_turned, *v_turned, *dk, *dv; long ld; } Keys;  // [ld, D]; turned: [D, ld]; zeros past the last key

// c [TALL, 2W] += sum over i < n of a(r, i) b[i]; a(r, i) is a[r, i], or a[i, r] where turned.
INLINE void product(const int turned, floats a, long step, floats b, long ldb, long n, float *c, long ldc) {
    vf s[TALL * 2];
    UNROLL for (int r = 0; r < TALL; r++) s[2 * r] = load(c + r * ldc), s[2 * r + 1] = load(c + r * ldc + W);
    for (long i = 0; i < n; i++, b += ldb) {
        vf x = load(b), y = load(b + W);
        UNROLL for (int r = 0; r < TALL; r++) {
            float w = turned ? a[i * step + r] : a[r * step + i];
            s[2 * r] += x * w, s[2 * r + 1] += y * w;
        }
    }
    UNROLL for (int r = 0; r < TALL; r++) store(c + r * ldc, s[2 * r]), store(c + r * ldc + W, s[2 * r + 1]);
}
static void times(long M, long N, long n, floats a, long step, floats b, long ldb, float *c, long ldc) {
    for (long r = 0; r < M; r += TALL) for (long j = 0; j < N; j += 2 * W) product(0, a + r * step, step, b + j, ldb, n, c + r * ldc + j, ldc);
}
static void turned_times(long M, long N, long n, floats a, long step, floats b, long ldb, float *c, long ldc) {
    for (long r = 0; r < M; r += TALL) for (long j = 0; j < N; j += 2 * W) product(1, a + r, step, b + j, ldb, n, c + r * ldc + j, ldc);
}

static void copy_row(any from, long kind, long i, long n, float scale, float *to, long width) {  // zeros after n values
    for (long d = 0; d < width; d += W) store(to + d, d < n ? fetch(row(from, kind, i + d), kind, 0, n - d) * scale : (vf){0});
}
static void put_row(void *to, long kind, long i, long n, floats from, float scale) {
    for (long d = 0; d < n; d += W) put(to, kind, i + d, n - d, load(from + d) * scale);
}
static void fill_keys(const Keys *m, any k, any v, long kind, long first, long step, long n, long D, long width) {
    for (long j = 0; j < n; j++) {
        copy_row(k, kind, first + j * step, D, 1.0f, m->k + j * width, width);
        copy_row(v, kind, first + j * step, D, 1.0f, m->v + j * width, width);
    }
    memset(m->k + n * width, 0, (m->ld - n) * width * sizeof(float));
    memset(m->v + n * width, 0, (m->ld - n) * width * sizeof(float));
    for (long j = 0; j < m->ld; j++) for (long d = 0; d < width; d++) {
        m->k_turned[d * m->ld + j] = m->k[j * width + d];
        if (m->v_turned) m->v_turned[d * m->ld + j] = m->v[j * width + d];
    }
}

typedef struct { const Blocks *o; float *q, *o_sum, *grad, *dq, *p, *ds, *high, *mass, *delta; long R, width; } Desk;  // of one block

// Scores of a strip of n keys; then each as exp(score - high), 0 where its query does not look.
INLINE vf weights(const Desk *w, long r, long j, long low, long n, float high) {
    vi seen = (PLACES + (int)j >= (int)low) & (PLACES + (int)j < (int)n);
    return pick(seen, expv(load(w->p + r * STRIP + j) - high), (vf){0});
}
static long strip(const Desk *w, const Keys *m, long from, long to) {
    long n = UP(MIN(STRIP, to - from), 2 * W);
    memset(w->p, 0, w->R * STRIP * sizeof(float));
    times(w->R, n, w->width, w->q, w->width, m->k_turned + from, m->ld, w->p, STRIP);
    return n;
}
typedef struct { long low, high; } Span;
static Span span(const Desk *w, long r, long to, int context) {  // the keys low..high - 1, of `to`, that row r sees
    long slot = r / (w->o->H / w->o->K), first = w->o->window ? (context ? to : 0) + slot - w->o->window + 1 : 0;
    if (context) return (Span){MAX(0, first), to};
    return w->o->causal ? (Span){MAX(0, first), MIN(to, slot + 1)} : (Span){0, to};
}
static void forward_keys(const Desk *w, const Keys *m, long to, int context) {
    for (long from = span(w, 0, to, context).low / STRIP * STRIP; from < to; from += STRIP) {
        long n = strip(w, m, from, to);
        for (long r = 0; r < w->R; r++) {
            Span at = span(w, r, to, context);
            long low = at.low - from, high = at.high - from;
            float top = w->high[r];
            vf best = all(top), total = {0};
            for (long j = 0; j < n; j += W) {
                vi seen = (PLACES + (int)j >= (int)low) & (PLACES + (int)j < (int)high);
                vf x = pick(seen, load(w->p + r * STRIP + j), all(-1e30f));
                best = pick(x > best, x, best);
            }
            UNROLL for (int i = 0; i < W; i++) top = MAX(top, best[i]);
            for (long j = 0; j < n; j += W) {
                vf e = weights(w, r, j, low, high, top);
                store(w->p + r * STRIP + j, e);
                total += e;
            }
            if (top > w->high[r]) {
                float less = expv(all(w->high[r] - top))[0];
                for (long d = 0; d < w->width; d += W) store(w->o_sum + r * w->width + d, load(w->o_sum + r * w->width + d) * less);
                w->mass[r] *= less, w->high[r] = top;
            }
            w->mass[r] += sum(total);
        }
        times(w->R, w->width, n, w->p, STRIP, m->v + from * w->width, w->width, w->o_sum, w->width);
    }
}
static void backward_keys(const Desk *w, const Keys *m, long to, int context) {
    for (long from = span(w, 0, to, context).low / STRIP * STRIP; from < to; from += STRIP) {
        long n = strip(w, m, from, to), width = w->width;
        memset(w->ds, 0, w->R * STRIP * sizeof(float));
        times(w->R, n, width, w->grad, width, m->v_turned + from, m->ld, w->ds, STRIP);
        for (long r = 0; r < w->R; r++) {
            Span at = span(w, r, to, context);
            for (long j = 0; j < n; j += W) {
                vf p = weights(w, r, j, at.low - from, at.high - from, w->high[r]);
                store(w->p + r * STRIP + j, p);
                store(w->ds + r * STRIP + j, p * (load(w->ds + r * STRIP + j) - w->delta[r]));
            }
        }
        turned_times(n, width, w->R, w->p, STRIP, w->grad, width, m->dv + from * width, width);
        turned_times(n, width, w->R, w->ds, STRIP, w->q, width, m->dk + from * width, width);
        times(w->R, width, n, w->ds, STRIP, m->k + from * width, width, w->dq, width);
    }
}

static long row_of(const Desk *w, long block, long h, long r) {  // which row of [N, H] the desk's row r is
    long G = w->o->H / w->o->K;
    return (block * w->o->B + r / G) * w->o->H + h * G + r % G;
}
static void one_block(Desk *w, const Keys *context, const Keys *own, long block, long h) {
    const Blocks *o = w->o;
    long rows = o->B * (o->H / o->K), D = o->D, width = w->width, at_own = (block * o->B * o->K + h) * D;
    fill_keys(own, o->k, o->v, o->kind, at_own, o->K * D, o->B, D, width);
    for (long r = 0; r < w->R; r++) {
        long i = row_of(w, block, h, MIN(r, rows - 1)), real = r < rows ? D : 0;
        copy_row(o->q, o->kind, i * D, real, o->scale, w->q + r * width, width);
        w->high[r] = -1e30f, w->mass[r] = 0;
        if (o->grad) {
            vf along = {0};
            copy_row(o->grad, o->kind, i * D, real, 1.0f, w->grad + r * width, width);
            for (long d = 0; d < real; d += W) along += load(w->grad + r * width + d) * part(o->out + i * D + d, D - d);
            w->high[r] = real ? o->lse[i] : 0, w->delta[r] = sum(along);
        }
    }
    memset(o->grad ? w->dq : w->o_sum, 0, w->R * width * sizeof(float));
    if (!o->grad) {
        forward_keys(w, own, o->B, 0);
        forward_keys(w, context, o->seen[block], 1);
        for (long r = 0; r < rows; r++) {
            long i = row_of(w, block, h, r);
            put_row(o->out, F32, i * D, D, w->o_sum + r * width, 1.0f / w->mass[r]);
            o->lse[i] = w->high[r] + logf(w->mass[r]);
        }
        return;
    }
    memset(own->dk, 0, own->ld * width * sizeof(float));
    memset(own->dv, 0, own->ld * width * sizeof(float));
    backward_keys(w, own, o->B, 0);
    backward_keys(w, context, o->seen[block], 1);
    for (long r = 0; r < rows; r++) put_row(o->dq, o->kind, row_of(w, block, h, r) * D, D, w->dq + r * width, o->scale);
    for (long t = 0; t < o->B; t++) {
        put_row(o->dk, o->kind, at_own + t * o->K * D, D, own->dk + t * width, 1.0f);
        put_row(o->dv, o->kind, at_own + t * o->K * D, D, own->dv + t * width, 1.0f);
    }
}
static Keys keys(float **memory, long n, long width, int back) {
    Keys m = {.ld = UP(MAX(n, 1), 2 * W)};
    float **wanted[] = {&m.k, &m.v, &m.k_turned, &m.v_turned, &m.dk, &m.dv};
    for (int i = 0; i < (back ? 6 : 3); i++) *wanted[i] = *memory, *memory += m.ld * width;
    return m;
}
static void one_row(const void *with, long item, long me) {  // the blocks of one row, for one kv head: nobody else writes their gradients
    const Blocks *o = with;
    long at_row = item / o->K, h = item % o->K, n = o->context[at_row + 1] - o->context[at_row], D = o->D;
    long R = UP(o->B * (o->H / o->K), TALL), width = UP(D, 2 * W), back = o->grad != 0, first = (o->context[at_row] * o->K + h) * D;
    float *memory = scratch((UP(MAX(n, 1), 2 * W) + UP(o->B, 2 * W)) * width * 6 + R * (4 * width + 2 * STRIP + 3));
    Keys context = keys(&memory, n, width, back), own = keys(&memory, o->B, width, back);
    Desk w = {.o = o, .R = R, .width = width};
    float **wide[] = {&w.q, &w.o_sum, &w.grad, &w.dq}, **thin[] = {&w.high, &w.mass, &w.delta};
    for (int i = 0; i < 4; i++) *wide[i] = memory, memory += R * width;
    w.p = memory, w.ds = memory += R * STRIP, memory += R * STRIP;
    for (int i = 0; i < 3; i++) *thin[i] = memory, memory += R;
    fill_keys(&context, o->context_k, o->context_v, o->kind, first, o->K * D, n, D, width);
    if (back) memset(context.dk, 0, context.ld * width * sizeof(float)), memset(context.dv, 0, context.ld * width * sizeof(float));
    for (long block = o->first[at_row]; block < o->first[at_row + 1]; block++) one_block(&w, &context, &own, block, h);
    for (long j = 0; back && j < n; j++) {
        put_row(o->d_context_k, o->kind, first + j * o->K * D, D, context.dk + j * width, 1.0f);
        put_row(o->d_context_v, o->kind, first + j * o->K * D, D, context.dv + j * width, 1.0f);
    }
}
// rows pieces of text: row i has the blocks first[i].. and the context keys context[i]..; block b sees seen[b] of them. Backward
// where grad is given.
void blocks(const Blocks *o) { each_item(o->rows * o->K, one_row, o, MIN(o->threads, THREADS)); }
