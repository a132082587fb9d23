// Part of cpu.c: what a draft needs beside a transformer's parts: convolution within short blocks, with its gradients; the few
// largest logits of each row; and the walk that picks one of a few candidates after another.

// ---- y[m, c] = sum over taps t of (base[t, c] + delta[m, t, c / group]) * x[m - t, c], nothing from before a row's own block
typedef struct { any x, delta, base, dy; int64_t kind, base_kind; void *y, *d_delta; float *d_base; int64_t M, B, C, taps, group, stride, threads; } Conv;
INLINE vf tap(const Conv *o, long m, long t, long c, long n) {
    return fetch(o->base, o->base_kind, t * o->C + c, n) + get(o->delta, o->kind, m * o->stride + t * (o->C / o->group) + c / o->group);
}
static void conv_row(const void *with, long m) {
    const Conv *o = with;
    for (long g = 0; g < o->C; g += o->group) for (long c = g; c < g + o->group; c += W) {
        long n = g + o->group - c;
        vf s = {0};
        for (long t = 0; t < o->taps && t <= m % o->B; t++) s += tap(o, m, t, c, n) * fetch(o->x, o->kind, (m - t) * o->C + c, n);
        put(o->y, o->kind, m * o->C + c, n, s);
    }
}
void block_conv(const Conv *o) {
    each_row(o->M, conv_row, o, team((double)o->M * o->C * o->taps, 65536, o->threads));
}
// y: dx; d_delta [M, taps, groups] packed; d_base [taps, C]: summed within PARTS of the rows and then over them.
typedef struct { const Conv *o; float *d_base; } ConvParts;
static void conv_back(const void *with, long item) {
    const Conv *o = ((const ConvParts *)with)->o;
    float *d_base = ((const ConvParts *)with)->d_base + item * o->taps * o->C;
    long C = o->C, groups = C / o->group;
    memset(d_base, 0, o->taps * C * sizeof(float));
    for (long m = o->M * item / PARTS; m < o->M * (item + 1) / PARTS; m++) {
        long before = m % o->B, after = o->B - 1 - before;
        for (long g = 0; g < groups; g++) {
            vf mass[16] = {{0}};
            for (long c = g * o->group; c < (g + 1) * o->group; c += W) {
                long n = (g + 1) * o->group - c;
                vf dy = fetch(o->dy, o->kind, m * C + c, n), dx = {0};
                for (long t = 0; t < o->taps; t++) {
                    if (t <= after) dx += tap(o, m + t, t, c, n) * fetch(o->dy, o->kind, (m + t) * C + c, n);
                    if (t > before) continue;
                    vf v = dy * fetch(o->x, o->kind, (m - t) * C + c, n);
                    mass[t] += v;
                    put(d_base, F32, t * C + c, n, fetch(d_base, F32, t * C + c, n) + v);
                }
                put(o->y, o->kind, m * C + c, n, dx);
            }
            for (long t = 0; t < o->taps; t++) put(o->d_delta, o->kind, (m * o->taps + t) * groups + g, 1, all(sum(mass[t])));
        }
    }
}
void block_conv_backward(const Conv *o) {
    long size = o->taps * o->C;
    float *d_base = scratch(PARTS * size);
    each_row(PARTS, conv_back, &(ConvParts){o, d_base}, team((double)o->M * o->C * o->taps, 32768, o->threads));
    memset(o->d_base, 0, size * sizeof(float));
    for (long p = 0; p < PARTS; p++) for (long i = 0; i < size; i++) o->d_base[i] += d_base[p * size + i];
}

