// Part of cpu.c: keys made of latents, k = c W + b, normed and rotated, lanes over the numbers of a key.

typedef struct { floats c, w, bias, cos, sin, gain; float *y; int64_t c_b, c_s, t_b, y_b, y_h, B, n, R, K, D, normed, threads; } Unfold;
enum { LATENTS = 4 };                                  // rows of a register tile
// M rows of c [R] times columns of w [R, N]: 4 vectors of them, or V; buf [M, MOST_D]
INLINE void combine(const int M, const int V, const floats *c, floats w, long N, long R, floats bias, float *buf) {
    vf a[LATENTS * 4] = {{0}};
    for (long r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++) {
        vf x = load(w + r * N + i * W);
        HOLD(x);
        UNROLL for (int m = 0; m < M; m++) a[m * 4 + i] += x * c[m][r];
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int i = 0; i < V; i++) store(buf + m * MOST_D + i * W, a[m * 4 + i] + load(bias + i * W));
}
static void key_rows(const Unfold *o, long item) {       // LATENTS tokens of one sequence, all heads
    long blocks = (o->n + LATENTS - 1) / LATENTS, b = item / blocks, first = item % blocks * LATENTS, N = o->K * o->D, D = o->D, F = D / 2;
    int rows = MIN(LATENTS, o->n - first);
    floats c[LATENTS];
    for (int m = 0; m < LATENTS; m++) c[m] = o->c + b * o->c_b + (first + MIN(m, rows - 1)) * o->c_s;  // a short block repeats its last
    for (long h = 0; h < o->K; h++) {
        float buf[LATENTS * MOST_D];
        floats w = o->w + h * D, bias = o->bias + h * D;
        for (long d = 0; D < W && d < D; d++) for (int m = 0; m < rows; m++) {
            float sum = 0;
            for (long r = 0; r < o->R; r++) sum += w[r * N + d] * c[m][r];
            buf[m * MOST_D + d] = sum + bias[d];
        }
        for (long d = 0; D >= W && d < D; d += D - d >= 4 * W ? 4 * W : W) {
            long at = MIN(d, D - W);                   // the last vector may overlap, alike
            if (D - d >= 4 * W) combine(LATENTS, 4, c, w + d, N, o->R, bias + d, buf + d);
            else combine(LATENTS, 1, c, w + at, N, o->R, bias + at, buf + at);
        }
        for (int m = 0; m < rows; m++) {
            float *x = buf + m * MOST_D, *y = o->y + b * o->y_b + h * o->y_h + (first + m) * D;
            floats cos = o->cos + b * o->t_b + (first + m) * F, sin = o->sin + b * o->t_b + (first + m) * F;
            float inverse = o->normed ? c[m][o->R + h] : 1.0f;
            for (long d = 0; o->normed && d < D; d++) x[d] *= inverse * o->gain[d];
            for (long d = 0; d < F; d++) y[d] = x[d] * cos[d] - x[d + F] * sin[d], y[d + F] = x[d + F] * cos[d] + x[d] * sin[d];
        }
    }
}
// c [B, n, R and, where normed, 1 / rms of K heads], w [R, K * D], bias [K * D], cos and sin [B or 1, n, D / 2], gain [D] -> y [B, K, n, D], strided.
void latent_keys(const Unfold *o) {
    long items = o->B * ((o->n + LATENTS - 1) / LATENTS);
    int threads = team((double)o->B * o->n * o->R * o->K * o->D, 4e4, o->threads);
    EACH_ROW(items, key_rows(o, m));
}
