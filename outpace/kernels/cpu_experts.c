// Part of cpu.c: routing, and the grouped experts.
typedef struct { floats x; any w; int64_t kind; any bias; int64_t bias_kind, *index; float *weight; int64_t M, E, C, k, soft, renormalise, threads; } Route;
// The k largest logits, descending, the lowest index first among equals; soft: softmax over all of them, not over the chosen.
void route(const Route *o) {
    float *p = scratch(o->M * o->E), *weight = o->weight;
    int64_t *index = o->index;
    linear(&(Linear){o->x, o->w, o->kind, o->bias, o->bias_kind, p, o->M, o->E, o->C, o->E, o->threads});
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
static void expert(const Experts *o, long row, long k, int cols, const floats *x, int rows, float *sums) {
    block(x, rows, &(Rows){o->w + row * at(o->kind, k), o->s + row * (k / 32), o->kind, k, k}, cols, sums);
    add(o->bias, o->bias_kind, row, cols, sums, rows);
}
// Expert e's gates and ups begin `apart` * e rows into theirs; interleaved, they stand in turn in one matrix, which both name.
typedef struct { floats x; const int64_t *index; floats weight; Experts gate, up, down; float *y; int64_t M, C, F, E, k, apart, interleaved, clamped;
                 double limit, alpha; int64_t threads; } Moe;
typedef struct { const Moe *o; floats x; float *h, *parts; long *first, *used, *order, distinct, A; } Plan;

static void up(const void *with, long item, long me) {  // some units of the hidden layer of one expert, for all its rows
    const Plan *p = with;
    const Moe *o = p->o;
    long groups = (o->F + UNITS - 1) / UNITS, e = p->used[item / groups], f0 = item % groups * UNITS, units = MIN(UNITS, o->F - f0);
    float sums[MOST * COLS + 16], raw[MOST][2 * UNITS], limit = o->limit;
    floats xs[MOST];
    for (long a = p->first[e]; a < p->first[e + 1]; a += MOST) {
        int rows = MIN(MOST, p->first[e + 1] - a);
        for (int r = 0; r < rows; r++) xs[r] = p->x + p->order[a + r] / o->k * o->C;
        for (int n = 0, cols; n < 2 * units; n += cols) {    // pairs; or gates, then ups
            long row = o->apart * e + (o->interleaved ? 2 * f0 + n : f0 + n - (n < units ? 0 : units));
            cols = MIN(COLS, (n < units ? units : 2 * units) - n);
            expert(n < units ? &o->gate : &o->up, row, o->C, cols, xs, rows, sums);
            for (int r = 0; r < rows; r++) place(raw[r] + n, sums + r * COLS, cols);
        }
        for (int r = 0; r < rows; r++) {
            float g[UNITS] = {0}, u[UNITS] = {0}, *to = p->h + p->order[a + r] * o->F;
            if (o->interleaved) for (int i = 0; i < units; i++) g[i] = raw[r][2 * i], u[i] = raw[r][2 * i + 1];
            else memcpy(g, raw[r], units * sizeof(float)), memcpy(u, raw[r] + units, units * sizeof(float));
            if (o->clamped) for (int i = 0; i < units; i++) g[i] = MIN(limit, g[i]), u[i] = MAX(-limit, MIN(limit, u[i])) + 1.0f;  // the last one, where it is not a number
            for (int i = 0; i < units; i += W) store(g + i, load(g + i) * sigmoid(load(g + i) * (float)o->alpha) * load(u + i));
            if (o->down.kind == MXFP4) for (long i = 0; i < units; i += 16) mix(g + i, f0 + i, to);  // F is a multiple of 32, UNITS of 16
            else memcpy(to + f0, g, units * sizeof(float));
        }
    }
}
static void down(const void *with, long item, long me) {  // some columns of y, of all experts
    const Plan *p = with;
    const Moe *o = p->o;
    long n = item * COLS;
    float *mine = p->parts + me * p->A * COLS;
    float sums[MOST * COLS + 16];
    floats xs[MOST];
    int cols = MIN(COLS, o->C - n);
    for (long i = 0; i < p->distinct; i++) for (long e = p->used[i], a = p->first[e]; a < p->first[e + 1]; a += MOST) {
        int rows = MIN(MOST, p->first[e + 1] - a);
        for (int r = 0; r < rows; r++) xs[r] = p->h + p->order[a + r] * o->F;
        expert(&o->down, o->C * e + n, o->F, cols, xs, rows, sums);
        for (int r = 0; r < rows; r++) memcpy(mine + p->order[a + r] * COLS, sums + r * COLS, COLS * sizeof(float));
    }
    for (long m = 0; m < o->M; m++) {
        float total[COLS] = {0};
        for (long i = m * o->k; i < (m + 1) * o->k; i++) UNROLL for (int c = 0; c < COLS; c++) total[c] += o->weight[i] * mine[i * COLS + c];
        place(o->y + m * o->C + n, total, cols);
    }
}

// y[m] = sum over i of weight[m, i] * (down . act(gate . x[m], up . x[m]) of expert index[m, i]); clamped: gpt-oss's activation.
void moe(const Moe *o) {
    long M = o->M, C = o->C, F = o->F, E = o->E, A = M * o->k;
    int threads = team((double)A * C * F, 32768, o->threads);
    float *h = scratch(A * F + M * C + threads * A * COLS + 2 * (A + 2 * E + 2)), *mixed = h + A * F, *parts = mixed + M * C;
    long *first = (long *)((uintptr_t)(parts + threads * A * COLS + 1) & ~7ul), *used = first + E + 1, *order = used + E, distinct = 0;
    memset(first, 0, (E + 1) * sizeof(long));  // the assignments of expert e become order[first[e]..first[e + 1] - 1]
    for (long a = 0; a < A; a++) first[o->index[a] + 1]++;
    for (long e = 0; e < E; e++) if (first[e + 1]) used[distinct++] = e;
    for (long e = 0; e < E; e++) first[e + 1] += first[e];
    for (long a = 0; a < A; a++) order[first[o->index[a]]++] = a;
    memmove(first + 1, first, E * sizeof(long));
    first[0] = 0;
    if (o->up.kind == MXFP4) for (long c = 0; c < M * C; c += 16) mix(o->x + c, c, mixed);  // C is a multiple of 32
    Plan plan = {o, o->up.kind == MXFP4 ? mixed : o->x, h, parts, first, used, order, distinct, A};
    each_item(distinct * ((F + UNITS - 1) / UNITS), up, &plan, threads);
    each_item((C + COLS - 1) / COLS, down, &plan, threads);
}
