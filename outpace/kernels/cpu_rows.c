// Part of cpu.c: RMSNorm and the gated activations over many rows, forward and backward, in float32 or bfloat16; vectors to numbers of a kind.
INLINE vi halved(vf v) {  // to the nearest float16, ties to even
#if W == 16
    return (vi)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined __F16C__
    return (vi)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    vu sign = (vu)v >> 16 & 0x8000, x = (vu)v & 0x7fffffff, normal = (x - 0x38000000 + 0xfff + (x >> 13 & 1)) >> 13;
    vu tiny = (vu)((vf)x + 0.5f) - 0x3f000000;  // below 2^-14: the sum's last bit counts the smallest half's steps
    vi small = (vi)x < 0x38800000, large = (vi)x >= 0x477ff000, nan = (vi)x > 0x7f800000;
    vu h = ((vu)small & tiny) | ((vu)~small & normal);
    h = ((vu)large & (0x7c00 | ((vu)nan & 0x200))) | ((vu)~large & h);
    return (vi)(sign | h);
#endif
}
INLINE void put(void *p, long kind, long i, long n, vf v) {
    if (kind == F32) {
        if (n >= W) store((float *)p + i, v);
        else memcpy((float *)p + i, &v, n * sizeof(float));
    } else {
        vh h = __builtin_convertvector(kind == F16 ? halved(v) : rounded(v), vh);
        memcpy((uint16_t *)p + i, &h, MIN(W, n) * sizeof(uint16_t));
    }
}
INLINE any row(any p, long kind, long i) { return (bytes)p + i * at(kind, 1); }

// ---- RMSNorm
typedef struct { any x, w; void *y; int64_t kind, w_kind; double eps; int64_t M, C, stride, threads; } Norm;  // of rows of y
static void norm_row(const void *with, long m) {
    const Norm *o = with;
    any x = row(o->x, o->kind, m * o->C);
    vf squares = {0};
    for (long i = 0; i < o->C; i += W) { vf v = fetch(x, o->kind, i, o->C - i); squares += v * v; }
    float s = 1.0f / sqrtf(sum(squares) / o->C + o->eps);
    for (long i = 0; i < o->C; i += W)
        put(o->y, o->kind, m * o->stride + i, o->C - i, fetch(x, o->kind, i, o->C - i) * s * fetch(o->w, o->w_kind, i, o->C - i));
}
void rms_norm(const Norm *o) {
    each_row(o->M, norm_row, o, team((double)o->M * o->C, 65536, o->threads));
}

typedef struct { any x, w, dy; void *dx; float *dw; int64_t kind; double eps; int64_t M, C, threads; } NormBack;
enum { PARTS = 64 };  // of the rows: dw is summed within each and then over them, so threads do not change it
typedef struct { const NormBack *o; float *dw; } NormParts;
static void norm_back(const void *with, long item) {
    const NormBack *o = ((const NormParts *)with)->o;
    long C = o->C, kind = o->kind;
    float *dw = ((const NormParts *)with)->dw + item * C;
    memset(dw, 0, C * sizeof(float));
    for (long m = o->M * item / PARTS; m < o->M * (item + 1) / PARTS; m++) {
        any x = row(o->x, kind, m * C), dy = row(o->dy, kind, m * C);
        vf squares = {0}, along = {0};
        for (long i = 0; i < C; i += W) {
            vf v = fetch(x, kind, i, C - i);
            squares += v * v, along += v * fetch(dy, kind, i, C - i) * part((floats)o->w + i, C - i);
        }
        float s = 1.0f / sqrtf(sum(squares) / C + o->eps), back = s * s * s * sum(along) / C;
        for (long i = 0; i < C; i += W) {
            vf v = fetch(x, kind, i, C - i), g = fetch(dy, kind, i, C - i), more = part(dw + i, C - i) + v * g * s;
            put(o->dx, kind, m * C + i, C - i, g * part((floats)o->w + i, C - i) * s - v * back);
            put(dw, F32, i, C - i, more);
        }
    }
}
void rms_norm_backward(const NormBack *o) {
    float *dw = scratch(PARTS * o->C);
    each_row(PARTS, norm_back, &(NormParts){o, dw}, team((double)o->M * o->C, 32768, o->threads));
    memset(o->dw, 0, o->C * sizeof(float));
    for (long p = 0; p < PARTS; p++) for (long i = 0; i < o->C; i++) o->dw[i] += dw[p * o->C + i];
}

// ---- rotary angles, in double: at position 131,072 a float32 angle is off by up to 0.008 rad
typedef struct { const int64_t *positions; const double *inv; double concentration; float *cos, *sin; int64_t M, half, threads; } Angles;
static void angle_row(const void *with, long m) {
    const Angles *o = with;
    for (long i = 0, to = m * o->half; i < o->half; i++, to++) {
        double angle = (double)o->positions[m] * o->inv[i];
        o->cos[to] = cos(angle) * o->concentration, o->sin[to] = sin(angle) * o->concentration;
    }
}
void angles(const Angles *o) {
    each_row(o->M, angle_row, o, team((double)o->M * o->half, 2048, o->threads));
}

