// Part of cpu.c: several kernels in one call, so that what calls them is paid for once.
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
    }
    if ((lost = cores_lost() - before) > 0 && now() > pool.alone_until) step_back(now(), lost * SLICE);
}
