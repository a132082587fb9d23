// Part of cpu.c: what a step of a target needs around its layers: positions, embeddings, and the memory of new tokens.
typedef struct { const int64_t *start, *depth; int64_t *positions, B, T, held, offset; } Places;
// Where token t of row b is in its text: start + held + t, in a tree start + depth [B, T]; from `offset` on.
void places(const Places *o) {
    for (long i = 0; i < o->B * o->T; i++)
        o->positions[i] = o->offset + o->start[i / o->T] + (o->depth ? o->depth[i] : o->held + i % o->T);
}

typedef struct { const int64_t *parents; uint8_t *sees; int64_t *depth, *wrong, B, U, held, window; } Family;
// Of the nodes from `held` on of each tree of parents [B, U]: depth [B, T], and sees [B, T, U], their ancestors and themselves, those less than
// `window` generations away (0: all). A root is its own parent; `wrong` counts parents that are no earlier node.
void family(const Family *o) {
    long U = o->U, T = U - o->held, depth[U];
    memset(o->sees, 0, o->B * T * U);
    *o->wrong = 0;
    for (long b = 0; b < o->B; b++) for (long u = 0; u < U; u++) {
        const int64_t *parent = o->parents + b * U;
        if (parent[u] < 0 || parent[u] > u) { ++*o->wrong; return; }
        depth[u] = parent[u] == u ? 0 : depth[parent[u]] + 1;
        if (u < o->held) continue;
        long row = b * T + u - o->held, a = u;
        o->depth[row] = depth[u];
        for (long n = 0; n <= depth[u] && (!o->window || n < o->window); n++, a = parent[a]) o->sees[row * U + a] = 1;
    }
}

typedef struct { const int64_t *tokens; any w; int64_t kind; float *y; int64_t *outside, M, V, K; } Embed;
void embed(const Embed *o) {  // rows of w [V, K]; `outside` counts the tokens that have none
    *o->outside = 0;
    for (long m = 0; m < o->M; m++) {
        if (o->tokens[m] < 0 || o->tokens[m] >= o->V) { ++*o->outside; continue; }
        bytes row = (bytes)o->w + o->tokens[m] * at(o->kind, o->K);
        float *y = o->y + m * o->K;
        if (o->kind == F32 || o->kind == BF16) for (long i = 0; i < o->K; i++) y[i] = get(row, o->kind, i);
        else expand(row, o->kind, 0, o->K, y);
    }
}

typedef struct { floats qkv; const int64_t *start, *counts; int64_t B, T, H, K, D, apart, held; const Ring *ring; const int64_t *rows; } Append;
// Keys and values of the first counts [B] tokens of each sequence, which lie `apart` tokens apart, to its row of the ring, rows [B] (absent: b), behind
// start [B] + held tokens; what it would overwrite at once is not written.
void append(const Append *o) {
    long D = o->D, width = (o->H + 2 * o->K) * D, size = o->ring->size;
    for (long b = 0; b < o->B; b++) for (long t = MAX(0, o->counts[b] - size); t < o->counts[b]; t++) {
        floats k = o->qkv + (b * o->apart + t) * width + o->H * D, v = k + o->K * D;
        long slot = (o->start[b] + o->held + t) % size;
        for (long h = 0; h < o->K; h++) {
            long to = (((o->rows ? o->rows[b] : b) * o->K + h) * (size + 1) + slot) * D;
            for (long d = 0; d < D; d += W) {
                put(o->ring->k, o->ring->kind, to + d, D - d, part(k + h * D + d, D - d));
                put(o->ring->v, o->ring->kind, to + d, D - d, part(v + h * D + d, D - d));
            }
        }
    }
}

typedef struct { floats x; float *y; int64_t n; } Copy;
void copy(const Copy *o) { memcpy(o->y, o->x, o->n * sizeof(float)); }
void add_to(const Copy *o) { for (long i = 0; i < o->n; i++) o->y[i] += o->x[i]; }

typedef struct { const int64_t *x, *index; int64_t *y, n; } Gather;
void gather(const Gather *o) { for (long i = 0; i < o->n; i++) o->y[i] = o->x[o->index[i]]; }
