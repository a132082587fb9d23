// Part of cpu.c: what followed the last tokens of a text where they occurred in another one, whose suffixes are sorted, as a tree.
// ops/suffixes.py says the same in Python, and what the numbers are.

enum { MOST_CONTEXTS = 8, MOST_SAMPLES = 64, MOST_BRANCH = 16 };
typedef struct { long lo, hi, known; } Interval;
typedef struct { Interval at[MOST_CONTEXTS]; long count; } Contexts;
typedef struct { double reach; long token, column, depth; } Offer;
typedef struct {
    const int32_t *text, *order; const int64_t *tail, *lengths;
    int64_t n, tail_length, contexts, nodes, samples, branch, deepest; double doubt, enough;
    int64_t *tokens, *parents; double *reach; int64_t *count;
} Grow;

INLINE long follower(const Grow *o, long at, long known) {
    long place = o->order[at] + known;
    return place < o->n ? o->text[place] : -1;
}
static Interval narrowed(const Grow *o, Interval f, long token) {
    long lo = f.lo, hi = f.hi;
    while (lo < hi) { long middle = (lo + hi) / 2; if (follower(o, middle, f.known) < token) lo = middle + 1; else hi = middle; }
    long first = lo;
    for (hi = f.hi; lo < hi; ) { long middle = (lo + hi) / 2; if (follower(o, middle, f.known) <= token) lo = middle + 1; else hi = middle; }
    return (Interval){first, lo, f.known + 1};
}
static Contexts contexts(const Grow *o) {
    Contexts found = {.count = 0};
    long widest = 0;
    for (long i = 0; i < o->contexts; i++) {
        if (o->lengths[i] > o->tail_length) continue;
        Interval here = {0, o->n, 0};
        for (long j = o->tail_length - o->lengths[i]; j < o->tail_length && here.lo < here.hi; j++) here = narrowed(o, here, o->tail[j]);
        if (here.hi - here.lo > widest) widest = here.hi - here.lo, found.at[found.count++] = here;
    }
    return found;
}
static long offer(const Grow *o, const Contexts *c, long column, long depth, double reach, Offer *out) {
    long tokens[MOST_CONTEXTS * MOST_SAMPLES], count = 0, offered = 0;
    double chance[MOST_CONTEXTS * MOST_SAMPLES], left = 1;
    if (depth >= o->deepest) return 0;
    for (long i = 0; i < c->count; i++) {
        Interval f = c->at[i];
        long total = f.hi - f.lo, looked = MIN(total, o->samples);
        double share = left * total / (total + o->doubt);
        for (long s = 0; s < looked; s++) {
            long token = follower(o, f.lo + (2 * s + 1) * total / (2 * looked), f.known), t = 0;
            if (token < 0) continue;
            while (t < count && tokens[t] != token) t++;
            if (t == count) tokens[count] = token, chance[count++] = 0;
            chance[t] += share / looked;
        }
        left -= share;
        if (left < o->enough) break;
    }
    for (; offered < MIN(count, o->branch); offered++) {
        long best = 0;
        for (long t = 1; t < count; t++) if (chance[t] > chance[best]) best = t;
        out[offered] = (Offer){reach * chance[best], tokens[best], column, depth + 1};
        chance[best] = -1;
    }
    return offered;
}
void grow(const Grow *o) {
    Offer *offers = malloc((o->nodes + 1) * o->branch * sizeof(Offer));
    Contexts *of = malloc((o->nodes + 1) * sizeof(Contexts));
    of[0] = contexts(o);
    long columns = 0, offered = offer(o, of, 0, 0, 1, offers);
    while (columns < o->nodes) {
        Offer *best = offers;
        for (Offer *x = offers; x < offers + offered; x++) if (x->reach > best->reach) best = x;
        if (!offered || best->reach <= 0) break;
        Offer taken = *best;
        best->reach = 0;
        o->tokens[columns] = taken.token, o->parents[columns] = taken.column, o->reach[columns] = taken.reach;
        Contexts *own = of + ++columns, *above = of + taken.column;
        own->count = 0;
        for (long i = 0; i < above->count; i++) {
            Interval f = narrowed(o, above->at[i], taken.token);
            if (f.lo < f.hi) own->at[own->count++] = f;
        }
        offered += offer(o, own, columns, taken.depth, taken.reach, offers + offered);
    }
    *o->count = columns;
    free(offers), free(of);
}
