// Part of cpu.c: Gumbel noise that is a function of a key and a place in the row, added to scores. ops/noise.py has its reference.

INLINE vf log1(vf f, vi e) {  // log((1 + f) 2^e) for f from sqrt(1/2) - 1 to sqrt(2) - 1; relative error about 1e-7
    vf p = (f * 7.0376836292e-2f - 1.1514610310e-1f) * f + 1.1676998740e-1f, z = f * f, n = __builtin_convertvector(e, vf);
    p = ((p * f - 1.2420140846e-1f) * f + 1.4249322787e-1f) * f - 1.6668057665e-1f;
    p = ((p * f + 2.0000714765e-1f) * f - 2.4999993993e-1f) * f + 3.3333331174e-1f;
    return f + (f * z * p - 2.12194440e-4f * n - 0.5f * z) + 0.693359375f * n;
}
INLINE vi halving(vf x, vf *m) {  // x = m 2^e with m from sqrt(1/2) to sqrt(2), x > 0 and not subnormal
    vi e = ((vi)x - 0x3f3504f3) >> 23;
    *m = (vf)((vi)x - (e << 23));
    return e;
}
INLINE vu scattered(vu x) {
    x = (x ^ x >> 16) * 0x85ebca6bu, x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}
INLINE vf gumbel(vu token, uint32_t low, uint32_t high) {
    vf w = (__builtin_convertvector(scattered(scattered(token * 0x9e3779b9u ^ low) ^ high), vf) + 0.5f) * 0x1p-32f, m;
    w = pick(w > 1 - 0x1p-24f, all(1 - 0x1p-24f), w);
    vi e = halving(1 - w, &m);
    vf wait = -log1(pick(e == 0, -w, m - 1), e);  // 1 - w has lost what a small w holds
    e = halving(wait, &m);
    return -log1(m - 1, e);
}
typedef struct { floats x; const int64_t *keys; float *y; int64_t M, N, threads; } Noise;
static void noisy(const void *with, long m) {
    const Noise *o = with;
    floats x = o->x + m * o->N;
    uint32_t low = o->keys[m], high = (uint64_t)o->keys[m] >> 32;
    for (long n = 0; n < o->N; n += W) {
        vf v = part(x + n, o->N - n) + gumbel((vu)PLACES + (uint32_t)n, low, high);
        memcpy(o->y + m * o->N + n, &v, MIN(W, o->N - n) * sizeof(float));
    }
}
void perturb(const Noise *o) {
    each_row(o->M, noisy, o, team((double)o->M * o->N, 32768, o->threads));
}

// ---- the place of the largest of x / temperature + noise, the first among equals: a draw from the softmax
typedef struct { floats x; const int64_t *keys; int64_t *y, M, N, threads; double temperature; } Draw;
static void drawn_row(const void *with, long m) {
    const Draw *o = with;
    floats x = o->x + m * o->N;
    uint32_t low = o->keys[m], high = (uint64_t)o->keys[m] >> 32;
    vf best = all(-INFINITY), temperature = all(o->temperature);
    vi where = {0};
    for (long n = 0; n < o->N; n += W) {
        vf v = part(x + n, o->N - n) / temperature + gumbel((vu)PLACES + (uint32_t)n, low, high);
        vi more = (v > best) & (PLACES < (int)(o->N - n));
        best = pick(more, v, best), where = (where & ~more) | (PLACES + (int)n & more);
    }
    float top = -INFINITY;
    long place = 0;
    for (int i = 0; i < W; i++) if (best[i] > top || (best[i] == top && where[i] < place)) top = best[i], place = where[i];
    o->y[m] = place;
}
void drawn(const Draw *o) {
    each_row(o->M, drawn_row, o, team((double)o->M * o->N, 32768, o->threads));
}

// ---- a key of 64 bits for every place of every stream
typedef struct { const int64_t *streams, *places; int64_t *y, key, N; } PlaceKeys;
static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u, x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
void place_keys(const PlaceKeys *o) {
    const uint64_t apart = 0x9e3779b97f4a7c15u;
    for (long n = 0; n < o->N; n++) o->y[n] = mixed(mixed(o->key + (o->streams[n] + 1) * apart) + (o->places[n] + 1) * apart);
}
