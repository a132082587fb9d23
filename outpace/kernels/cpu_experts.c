// Part of cpu.c: routing, and the grouped experts.
typedef struct { floats x; any w; int64_t kind; any bias; int64_t bias_kind, *index; float *weight; int64_t M, E, C, k, soft, renormalise, threads; } Route;
// The k largest logits, descending, the lowest index first among equals; soft: softmax over all of them, not over the chosen.
void route(const Route *o) {
    float *p = scratch(o->M * o->E), *weight = o->weight;
    int64_t *index = o->index;
    linear(&(Linear){o->x, o->w, o->kind, o->bias, o->bias_kind, p, o->M, o->E, o->C, o->E, 0, o->threads});
    for (long m = 0; m < o->M; m++, p += o->E, weight += o->k, index += o->k) {
        float top = -INFINITY, total = 0;
        vf mass = {0};
        for (long e = 0; e < o->E; e++) top = MAX(top, p[e]);
        for (long e = 0; o->soft && e < o->E; e += W) mass += pick(PLACES < (int)(o->E - e), expv(part(p + e, o->E - e) - top), all(0));
        for (long i = 0; i < o->k; i++) {
            long best = -1;
            for (long e = 0; e < o->E; e++) if (p[e] == p[e] && (best < 0 || p[e] > p[best])) best = e;
            index[i] = MAX(best, 0);
            total += weight[i] = expv(all(p[index[i]] - top))[0];
            p[index[i]] = NAN;  // taken
        }
        for (long i = 0; i < o->k; i++) weight[i] /= o->soft && !o->renormalise ? sum(mass) : total;
    }
}

typedef struct { bytes w, s; int64_t kind; any bias; int64_t bias_kind; } Experts;  // weights [E, n, k], bias [E, n]
static Rows rows_of(const Experts *o, long k, long kind, int far) { return (Rows){o->w, o->s, kind + o->kind, k, k, far}; }
// Expert e's gates and ups begin `apart` * e rows into theirs; interleaved, they stand in turn in one matrix, which both name.
typedef struct { floats x; const int64_t *index; floats weight; Experts gate, up, down; float *y; int64_t M, C, F, E, k, apart, interleaved, clamped;
                 double limit, alpha; int64_t rounded, threads; } Moe;  // rounded: see cpu_pairs.c
typedef struct { const Moe *o; floats x; float *h, *parts; long *first, *used, *order, distinct, A; Rows gate, up, down; int round, units; } Plan;  // units: of the hidden layer, of an item

static void row_dots(const floats *x, float *const *y, int rows, const Rows *m, long n, int cols, any bias, long bias_kind) {
    if (m->kind == WHOLE) whole_dots(x, y, rows, m, n, cols, bias, bias_kind);
    else dots(x, y, rows, m, n, cols, bias, bias_kind);
}
static void up(const void *with, long item, long me) {  // some units of the hidden layer of one expert, for all its rows
    const Plan *p = with;
    const Moe *o = p->o;
    long groups = (o->F + p->units - 1) / p->units, e = p->used[item / groups], f0 = item % groups * p->units, units = MIN(p->units, o->F - f0), row = o->apart * e;
    int pairs = p->down.kind >= PAIRED, whole = p->down.kind == WHOLE;
    float raw[MOST][2 * ITEM], limit = o->limit, *gates[MOST], *ups[MOST];
    floats xs[MOST];
    for (int r = 0; r < MOST; r++) gates[r] = raw[r], ups[r] = raw[r] + units;
    for (long a = p->first[e]; a < p->first[e + 1]; a += MOST) {
        int rows = MIN(MOST, p->first[e + 1] - a);
        for (int r = 0; r < rows; r++) xs[r] = p->x + p->order[a + r] / o->k * x_apart(o->C, p->up.kind);
        if (o->interleaved) row_dots(xs, gates, rows, &p->gate, row + 2 * f0, 2 * units, o->gate.bias, o->gate.bias_kind);
        else {
            row_dots(xs, gates, rows, &p->gate, row + f0, units, o->gate.bias, o->gate.bias_kind);
            row_dots(xs, ups, rows, &p->up, row + f0, units, o->up.bias, o->up.bias_kind);
        }
        for (int r = 0; r < rows; r++) {
            float g[ITEM] = {0}, u[ITEM] = {0}, *to = p->h + p->order[a + r] * x_apart(o->F, p->down.kind);
            if (o->interleaved) for (int i = 0; i < units; i++) g[i] = raw[r][2 * i], u[i] = raw[r][2 * i + 1];
            else memcpy(g, raw[r], units * sizeof(float)), memcpy(u, raw[r] + units, units * sizeof(float));
            if (o->clamped) for (int i = 0; i < units; i++) g[i] = MIN(limit, g[i]), u[i] = MAX(-limit, MIN(limit, u[i])) + 1.0f;  // the last one, where it is not a number
            for (int i = 0; i < units; i += W) store(g + i, load(g + i) * sigmoid(load(g + i) * (float)o->alpha) * load(u + i));
            if (p->round) round_row(g, units, pairs, pairs ? (void *)((uint16_t *)to + f0) : g);
            if (whole) steps_of_32(g, (Steps *)to + f0 / 32);
            if (pairs || whole) continue;
            if (o->down.kind == MXFP4) for (long i = 0; i < units; i += 16) mix(g + i, f0 + i, to);  // F is a multiple of 32, ITEM of 16
            else memcpy(to + f0, g, units * sizeof(float));
        }
    }
}
static void down(const void *with, long item, long me) {  // some columns of y, of all experts
    const Plan *p = with;
    const Moe *o = p->o;
    long n = item * ITEM, cols = MIN(ITEM, o->C - n);
    float *mine = p->parts + me * p->A * ITEM, *ys[MOST];
    floats xs[MOST];
    for (long i = 0; i < p->distinct; i++) for (long e = p->used[i], a = p->first[e]; a < p->first[e + 1]; a += MOST) {
        int rows = MIN(MOST, p->first[e + 1] - a);
        for (int r = 0; r < rows; r++) xs[r] = p->h + p->order[a + r] * x_apart(o->F, p->down.kind), ys[r] = mine + p->order[a + r] * ITEM;
        row_dots(xs, ys, rows, &p->down, o->C * e + n, cols, o->down.bias, o->down.bias_kind);
    }
    for (long m = 0; m < o->M; m++) {
        float total[ITEM] = {0};
        for (long i = m * o->k; i < (m + 1) * o->k; i++) for (int c = 0; c < cols; c++) total[c] += o->weight[i] * mine[i * ITEM + c];
        memcpy(o->y + m * o->C + n, total, cols * sizeof(float));
    }
}

