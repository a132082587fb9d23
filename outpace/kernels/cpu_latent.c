// Part of cpu.c: keys made of latents, k = c W + b, normed and rotated, lanes over the numbers of a key.

// w [K * D / P, R, P]: what is multiplied at once stands together
typedef struct { floats c, w, bias, cos, sin, gain; float *y; int64_t c_b, c_s, t_b, y_b, y_h, B, n, R, K, D, P, normed, threads; } Unfold;
enum { TOKENS = 48, LATENTS = 6 * W / 8, DEEP = 256 };  // that share what is read of w; rows of a register tile, a divisor of them; r at once
// LATENTS rows of c [R] times rows begin to end of w [R, V vectors], on top of columns of buf [LATENTS, D]
INLINE void combine(const int V, const floats *c, floats w, long begin, long end, float *buf, long D) {
    vf a[LATENTS * 2];
    UNROLL for (int m = 0; m < LATENTS; m++) UNROLL for (int i = 0; i < V; i++) a[m * V + i] = load(buf + m * D + i * W);
    for (long r = begin; r < end; r++) {
        vf x[2];
        UNROLL for (int i = 0; i < V; i++) x[i] = load(w + (r * V + i) * W);
        UNROLL for (int m = 0; m < LATENTS; m++) UNROLL for (int i = 0; i < V; i++) a[m * V + i] += x[i] * c[m][r];
    }
    UNROLL for (int m = 0; m < LATENTS; m++) UNROLL for (int i = 0; i < V; i++) store(buf + m * D + i * W, a[m * V + i]);
}
static void combine_few(const floats *c, floats w, long begin, long end, float *buf, long D, long P) {  // of less than a vector
    for (int m = 0; m < LATENTS; m++) for (long p = 0; p < P; p++)
        for (long r = begin; r < end; r++) buf[m * D + p] += w[r * P + p] * c[m][r];
}
static void key_rows(const void *with, long item) {  // TOKENS of one sequence, all heads
    const Unfold *o = with;
    long blocks = (o->n + TOKENS - 1) / TOKENS, b = item / blocks, first = item % blocks * TOKENS, D = o->D, F = D / 2;
    int rows = MIN(TOKENS, o->n - first);
    float buf[TOKENS * MOST_D];
    floats begin = o->c + b * o->c_b + first * o->c_s;
    for (long h = 0; h < o->K; h++) {
        for (int m = 0; m < TOKENS; m++) memcpy(buf + m * D, o->bias + h * D, D * sizeof(float));
        for (long d = 0; d < D; d += o->P) for (long r = 0; r < o->R; r += DEEP) for (int at = 0; at < rows; at += LATENTS) {
            floats c[LATENTS], w = o->w + (h * D + d) * o->R;
            long end = MIN(r + DEEP, o->R);
            for (int m = 0; m < LATENTS; m++) c[m] = begin + MIN(at + m, rows - 1) * o->c_s;  // a short tile repeats the last
            float *x = buf + at * D + d;
            if (o->P == 2 * W) combine(2, c, w, r, end, x, D);
            else if (o->P == W) combine(1, c, w, r, end, x, D);
            else combine_few(c, w, r, end, x, D, o->P);
        }
        for (int m = 0; m < rows; m++) {
            float *x = buf + m * D, *y = o->y + b * o->y_b + h * o->y_h + (first + m) * D;
            floats cos = o->cos + b * o->t_b + (first + m) * F, sin = o->sin + b * o->t_b + (first + m) * F;
            float inverse = o->normed ? begin[m * o->c_s + o->R + h] : 1.0f;
            for (long d = 0; o->normed && d < D; d++) x[d] *= inverse * o->gain[d];
            for (long d = 0; d < F; d++) y[d] = x[d] * cos[d] - x[d + F] * sin[d], y[d + F] = x[d + F] * cos[d] + x[d] * sin[d];
        }
    }
}
// c [B, n, R and, where normed, 1 / rms of K heads], bias [K * D], cos and sin [B or 1, n, D / 2], gain [D] -> y [B, K, n, D], strided.
void latent_keys(const Unfold *o) {
    long items = o->B * ((o->n + TOKENS - 1) / TOKENS);
    each_row(items, key_rows, o, team((double)o->B * o->n * o->R * o->K * o->D, 4e4, o->threads));
}