// ---- heads turned by their angles, x to y: the first `turned` of each row's H heads, half against half; sign -1 turns back
typedef struct { any x; void *y; floats cos, sin; int64_t kind, M, H, turned, D; double sign; int64_t threads; } Turn;
static void turn_row(const void *with, long m) {
    const Turn *o = with;
    long half = o->D / 2, first = m * o->H * o->D, end = first + o->turned * o->D;
    for (long a = first; a < end; a += o->D) for (long i = 0; i < half; i += W) {
        long n = half - i;
        vf u = fetch(o->x, o->kind, a + i, n), v = fetch(o->x, o->kind, a + half + i, n);
        vf c = part(o->cos + m * half + i, n), s = part(o->sin + m * half + i, n) * (float)o->sign;
        put(o->y, o->kind, a + i, n, u * c - v * s);
        put(o->y, o->kind, a + half + i, n, v * c + u * s);
    }
    memcpy((void *)row(o->y, o->kind, end), row(o->x, o->kind, end), at(o->kind, (o->H - o->turned) * o->D));
}
void turn_heads(const Turn *o) {
    each_row(o->M, turn_row, o, team((double)o->M * o->H * o->D, 65536, o->threads));
}

// ---- the place of the largest value of each row, the first among equals; and how many rows hold a NaN, or have no finite largest value
typedef struct { floats x; int64_t *y, *odd, M, N, threads; } Largest;
static void largest(const void *with, long m) {
    const Largest *o = with;
    floats x = o->x + m * o->N;
    vf best = all(-INFINITY);
    vi where = {0}, odd = {0};
    long n = 0;
    for (; n + W <= o->N; n += W) {
        vf v = load(x + n);
        vi more = v > best;
        odd |= v != v;
        best = pick(more, v, best), where = (where & ~more) | ((vi){0} + (int)n & more);
    }
    float top = -INFINITY;
    long place = 0;
    int wrong = 0;
    for (int i = 0; i < W; i++) {
        long at = where[i] + i;
        wrong |= odd[i];
        if (best[i] > top || (best[i] == top && at < place)) top = best[i], place = at;
    }
    for (; n < o->N; n++) {
        wrong |= x[n] != x[n];
        if (x[n] > top) top = x[n], place = n;
    }
    o->y[m] = place;
    if (o->odd && (wrong || fabsf(top) == INFINITY)) __atomic_fetch_add(o->odd, 1, __ATOMIC_RELAXED);
}
void argmax(const Largest *o) {
    if (o->odd) *o->odd = 0;
    each_row(o->M, largest, o, team((double)o->M * o->N, 262144, o->threads));
}

// ---- gated activations: x [M, 2F] -> y [M, F]; clamped: gate and up in turn, else all gates and then all ups
typedef struct { any x, dy; void *out; int64_t kind, M, F, clamped; double limit, alpha; int64_t threads; } Gates;
typedef struct { vf gate, up; } Pair;
#if W == 16
#define EVEN(a, b) MIX(vi, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) MIX(vi, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#else
#define EVEN(a, b) MIX(vi, a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) MIX(vi, a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#endif
INLINE Pair pair(const Gates *o, any x, long i) {
    long n = o->F - i;
    if (!o->clamped) return (Pair){fetch(x, o->kind, i, n), fetch(x, o->kind, o->F + i, n)};
    vf a = fetch(x, o->kind, 2 * i, 2 * n), b = fetch(x, o->kind, 2 * i + W, MAX(2 * n - W, 0));
    return (Pair){EVEN(a, b), ODD(a, b)};
}
static void gate_row(const void *with, long m) {
    const Gates *o = with;
    any x = row(o->x, o->kind, m * 2 * o->F);
    vf limit = all(o->limit);
    for (long i = 0; i < o->F; i += W) {
        Pair p = pair(o, x, i);
        if (o->clamped) {
            p.gate = pick(p.gate > limit, limit, p.gate);
            p.up = pick(p.up > limit, limit, pick(p.up < -limit, -limit, p.up)) + 1.0f;
        }
        put(o->out, o->kind, m * o->F + i, o->F - i, p.gate * sigmoid(p.gate * (float)o->alpha) * p.up);
    }
}
void gated(const Gates *o) {
    each_row(o->M, gate_row, o, team((double)o->M * o->F, 16384, o->threads));
}
static void gate_back(const void *with, long m) {
    const Gates *o = with;
    any x = row(o->x, o->kind, m * 2 * o->F), dy = row(o->dy, o->kind, m * o->F);
    vf limit = all(o->limit);
    for (long i = 0; i < o->F; i += W) {
        long n = o->F - i;
        Pair p = pair(o, x, i);
        vf d = fetch(dy, o->kind, i, n);
        vi open = p.gate <= limit, free = (p.up <= limit) & (p.up >= -limit);
        if (o->clamped) {
            p.gate = pick(open, p.gate, limit);
            p.up = pick(p.up > limit, limit, pick(p.up < -limit, -limit, p.up)) + 1.0f;
        } else open = free = ~(vi){0};
        vf s = sigmoid(p.gate * (float)o->alpha), to_up = pick(free, d * p.gate * s, all(0));
        vf to_gate = pick(open, d * p.up * (s + (float)o->alpha * p.gate * s * (1.0f - s)), all(0));
        long start = m * 2 * o->F;
        if (o->clamped) {
            put(o->out, o->kind, start + 2 * i, 2 * n, LOW(to_gate, to_up));
            if (2 * n > W) put(o->out, o->kind, start + 2 * i + W, 2 * n - W, HIGH(to_gate, to_up));
        } else {
            put(o->out, o->kind, start + i, n, to_gate);
            put(o->out, o->kind, start + o->F + i, n, to_up);
        }
    }
}
void gated_backward(const Gates *o) {
    each_row(o->M, gate_back, o, team((double)o->M * o->F, 16384, o->threads));
}
