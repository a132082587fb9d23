// Part of cpu.c: which of the remembered tokens a learned index picks for a query: scores of all, then the best of them.

typedef struct { floats q, w, keys; const int64_t *start; float *y; int64_t k_b, B, T, H, D, S, chain, threads; } Score;
enum { SCORED = 8 * 2 * W };                           // keys of one item
static void score_item(const void *with, long item) {
    const Score *o = with;
    long tiles = (o->S + SCORED - 1) / SCORED, b = item / tiles, H = o->H, D = o->D, T = o->T, some = MOST / H;
    long from = item % tiles * SCORED, known = MIN(o->S, o->start[b] + (o->chain ? T : 0));
    float turned[(MOST_D + W) * 2 * W], p[MOST][KEYS];
    floats q[MOST], keys = o->keys + b * o->k_b;
    for (long at = from; at < MIN(from + SCORED, known); at += 2 * W) {
        for (int side = 0; side < 2; side++) for (long d = 0; d < D; d += W) {
            vf a[W];
            UNROLL for (int i = 0; i < W; i++) a[i] = load(keys + MIN(at + side * W + i, known - 1) * D + d);
            transpose(a);
            UNROLL for (int i = 0; i < W; i++) store(turned + (d + i) * 2 * W + side * W, a[i]);
        }
        long t0 = o->chain ? MAX(0, at - o->start[b]) : 0;     // earlier ones do not see these keys
        for (; t0 < T; t0 += some) {
            long rows = MIN(some, T - t0) * H, s;
            for (long r = 0; r < rows; r++) q[r] = o->q + ((b * T + t0) * H + r) * D;
#define INDEXED(R) scores(s = R, 2, q + r, turned, D, p[r])
            for (long r = 0; r < rows; r += s) rows - r >= 8 ? INDEXED(8) : rows - r >= 4 ? INDEXED(4) : rows - r >= 2 ? INDEXED(2) : INDEXED(1);
            for (long t = t0; t < t0 + rows / H; t++) {
                vf sums[2] = {{0}};
                for (long j = 0; j < H; j++) {
                    float w = o->w[(b * T + t) * H + j];
                    UNROLL for (int i = 0; i < 2; i++) {
                        vf x = load(p[(t - t0) * H + j] + i * W);
                        sums[i] += pick(x < 0.0f, all(0.0f), x) * w;  // a NaN stays one
                    }
                }
                float *y = o->y + (b * T + t) * o->S + at;
                memcpy(y, sums, MIN(2 * W, o->S - at) * sizeof(float));
            }
        }
    }
}
// q [B, T, H, D], w [B, T, H], keys [B, S, D] -> y [B, T, S] = sum_j w_j max(q_j . k, 0), of the keys before start [B] and, in a chain, the new ones.
void index_scores(const Score *o) {
    long items = o->B * ((o->S + SCORED - 1) / SCORED);
    each_row(items, score_item, o, team((double)o->B * o->T * o->H * o->D * o->S, 4e4, o->threads));
}

typedef struct { floats scores; const int64_t *start, *counts; bytes tree; const int64_t *depth, *wanted; int64_t *list, *many;
                 int64_t B, T, U, S, N, sinks, recent, threads; } Choose;
INLINE uint32_t ordered(float x) {                     // unsigned integers in the order of floats
    union { float f; uint32_t u; } v = {x};
    return v.u >> 31 ? ~v.u : v.u | 0x80000000u;
}
static uint32_t threshold(floats x, long n, long take, long *equal) {  // the take-th largest; how many of those like it are taken
    uint32_t prefix = 0, mask = 0;
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift == 10 ? 0 : -1) {
        int bits = shift ? 11 : 10;
        int32_t counts[2048] = {0};
        for (long i = 0; i < n; i++) {
            uint32_t u = ordered(x[i]);
            if ((u & mask) == prefix) counts[u >> shift & ((1 << bits) - 1)]++;
        }
        long bucket = (1 << bits) - 1;
        while (counts[bucket] < take) take -= counts[bucket--];
        prefix |= (uint32_t)bucket << shift, mask |= (uint32_t)((1 << bits) - 1) << shift;
    }
    *equal = take;
    return prefix;
}
static void choose_row(const void *with, long item) {
    const Choose *o = with;
    long b = item / o->T, t = item % o->T, start = o->start[b], place = start + (o->tree ? o->depth[item] : t), end = o->tree ? start : place + 1;
    long lo = MIN(o->sinks, end), hi = MAX(lo, MIN(place + 1 - o->recent, end)), take = o->wanted[item] - (place + 1 - (hi - lo)), n = 0, equal, last = -1;
    int64_t *list = o->list + item * o->N;
    floats scores = o->scores + item * o->S;
    o->many[item] = 0;
    if (t >= o->counts[b]) return;
    for (long s = 0; s < lo; s++) list[n++] = s;
    if (take >= hi - lo) for (long s = lo; s < hi; s++) list[n++] = s;
    else if (take > 0) {
        for (long s = lo; s < hi; s++) if (!(fabsf(scores[s]) <= 3.4e38f)) { o->many[item] = -1; return; }
        uint32_t least = threshold(scores + lo, hi - lo, take, &equal);
        for (long s = hi - 1; s >= lo && equal; s--) if (ordered(scores[s]) == least) last = s, equal--;  // of equals the latest
        for (long s = lo; s < hi; s++) {
            uint32_t u = ordered(scores[s]);
            if (u > least || (u == least && s >= last)) list[n++] = s;
        }
    }
    for (long s = hi; s < end; s++) list[n++] = s;
    for (long u = 0; o->tree && u < o->U; u++) if (o->tree[item * o->U + u]) list[n++] = start + u;
    o->many[item] = n;
}
// scores [B, T, S] -> list [B, T, N], ascending, many [B, T]: the first `sinks` tokens, the last `recent` up to the query, ancestors in a tree [B, T, U],
// and of the others the best, as many as make wanted [B, T] in all; nothing for the columns after counts [B];
// many is -1, and nothing listed, where scores are not finite.
void choose(const Choose *o) {
    long items = o->B * o->T;
    each_row(items, choose_row, o, team((double)items * o->S, 1e4, o->threads));
}
