// Part of cpu.c: several kernels in one call, so that what calls them is paid for once; and several steps.
typedef struct { int64_t which; const void *with; } Call;
typedef struct { const Call *calls; int64_t count; } Program;
void run(const Program *p) {
    long before = cores_lost(), lost;
    for (const Call *c = p->calls; c < p->calls + p->count; c++) switch (c->which) {  // read by layouts.py
        case 0: linear(c->with); break;
        case 1: rms_norm(c->with); break;
        case 2: rope(c->with); break;
        case 3: gated(c->with); break;
        case 4: block_conv(c->with); break;
        case 5: angles(c->with); break;
        case 6: add_to(c->with); break;
        case 7: places(c->with); break;
        case 8: embed(c->with); break;
        case 9: append(c->with); break;
        case 10: attend(c->with); break;
        case 11: route(c->with); break;
        case 12: moe(c->with); break;
        case 13: copy(c->with); break;
        case 14: family(c->with); break;
        case 15: argmax(c->with); break;
        case 16: gather(c->with); break;
        case 17: top(c->with); break;
        case 18: walk(c->with); break;
        case 19: paths(c->with); break;
    }
    if ((lost = cores_lost() - before) > 0 && now() > pool.alone_until) step_back(now(), lost * SLICE);
}

// A step of B rows of one token, up to `most` times: what it chose, best [B], is written to out [most, B] and is its next input, one place later, and
// aux [aux_size] to all_aux. It ends after the step by which every row has chosen one of `stops`, or that has `odd` logits; taken: how many there were.
// With keys [most, B] the rows with a temperature [B] other than 0 draw from logits [B, V].
typedef struct { const Program *step; int64_t *tokens, *start; const int64_t *best, *odd, *stops; floats aux; int64_t *out; float *all_aux; int64_t *taken;
                 const int64_t *keys; floats temperature, logits; int64_t B, V, most, stop_count, aux_size, threads; } Ahead;
static int64_t chosen(const Ahead *o, long n, long b) {
    if (!o->keys || !o->temperature[b]) return o->best[b];
    int64_t token;
    drawn(&(Draw){o->logits + b * o->V, o->keys + n * o->B + b, &token, 1, o->V, o->threads, o->temperature[b]});
    return token;
}
void run_ahead(const Ahead *o) {
    uint8_t ended[o->B];
    memset(ended, 0, o->B);
    for (long n = *o->taken = 0, running = o->B; n < o->most && running && !(n && *o->odd); n++) {
        run(o->step);
        ++*o->taken;
        if (o->aux) memcpy(o->all_aux + n * o->aux_size, o->aux, o->aux_size * sizeof(float));
        for (long b = 0; b < o->B; b++) {
            int64_t token = o->out[n * o->B + b] = o->tokens[b] = chosen(o, n, b);
            o->start[b]++;
            for (long i = 0; i < o->stop_count && !ended[b]; i++) if (token == o->stops[i]) ended[b] = 1, running--;
        }
    }
}
