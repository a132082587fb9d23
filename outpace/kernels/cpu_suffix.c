// Part of cpu.c: what followed the last tokens of a text where they occurred in it before and in another one, whose suffixes are sorted, as a tree.
// ops/suffixes.py says the same in Python, and what the numbers are.

enum { MOST_CONTEXTS = 8, MOST_SAMPLES = 64, MOST_RECENT = 16, MOST_BRANCH = 16 };
// suffixes lo .. hi - 1 that begin with the same `known` tokens; or, `own`, lo = 0 and hi of the places `at` in the text itself
typedef struct { long own, lo, hi, known; int32_t at[MOST_RECENT]; } Context;
typedef struct { Context at[MOST_CONTEXTS]; long count; } Contexts;
typedef struct { double reach; long token, column, depth; } Offer;
typedef struct {
    const int32_t *text, *order, *said; const int64_t *lengths;
    int64_t n, end, contexts, nodes, samples, recent, branch, deepest; double doubt, own_doubt, enough;
    int64_t *tokens, *parents; double *reach; int64_t *count;
} Grow;

INLINE long follower(const Grow *o, long at, long known) {
    long place = o->order[at] + known;
    return place < o->n ? o->text[place] : -1;
}
INLINE long own_follower(const Grow *o, long place) { return place < o->end ? o->said[place] : -1; }
static Context narrowed(const Grow *o, const Context *f, long token) {
    if (f->own) {
        Context found = {.own = 1};
        for (long i = 0; i < f->hi; i++) if (own_follower(o, f->at[i]) == token) found.at[found.hi++] = f->at[i] + 1;
        return found;
    }
    long lo = f->lo, hi = f->hi;
    while (lo < hi) { long middle = (lo + hi) / 2; if (follower(o, middle, f->known) < token) lo = middle + 1; else hi = middle; }
    long first = lo;
    for (hi = f->hi; lo < hi; ) { long middle = (lo + hi) / 2; if (follower(o, middle, f->known) <= token) lo = middle + 1; else hi = middle; }
    return (Context){.lo = first, .hi = lo, .known = f->known + 1};
}
static Contexts contexts(const Grow *o) {
    Contexts found = {.count = 0};
    Context own[MOST_CONTEXTS];
    long widest = 0, widest_own = 0, longest = o->contexts ? o->lengths[0] : 0, seen[MOST_CONTEXTS] = {0};
    for (long i = 0; i < o->contexts; i++) own[i] = (Context){.own = 1};
    int32_t last = o->end ? o->said[o->end - 1] : -1;
    for (long p = o->end - 1; p > 0; p--) {
        if (o->said[p - 1] != last) continue;
        long same = 1;
        while (same < longest && same < p && o->said[p - 1 - same] == o->said[o->end - 1 - same]) same++;
        for (long i = 0; i < o->contexts; i++) {
            if (same < o->lengths[i]) continue;
            if (seen[i]++ < o->recent) own[i].at[own[i].hi++] = p;
        }
    }
    for (long i = 0; i < o->contexts; i++) {
        if (o->lengths[i] > o->end) continue;
        if (seen[i] > widest_own) widest_own = seen[i], found.at[found.count++] = own[i];
        Context here = {.hi = o->n};
        for (long j = o->end - o->lengths[i]; j < o->end && here.lo < here.hi; j++) here = narrowed(o, &here, o->said[j]);
        if (here.hi - here.lo > widest) widest = here.hi - here.lo, found.at[found.count++] = here;
    }
    return found;
}
static long offer(const Grow *o, const Contexts *c, long column, long depth, double reach, Offer *out) {
    long tokens[MOST_CONTEXTS * MOST_SAMPLES], count = 0, offered = 0;
    double chance[MOST_CONTEXTS * MOST_SAMPLES], left = 1;
    if (depth >= o->deepest) return 0;
    for (long i = 0; i < c->count; i++) {
        const Context *f = c->at + i;
        long total = f->hi - f->lo, looked = f->own ? total : MIN(total, o->samples);
        double share = left * total / (total + (f->own ? o->own_doubt : o->doubt));
        for (long s = 0; s < looked; s++) {
            long token = f->own ? own_follower(o, f->at[s]) : follower(o, f->lo + (2 * s + 1) * total / (2 * looked), f->known), t = 0;
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
            Context f = narrowed(o, above->at + i, taken.token);
            if (f.lo < f.hi) own->at[own->count++] = f;
        }
        offered += offer(o, own, columns, taken.depth, taken.reach, offers + offered);
    }
    *o->count = columns;
    free(offers), free(of);
}
