// Part of cpu.c: attention over rings of keys and values, tile by tile, along chains and trees.
INLINE void scores(const int R, const int V, const floats *q, floats k, long D, float *p) {  // k [D, V * W] -> p [R, KEYS]
    vf a[16] = {{0}};
    for (long d = 0; d < D; d++) {
        vf x[4];
        UNROLL for (int i = 0; i < V; i++) x[i] = load(k + (d * V + i) * W);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) a[r * V + i] += x[i] * q[r][d];
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) store(p + r * KEYS + i * W, a[r * V + i]);
}
INLINE void values(const int R, const int V, const int kind, const bytes *v, int n, floats p, long d, long D, float *o) {
    vf a[16] = {{0}};
    for (int j = 0; j < n; j++) UNROLL for (int i = 0; i < V; i++) {
        vf x = fetch(v[j], kind, d + i * W, W);
        HOLD(x);
        UNROLL for (int r = 0; r < R; r++) a[r * V + i] += x * p[r * KEYS + j];
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) store(o + r * D + d + i * W, a[r * V + i]);
}

// W keys from key j on, numbers d and on of each, as W rows of W lanes, `apart` vectors between them; keys that are not there are like others. Of
// whole vectors it fetches the values, and the keys `apart` blocks later, since they lie in the memory one after the other.
INLINE void across(const int kind, const bytes *k, const bytes *v, int n, int j, long d, long D, float *to, int apart) {
    vf a[W];
    long later = at(kind, apart * W * D + d), same = at(kind, d);
    if (D - d >= W && j >= 0 && j + W <= n) UNROLL for (int i = 0; i < W; i++) {
        a[i] = fetch(k[j + i], kind, d, W);
        if (same % 64) continue;
        __builtin_prefetch(k[j + i] + later, 0, 2);
        __builtin_prefetch(v[j + i] + same, 0, 2);
    } else for (int i = 0; i < W; i++) a[i] = fetch(k[MAX(0, MIN(j + i, n - 1))], kind, d, D - d);
    transpose(a);
    UNROLL for (int i = 0; i < W; i++) store(to + i * apart * W, a[i]);
}

// One tile: the n keys at places from.. of it, of which query r sees places lo[r]..hi[r] - 1. Gives unscaled sums o, the highest
// score and the mass; the caller merges tiles in their order.
static void look(long kind, const floats *q, int rows, const bytes *k, const bytes *v, int from, int n, const int *lo, const int *hi,
                 long D, long Dv, float scale, float *o, float *high, float *mass) {
    float p[MOST][KEYS], turned[(MOST_D + W) * 4 * W];
    int v0 = from / W * W, v1 = v0, s, V;
    for (; v1 < from + n; v1 += V * W) {  // lanes over keys, so that scores need no sum across lanes
        V = rows < ROWS && from + n - v1 > 2 * W ? 4 : 2;  // the sums of few rows wait for one another
        v1 = MIN(v1, KEYS - V * W);       // overlap: computed twice, alike
        for (int side = 0; side < V; side++) for (long d = 0; d < D; d += W) {
            float *to = turned + (d * V + side) * W;
            int j = v1 + side * W - from;
            kind == F32 ? across(F32, k, v, n, j, d, D, to, V) : kind == F16 ? across(F16, k, v, n, j, d, D, to, V) : across(BF16, k, v, n, j, d, D, to, V);
        }
#define SCORES(R, V) scores(s = R, V, q + r, turned, D, p[r] + v1)
        for (int r = 0; r < rows; r += s) {
            if (V == 4) rows == 3 ? SCORES(3, 4) : rows == 2 ? SCORES(2, 4) : SCORES(1, 4);
            else rows - r >= 8 ? SCORES(8, 2) : rows - r >= 4 ? SCORES(4, 2) : rows - r >= 2 ? SCORES(2, 2) : SCORES(1, 2);
        }
    }
    for (int r = 0; r < rows; r++) {
        vf top = all(-INFINITY), total = {0};
        high[r] = -1e30f;                 // not -inf: where nothing is seen the weights become 0
        int first = MAX(lo[r], from), end = MIN(hi[r], from + n);
        for (int j = v0; j < v1; j += W) {
            vf x = load(p[r] + j) * scale;
            if (j < first || j + W > end) x = pick((PLACES + j >= first) & (PLACES + j < end), x, all(-INFINITY));
            store(p[r] + j, x);
            top = pick(x > top, x, top);
        }
        high[r] = MAX(high[r], highest(top));
        for (int j = v0; j < v1; j += W) {
            vf e = expv(load(p[r] + j) - high[r]);
            store(p[r] + j, e);
            total += e;
        }
        mass[r] = sum(total);
    }
    for (int r = 0; Dv < W && r < rows; r++) for (int d = 0; d < Dv; d++) {
        o[r * Dv + d] = 0;
        for (int j = 0; j < n; j++) o[r * Dv + d] += get(v[j], kind, d) * p[r][from + j];
    }
#define VALUED(R, V, kind) values(s = R, V, kind, v, n, p[r] + from, MIN(d, Dv - V * W), Dv, o + r * Dv)  // the last vector may overlap, alike
#define VALUES(R, V) (kind == F32 ? VALUED(R, V, F32) : kind == F16 ? VALUED(R, V, F16) : VALUED(R, V, BF16))
    for (long d = 0; Dv >= W && d < Dv; d += V * W) {
        V = Dv - d >= 4 * W ? 4 : Dv - d >= 2 * W ? 2 : 1;
        for (int r = 0; r < rows; r += s) {
            if (V == 4) rows - r >= 4 ? VALUES(4, 4) : rows - r >= 2 ? VALUES(2, 4) : VALUES(1, 4);
            else if (V == 2) rows - r >= 8 ? VALUES(8, 2) : rows - r >= 4 ? VALUES(4, 2) : rows - r == 3 ? VALUES(3, 2) : rows - r == 2 ? VALUES(2, 2) : VALUES(1, 2);
            else rows - r >= 4 ? VALUES(4, 1) : rows - r >= 2 ? VALUES(2, 1) : VALUES(1, 1);
        }
    }
}

