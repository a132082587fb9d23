// Part of cpu.c: the threads. A job is a number of items. The thread that calls takes items until there are none, and so does every thread
// of the pool that comes in time: nobody waits for one that another process keeps from its core, only for one that has taken an item.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <signal.h>
#include <time.h>

typedef void (*Item)(const void *with, long item, long me);  // me: 0 the caller, 1.. the others; each scratch memory's own
typedef struct { long next, end, pad[6]; } Share;            // a thread's own items, so that small weights stay in its cache; then it steals
enum { SPINS = 4000, LINGER = 24000, PATIENCE = 200000, SHORTEST = 5000000, LONGEST = 100000000 };  // turns of a loop, LINGER's twice as long, about a millisecond; nanoseconds
enum { SLICE = 2000000, MOST_CREDIT = 20000000 };  // nanoseconds: how long who loses a core is without it; of a pool that was not kept waiting
// Of the gate, from the right: threads inside; how many may enter; whether it is open; the number of the job.
enum { ENTERED = 0xff, ROOM = 8, OPEN = 1 << 16, JOB = 17 };

static struct {
    pthread_mutex_t owner, sleep;  // owner: the caller's, while its job runs
    pthread_cond_t wake;
    atomic_long gate, left, asleep;  // left: threads that have left again
    Item item;
    const void *with;
    Share shares[THREADS];
    long threads, members;                 // of the job; of the pool
    atomic_long alone_until, penalty, stalled, credit, counted;  // nanoseconds; whoever runs a program may step back
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined __x86_64__ || defined __i386__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}
static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000l + t.tv_nsec;
}
static void work(long me) {
    for (long i = 0; i < pool.threads; i++) {
        Share *s = pool.shares + (me + i) % pool.threads;
        while (__atomic_load_n(&s->next, __ATOMIC_RELAXED) < s->end) {
            long item = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
            if (item < s->end) pool.item(pool.with, item, me);
        }
    }
}
static void *member(void *unused) {
    for (long job = 0, turns = 0;;) {
        long gate = atomic_load(&pool.gate);
        if (gate >> JOB != job && gate & OPEN && (gate & ENTERED) < (gate >> ROOM & ENTERED)) {
            if (!atomic_compare_exchange_strong(&pool.gate, &gate, gate + 1)) continue;
            work(1 + (gate & ENTERED));
            job = gate >> JOB, turns = 0;
            atomic_fetch_add(&pool.left, 1);
        } else if (++turns < SPINS || (turns < LINGER && now() - pool.stalled > LONGEST)) relax();  // to be woken takes as long as a short step
        else {
            pthread_mutex_lock(&pool.sleep);
            atomic_fetch_add(&pool.asleep, 1);
            while (atomic_load(&pool.gate) >> JOB == gate >> JOB) pthread_cond_wait(&pool.wake, &pool.sleep);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.sleep);
            turns = 0;
        }
    }
    return unused;
}
static void forked(void) {  // a child has none of its parent's threads
    pthread_mutex_init(&pool.owner, 0), pthread_mutex_init(&pool.sleep, 0), pthread_cond_init(&pool.wake, 0);
    pool.gate = pool.left = pool.asleep = pool.members = 0;
}
static void recruit(long members) {
    static int once;
    if (!once++) pthread_atfork(0, 0, forked);
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the program's own threads
    for (pthread_t thread; pool.members < members && !pthread_create(&thread, 0, member, 0); pool.members++) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}
// A thread was kept from its core for so long. Where that takes a third of the time, other processes want the cores: for a while the caller
// works alone, longer each time. A server's own threads, which need a core for a moment in each round, take less.
static void step_back(long time, long lost) {
    long credit = MIN(pool.credit + MAX(0, time - pool.counted), MOST_CREDIT) - 2 * lost;
    pool.credit = MAX(credit, 0), pool.counted = time;
    if (credit >= 0) return;
    long last = pool.penalty, penalty = time - pool.stalled < 4 * last ? MIN(2 * last, LONGEST) : SHORTEST;
    pool.penalty = penalty, pool.stalled = time, pool.alone_until = pool.counted = time + penalty;
}
static void wait_for(long inside, long began) {  // one that takes longer than the caller worked has lost its core
    for (int turns = 0; turns < SPINS; turns++) {
        if (atomic_load(&pool.left) == inside) return;
        relax();
    }
    long waits = now();
    while (atomic_load(&pool.left) != inside) sched_yield();
    long lost = now() - waits;
    if (lost > waits - began + PATIENCE) step_back(waits + lost, lost);
}
static long cores_lost(void) {  // how often the calling thread has been taken from its core
#ifdef RUSAGE_THREAD
    struct rusage use;
    return getrusage(RUSAGE_THREAD, &use) ? 0 : use.ru_nivcsw;
#else
    return 0;
#endif
}
static void each_item(long items, Item item, const void *with, long threads) {
    long began = 0, alone = (threads = MIN(threads, items)) <= 1;
    if (!alone) began = now(), alone = began < pool.alone_until || pthread_mutex_trylock(&pool.owner);
    if (alone) {  // or while another thread of the program has the pool
        for (long i = 0; i < items; i++) item(with, i, 0);
        return;
    }
    if (pool.members < threads - 1) recruit(threads - 1);
    for (long i = 0; i < threads; i++) pool.shares[i] = (Share){items * i / threads, items * (i + 1) / threads, {0}};
    pool.item = item, pool.with = with, pool.threads = threads;
    atomic_store(&pool.left, 0);
    atomic_store(&pool.gate, ((pool.gate >> JOB) + 1) << JOB | OPEN | (threads - 1) << ROOM);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    work(0);
    wait_for(atomic_fetch_and(&pool.gate, ~(long)OPEN) & ENTERED, began);
    pthread_mutex_unlock(&pool.owner);
}

typedef void (*Row)(const void *with, long m);
typedef struct { Row row; const void *with; long M, some; } Some;
static void some_rows(const void *with, long item, long me) {
    const Some *o = with;
    for (long m = item * o->some; m < MIN(o->M, (item + 1) * o->some); m++) o->row(o->with, m);
}
static void each_row(long M, Row row, const void *with, long threads) {
    Some o = {row, with, M, threads > 1 ? MAX(1, M / (8 * threads)) : MAX(1, M)};
    each_item((M + o.some - 1) / o.some, some_rows, &o, threads);
}
