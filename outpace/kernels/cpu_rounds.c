// Part of cpu.c: rounds of one row in one call. A chain is drafted and cut, the target verifies it, and the draft remembers what was accepted.
// A verify pass of n positions; step 0: nobody has made one of this size.
typedef struct { const Program *step; int64_t *tokens, *start, *counts; const int64_t *best, *odd; floats logits, aux; } VerifyPass;
// How the draft remembers n accepted tokens, by the target's states at them [n, layers, C], behind `start`.
typedef struct { const Program *append; float *states; int64_t *start, *counts; } DraftContext;
// The chain after the token `last`, of which the block has a copy, behind `start` remembered tokens: `chosen` [N - 1], the share of each place that its best
// token has, and where the draft adds noise, its keys.
typedef struct { const Program *draft; int64_t *last, *anchor, *start; const int64_t *chosen; floats sure; int64_t *keys; } Chain;
// passes, contexts: at [n] those of n tokens, up to N. stops: tokens that end the row. keys: of the noise of coming tokens, at a temperature. softness [N - 1],
// or absent: as `dflash_decode.host_survival` has it. seconds [N + 1], trust [N]: of `controller.ChainCut`; absent: no chain is cut. Of each round made: tokens
// [N], survival [N], how many positions were verified and `kept`, and nanoseconds of draft and verify pass; what was kept follows `text`. offered: a chain
// was drafted after those of which no draft token was verified. observed: tokens that the draft remembers of them, all where the row goes on. `last`, start,
// remembered: where the row is, of the target and of the draft. longest: nanoseconds, of which rounds that are expected to take more are not begun.
typedef struct {
    const Chain *chain; const VerifyPass *passes; const DraftContext *contexts; const int64_t *stops, *keys; const double *softness, *seconds, *trust;
    int64_t *tokens, *verified, *kept, *text, *nanoseconds; float *survival; int64_t *made, *offered, *observed;
    int64_t N, most, left, stop_count, layers, C, V, last, start, remembered, longest, threads; double temperature, rate, settle;
} Rounds;

static int survive(const Rounds *o, float *survival) {  // -> whether all are numbers
    double reached = 1, total = survival[0] = 1;
    for (long i = 0; i + 1 < o->N; i++) {
        double chance = o->chain->sure[i];
        if (o->softness) chance = 1 / (1 + pow(1 / fmin(fmax(chance, 1e-6), 1 - 1e-6) - 1, 1 / o->softness[i]));
        survival[i + 1] = reached *= chance, total += survival[i + 1];
    }
    return isfinite(total);
}
static long cut_at(const Rounds *o, floats survival, double settle) {  // as `Adaptive.cut` of a chain
    double above = 1, tokens = 1, most = 1 - o->rate * o->seconds[1];
    long best = 1;
    for (long n = 2; n <= o->N; n++) {
        above = fmin(survival[n - 1] * o->trust[n - 1], above), tokens += above;
        double worth = tokens - o->rate * (o->seconds[n] + settle);
        if (worth > most) most = worth, best = n;
    }
    return best;
}
static int64_t target_token(const Rounds *o, const VerifyPass *p, long i, long place) {
    if (!o->keys) return p->best[i];
    int64_t token;
    drawn(&(Draw){p->logits + i * o->V, o->keys + place, &token, 1, o->V, o->threads, o->temperature});
    return token;
}
static void remember(const Rounds *o, const VerifyPass *p, long n, long kept, long behind) {
    const DraftContext *c = o->contexts + kept;
    for (long t = 0; t < kept; t++) for (long l = 0; l < o->layers; l++)
        memcpy(c->states + (t * o->layers + l) * o->C, p->aux + (l * n + t) * o->C, o->C * sizeof(float));
    *c->start = behind, *c->counts = kept;
    run(c->append);
}
INLINE int another(const Rounds *o, long made, long spent) {
    return !made || (made < o->most && spent + spent / made <= o->longest);
}
void play_rounds(const Rounds *o) {
    const Chain *chain = o->chain;
    long N = o->N, written = 0, going = 1, first = now();
    *o->made = *o->offered = *o->observed = 0;
    for (long r = 0; going && another(o, r, now() - first); r++) {
        int64_t *tokens = o->tokens + r * N, *text = o->text + written, *nanoseconds = o->nanoseconds + 2 * r;
        float *survival = o->survival + r * N;
        long began = now(), kept = 1;
        *chain->last = *chain->anchor = tokens[0] = r ? text[-1] : o->last, *chain->start = o->remembered + written;
        if (chain->keys) memcpy(chain->keys, o->keys + written, (N - 1) * sizeof(int64_t));
        run(chain->draft);
        memcpy(tokens + 1, chain->chosen, (N - 1) * sizeof(int64_t));
        long n = !survive(o, survival) ? 1 : o->seconds ? cut_at(o, survival, r ? 0 : o->settle) : N;
        const VerifyPass *pass = o->passes + n;
        long drafted = now();
        nanoseconds[0] = drafted - began, nanoseconds[1] = 0;
        if (n == 1 || !pass->step) { *o->offered = 1; return; }
        memcpy(pass->tokens, tokens, n * sizeof(int64_t)), *pass->start = o->start + written, *pass->counts = n;
        run(pass->step);
        text[0] = target_token(o, pass, 0, written);
        for (; kept < n && tokens[kept] == text[kept - 1]; kept++) text[kept] = target_token(o, pass, kept, written + kept);
        for (long i = 0; i < kept * o->stop_count; i++) if (text[i / o->stop_count] == o->stops[i % o->stop_count]) going = 0;
        long judged = now();
        o->verified[r] = n, o->kept[r] = kept, nanoseconds[1] = judged - drafted, *o->made = r + 1;
        going &= written + kept < o->left && !*pass->odd;
        if (going) remember(o, pass, n, kept, o->remembered + written), *o->observed = written + kept, nanoseconds[0] += now() - judged;
        written += kept;
    }
}