typedef struct { void *k, *v; int64_t size, kind; } Ring;  // [B, K, size + 1, D], what a cache holds of a layer; the last slot is for padding
typedef struct { floats q; any k, v; const int64_t *start, *first; bytes tree; const int64_t *depth; any sinks; int64_t sink_kind; const int64_t *list, *many; float *y, *seen;
                 int64_t q_b, q_t, k_b, k_h, v_b, v_h, v_s, y_b, B, T, U, N, H, K, D, Dv, S, window, both_ways, kind; double scale; int64_t threads; const Ring *ring; const int64_t *rows; } Attend;
typedef struct { const Attend *o; long t0, steps, G, rows, tiles, *base, *low; float *sums, *high, *mass; } Scene;

static long lowest(const Attend *o, long b, long t) {  // the first storage index that new token t sees
    long low = o->window ? MAX(0, o->start[b] + (o->tree ? o->depth[b * o->T + t] : t) - o->window + 1) : 0;
    return o->both_ways ? MIN(low, o->start[b]) : low;
}
INLINE long last_of(const Attend *o, long s, long t) { return s + (o->both_ways || o->tree ? o->U : t); }  // keys that t new tokens see
static void look_at(const void *with, long item, long me) {  // one tile of keys of one kv head of one sequence
    const Scene *c = with;
    const Attend *o = c->o;
    long T = o->T, D = o->D, Dv = o->Dv, S = o->S, G = c->G, b = item / c->tiles / o->K, h = item / c->tiles % o->K, s = o->start[b], first = o->first ? o->first[b] : 0;
    long edge = (c->base[b] + item % c->tiles) * KEYS, end = c->t0 + c->steps;
    long place_of = o->rows ? o->rows[b] : b, k_s = at(o->kind, D), v_s = at(o->kind, o->v_s);
    bytes k = row(o->k, o->kind, place_of * o->k_b + h * o->k_h), v = row(o->v, o->kind, place_of * o->v_b + h * o->v_h), ks[KEYS], vs[KEYS];
    floats qs[MOST];
    int lo[MOST], hi[MOST], alone = o->list || (o->tree && edge + KEYS > s), n;  // alone: each new token has its own list of keys
    for (long t = c->t0; t < end; t += alone ? 1 : c->steps) {
        long from = MAX(edge, alone ? lowest(o, b, t) : c->low[b]), to = MIN(edge + KEYS, o->tree ? s : last_of(o, s, end));
        long place = MAX(s, lowest(o, b, t)), at_row = item * c->rows + (t - c->t0) * G, count = alone ? G : c->rows, slot;
        if (o->list) from = edge, to = MIN(edge + KEYS, o->many[b * T + t]);
        for (n = 0; o->list && n < to - from; n++) {
            slot = (o->list[(b * T + t) * o->N + from + n] - first) % S;
            ks[n] = k + slot * k_s, vs[n] = v + slot * v_s;
        }
        slot = (from - first) % S;
        for (; n < to - from; n++, slot = slot + 1 == S ? 0 : slot + 1) ks[n] = k + slot * k_s, vs[n] = v + slot * v_s;
        for (long u = 0; alone && !o->list && u < o->U; u++) {  // a seen one takes the place it would have in plain decoding
            if (!o->tree[(b * T + t) * o->U + u] || place++ < edge || place > edge + KEYS) continue;
            slot = (s + u - first) % S;
            ks[n] = k + slot * k_s, vs[n++] = v + slot * v_s;
        }
        for (long r = 0, new; r < count; r++) {
            new = t + r / G;
            qs[r] = o->q + b * o->q_b + new * o->q_t + (h * G + r % G) * D;
            lo[r] = alone ? 0 : MAX(lowest(o, b, new) - edge, 0);
            hi[r] = alone ? KEYS : MIN(o->tree ? s : last_of(o, s, new + 1), edge + KEYS) - edge;
            c->mass[at_row + r] = 0;
        }
        if (n) look(o->kind, qs, count, ks, vs, from - edge, n, lo, hi, D, Dv, o->scale, c->sums + at_row * Dv, c->high + at_row, c->mass + at_row);
    }
}
static void merge(const void *with, long item) {  // the tiles of one query
    const Scene *c = with;
    const Attend *o = c->o;
    long D = o->Dv, bh = item / c->rows, r = item % c->rows, head = bh % o->K * c->G + r % c->G, row = bh * c->tiles * c->rows + r;
    long b = bh / o->K, t = c->t0 + r / c->G, place = (b * o->T + t) * o->H + head;
    float *y = o->y + b * o->y_b + (t * o->H + head) * D, total = 0, best = -INFINITY, sunk;
    for (long i = row; i < row + c->tiles * c->rows; i += c->rows) if (c->mass[i] != 0) best = MAX(best, c->high[i]);
    if (o->sinks) {
        float sink = get(o->sinks, o->sink_kind, head);
        best = MAX(best, sink);
        total = expv(all(sink - best))[0];
    }
    sunk = total;
    memset(y, 0, D * sizeof(float));
    for (long i = row; i < row + c->tiles * c->rows; i += c->rows) if (c->mass[i] != 0) {  // not a number is not left out
        float part = expv(all(c->high[i] - best))[0];
        total += part * c->mass[i];
        for (long d = 0; d < D; d++) y[d] += part * c->sums[i * D + d];
    }
    for (long d = 0; d < D; d++) y[d] /= total > 0 ? total : 1.0f;
    if (o->seen) o->seen[place] = total > 0 ? 1 - sunk / total : 0;
}
// q [B, T, H, D] and the rings k, v [B, K, S, D], with strides; token i lies at slot (i - first) % S, first 0 where absent. tree [B, T, U]: which of the
// U tokens after `start` each new one sees, none that its window leaves out; else U = T, a chain, or with both_ways all of them. Or list [B, T, N]: it
// sees the first many [B, T] tokens of its own list, in that order, and none is read besides. Values have Dv numbers, and may be the same for all heads;
// seen [B, T, H], where given: what share of the weights falls on tokens and not on the sink. With a `ring`, k and v are its;
// rows [B], where given: which of its rows each sequence has.
void attend(const Attend *given) {
    Attend own = *given, *o = &own;
    if (o->ring) {
        o->k = o->ring->k, o->v = o->ring->v, o->S = o->ring->size, o->kind = o->ring->kind;
        o->k_h = o->v_h = (o->S + 1) * o->D, o->k_b = o->v_b = o->K * o->k_h, o->v_s = o->D;
    }
    long B = o->B, T = o->T, G = o->H / o->K, some = MAX(1, MOST / G), longest = 0, base[B], low[B];
    for (long b = 0; b < B; b++) longest = MAX(longest, o->start[b] + o->U);
    if (o->list) longest = o->N;
    int threads = team((double)B * T * o->H * o->D * (o->window ? MIN(o->window + o->U, longest) : longest), 4e4, o->threads);
    for (long t0 = 0; t0 < T; t0 += some) {
        long steps = MIN(some, T - t0), rows = steps * G, tiles = 0;
        for (long b = 0; b < B; b++) {
            low[b] = o->start[b] + (o->tree ? 0 : t0);
            for (long t = t0; t < t0 + steps; t++) low[b] = MIN(low[b], lowest(o, b, t));
            base[b] = low[b] / KEYS;
            if (o->list) for (long t = base[b] = 0; t < steps; t++) tiles = MAX(tiles, (o->many[b * T + t0 + t] + KEYS - 1) / KEYS);
            else tiles = MAX(tiles, (last_of(o, o->start[b], t0 + steps) + KEYS - 1) / KEYS - base[b]);
        }
        long all_rows = B * o->K * tiles * rows;
        float *sums = scratch(all_rows * (o->Dv + 2)), *high = sums + all_rows * o->Dv, *mass = high + all_rows;
        Scene scene = {o, t0, steps, G, rows, tiles, base, low, sums, high, mass};
        each_item(B * o->K * tiles, look_at, &scene, threads);
        each_row(B * o->K * rows, merge, &scene, team((double)B * o->K * rows * tiles * o->Dv, 16384, threads));
    }
}
