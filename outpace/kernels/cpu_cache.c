// Part of cpu.c: rows of many memories moved in one call, as the accepted path of a tree asks.

typedef struct { char *rows; int64_t size; } Memory;  // [B, K, size + 1, bytes of a row]
typedef struct { const Memory *memories; const int64_t *source, *target; int64_t M, B, K, n, bytes; } Moves;
// source, target [B, n]: indices of tokens, -1 for none. All sources are read before a target is written.
void move(const Moves *o) {
    char *held = malloc(o->n * o->bytes);
    for (long m = 0; m < o->M; m++) for (long i = 0; i < o->B * o->K; i++) {
        long size = o->memories[m].size;
        const int64_t *source = o->source + i / o->K * o->n, *target = o->target + i / o->K * o->n;
        char *rows = o->memories[m].rows + i * (size + 1) * o->bytes;
        for (long j = 0; j < o->n; j++) if (source[j] >= 0) memcpy(held + j * o->bytes, rows + source[j] % size * o->bytes, o->bytes);
        for (long j = 0; j < o->n; j++) if (source[j] >= 0) memcpy(rows + target[j] % size * o->bytes, held + j * o->bytes, o->bytes);
    }
    free(held);
}