typedef struct { floats x; Steps *to; } Stepping;
static void steps_of_x(const void *with, long item) { steps_of_32(((const Stepping *)with)->x + 32 * item, ((const Stepping *)with)->to + item); }

// y[m] = sum over i of weight[m, i] * (down . act(gate . x[m], up . x[m]) of expert index[m, i]); clamped: gpt-oss's activation.
void moe(const Moe *o) {
    long M = o->M, C = o->C, F = o->F, E = o->E, A = M * o->k;
    int threads = team((double)A * C * F, 32768, o->threads), far = M > 1 || E * F * at(o->up.kind, C) > NEAR;
    int round = rounds(o->rounded, o->gate.kind) && rounds(o->rounded, o->up.kind) && rounds(o->rounded, o->down.kind), kind = BY_PAIRS && round ? PAIRED : 0;
    long h_size = A * (F + 32), x_size = M * (C + 32);
    float *h = scratch(h_size + 2 * x_size + threads * A * ITEM + 2 * (A + 2 * E + 2)), *x = h + h_size, *mixed = x + x_size, *parts = mixed + x_size;
    long *first = (long *)((uintptr_t)(parts + threads * A * ITEM + 1) & ~7ul), *used = first + E + 1, *order = used + E, distinct = 0;
    memset(first, 0, (E + 1) * sizeof(long));  // the assignments of expert e become order[first[e]..first[e + 1] - 1]
    for (long a = 0; a < A; a++) first[o->index[a] + 1]++;
    for (long e = 0; e < E; e++) if (first[e + 1]) used[distinct++] = e;
    for (long e = 0; e < E; e++) first[e + 1] += first[e];
    for (long a = 0; a < A; a++) order[first[o->index[a]]++] = a;
    memmove(first + 1, first, E * sizeof(long));
    first[0] = 0;
    Plan plan = {o, o->x, h, parts, first, used, order, distinct, A, rows_of(&o->gate, C, kind, far), rows_of(&o->up, C, kind, far), rows_of(&o->down, F, kind, far), round, o->down.kind == WHOLE ? 32 : ITEM};
    if (round) plan.x = round_rows(o->x, M, C, kind, x, o->threads);
    if (o->up.kind == MXFP4 && !kind) {
        for (long c = 0; c < M * C; c += 16) mix(plan.x + c, c, mixed);  // C is a multiple of 32
        plan.x = mixed;
    }
    if (o->up.kind == WHOLE) {
        each_row(M * (C / 32), steps_of_x, &(Stepping){plan.x, (Steps *)mixed}, team((double)M * C, 16384, o->threads));
        plan.x = mixed;
    }
    each_item(distinct * ((F + plan.units - 1) / plan.units), up, &plan, threads);
    each_item((C + ITEM - 1) / ITEM, down, &plan, threads);
}