enum { LOT = 4 * W };  // values looked at together: most hold nothing larger than what is already found
// ---- the k largest of each row, falling, the first among equals first; and the row's log-sum-exp
typedef struct { floats x; int64_t *ids; float *values, *lse; int64_t M, N, k, threads; } Top;
static long insert(float *v, int64_t *ids, long count, long k, float x, long id) {
    long i = MIN(count, k - 1);
    for (; i > 0 && v[i - 1] < x; i--) v[i] = v[i - 1], ids[i] = ids[i - 1];
    v[i] = x, ids[i] = id;
    return MIN(count + 1, k);
}
static void top_row(const void *with, long m) {
    const Top *o = with;
    floats x = o->x + m * o->N;
    float *v = o->values + m * o->k;
    int64_t *ids = o->ids + m * o->k;
    long i = 0, count = 0;
    for (; count < o->k; i++) count = insert(v, ids, count, o->k, x[i], i);
    for (; i + LOT <= o->N; i += LOT) {
        vi more = {0};
        UNROLL for (int j = 0; j < LOT; j += W) more |= load(x + i + j) > v[o->k - 1];
        union { vi lanes; int64_t pairs[W / 2]; } u = {more};
        int64_t some = 0;
        UNROLL for (int j = 0; j < W / 2; j++) some |= u.pairs[j];
        for (int j = 0; some && j < LOT; j++) if (x[i + j] > v[o->k - 1]) insert(v, ids, o->k, o->k, x[i + j], i + j);
    }
    for (; i < o->N; i++) if (x[i] > v[o->k - 1]) insert(v, ids, o->k, o->k, x[i], i);
    vf total[4] = {{0}};
    for (i = 0; i + 4 * W <= o->N; i += 4 * W) UNROLL for (int j = 0; j < 4; j++) total[j] += expv(load(x + i + j * W) - v[0]);
    float rest = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < o->N; i++) rest += expf(x[i] - v[0]);
    o->lse[m] = v[0] + logf(rest);
}
void top(const Top *o) {
    each_row(o->M, top_row, o, team((double)o->M * o->N, 8192, o->threads));
}

// ---- of each position's k candidates, the one with the largest score values + <A[the one before] * h, B[candidate]>; of rows with a temperature [M]
// other than 0 the one with the largest score / temperature + noise, a function of the position's key, keys [M, n], and the candidate
typedef struct { const int64_t *last, *ids; floats values, lse, h; any A, B; int64_t kind, *out; float *sure; const int64_t *keys; floats temperature;
                 int64_t M, n, k, r, threads; } Walk;
typedef struct { any A, B; int64_t kind, k, r; } Books;
// -> of the k candidates that `ids` names, with logits `values`, s after `previous`, and the log-sum-exp of the whole row: what is no candidate keeps its
// own logit. The best of them, the first among equals.
static long pair_scores(Books o, int64_t previous, const int64_t *ids, floats values, float lse, floats h, float *s, float *whole) {
    long best = 0;
    for (long c = 0; c < o.k; c++) {
        vf along = {0};
        for (long j = 0; j < o.r; j += W)
            along += fetch(o.A, o.kind, previous * o.r + j, o.r - j) * part(h + j, o.r - j) * fetch(o.B, o.kind, ids[c] * o.r + j, o.r - j);
        s[c] = values[c] + sum(along);
        if (s[c] > s[best]) best = c;
    }
    float high = MAX(s[best], lse), rest = expf(lse - high), mass = 0;
    for (long c = 0; c < o.k; c++) mass += expf(s[c] - high), rest -= expf(values[c] - high);
    whole[0] = high, whole[1] = mass + MAX(rest, 0.0f);
    return best;
}
static void walk_row(const void *with, long m) {
    const Walk *o = with;
    int64_t previous = o->last[m];
    float s[64], whole[2], temperature = o->temperature ? o->temperature[m] : 0;
    for (long i = m * o->n; i < (m + 1) * o->n; i++) {
        const int64_t *ids = o->ids + i * o->k;
        long chosen = 0, best = pair_scores((Books){o->A, o->B, o->kind, o->k, o->r}, previous, ids, o->values + i * o->k, o->lse[i], o->h + i * o->r, s, whole);
        o->sure[i] = expf(s[best] - whole[0]) / whole[1];
        for (long c = 0; c < o->k && temperature; c++) {
            vu token = {(uint32_t)ids[c]};
            s[c] = s[c] / temperature + gumbel(token, o->keys[i], (uint64_t)o->keys[i] >> 32)[0];
            if (s[c] > s[chosen]) chosen = c;
        }
        o->out[i] = previous = ids[temperature ? chosen : best];
    }
}
void walk(const Walk *o) {
    each_row(o->M, walk_row, o, team((double)o->M * o->n * o->k * o->r, 262144, o->threads));
}

// ---- the `nodes` most probable paths from `last` through candidates of place after place (`drafts/tree.py: best_first`), their ends as positions of a tree.
// Without A a candidate's score is its logit. reach: how likely a path is; NaN at the root where a score is none. Past counts padding, its own parent.
typedef struct { const int64_t *last, *ids; floats values, lse, h; any A, B; int64_t kind, *tokens, *parents, *counts; float *reach;
                 int64_t M, n, k, r, nodes, threads; } Paths;
typedef struct { const Paths *o; float *followers; int64_t *which; } Growing;
// the log-probabilities of the candidates at place i after `previous`, falling, and what they are; -> whether they are numbers
static int follow(const Paths *o, long i, int64_t previous, float *f, int64_t *which) {
    const int64_t *ids = o->ids + i * o->k;
    floats values = o->values + i * o->k;
    float s[64], whole[2] = {o->lse[i], 1};
    if (o->A) pair_scores((Books){o->A, o->B, o->kind, o->k, o->r}, previous, ids, values, o->lse[i], o->h + i * o->r, s, whole);
    else memcpy(s, values, o->k * sizeof(float));
    float over = whole[0] + logf(whole[1]);
    for (long c = 0, count = 0; c < o->k; c++) count = insert(f, which, count, o->k, MIN(s[c] - over, 0.0f), ids[c]);
    return fabsf(over) < INFINITY;
}
static void grow_row(const void *with, long m) {
    const Paths *o = ((const Growing *)with)->o;
    long nodes = o->nodes, k = o->k, first = m * nodes, count = 1;
    float *f = ((const Growing *)with)->followers + first * k, *reach = o->reach + first;
    int64_t *which = ((const Growing *)with)->which + first * k, *tokens = o->tokens + first, *parents = o->parents + first;
    double at[nodes];                       // the sum of a node's path
    long depth[nodes], next[nodes], sound;  // next: of its followers the one to be taken
    tokens[0] = o->last[m], parents[0] = depth[0] = next[0] = 0, at[0] = 0;
    sound = follow(o, m * o->n, tokens[0], f, which);
    while (count < nodes) {
        long parent = 0;
        double best = -INFINITY;
        for (long j = 0; j < count; j++) if (next[j] < k && at[j] + f[j * k + next[j]] > best) parent = j, best = at[j] + f[j * k + next[j]];
        if (best == -INFINITY) break;
        long from = parent * k + next[parent]++, node = count++;
        tokens[node] = which[from], parents[node] = parent, at[node] = best, depth[node] = depth[parent] + 1, next[node] = depth[node] < o->n ? 0 : k;
        if (!next[node]) sound &= follow(o, m * o->n + depth[node], tokens[node], f + node * k, which + node * k);
    }
    for (long j = 0; j < nodes; j++) reach[j] = j < count ? expf(at[j]) : 0;
    for (long j = count; j < nodes; j++) tokens[j] = 0, parents[j] = j;
    if (!sound) reach[0] = NAN;
    o->counts[m] = count;
}
void paths(const Paths *o) {
    long size = o->M * o->nodes * o->k;
    int64_t *which = (int64_t *)scratch(3 * size);
    each_row(o->M, grow_row, &(Growing){o, (float *)(which + size), which}, team((double)o->M * o->nodes * o->k * o->r, 262144, o->threads));
}
