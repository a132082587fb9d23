// Part of cpu.c: products of MXFP4 experts in whole numbers, which are exact however they are ordered. Twice an E2M1 value is one, up to 12. Of each
// 32 values of x the largest says how long a step is: 2^23 of them cover it, as many as a float32 tells apart, and a number of steps is three digits of
// base 256. Weights lie interleaved, of 16 rows four values each side by side, so that sums over 32 values need no sum across lanes.
enum { WHOLE_BLOCK = 16 * 17 };  // bytes of 32 values of 16 rows: for each four values a line of low nibbles and, 16 values later, of high ones; scales
typedef struct { int8_t digits[3][32]; int32_t less[3]; float step; } Steps;  // of 32 values of x, the last digits first; less: what weights 12 too large add

typedef struct { bytes w, s; uint8_t *y; int64_t kind, N, K, threads; } Interleave;  // N: rows of all experts
static void interleave_rows(const void *with, long item) {
    const Interleave *o = with;
    uint8_t *y = o->y + item * WHOLE_BLOCK * (o->K / 32);
    for (long k = 0; k < o->K; k += 32, y += WHOLE_BLOCK) for (int n = 0; n < 16; n++) {
        long row = item * 16 + n;
        bytes w = o->w + row * at(o->kind, o->K) + at(o->kind, k);
        uint8_t v[32];
        for (int i = 0; i < 16; i++) {
            if (o->kind == MXFP4) v[2 * i] = w[i] & 15, v[2 * i + 1] = w[i] >> 4;
            else v[i] = w[1 + i] & 15, v[16 + i] = w[1 + i] >> 4;
        }
        for (int i = 0; i < 16; i++) y[i / 4 * 64 + n * 4 + i % 4] = v[i] | v[16 + i] << 4;
        y[256 + n] = o->kind == MXFP4 ? o->s[(row * o->K + k) >> 5] : w[0];
    }
}
void interleave(const Interleave *o) { each_row(o->N / 16, interleave_rows, o, team((double)o->N * o->K, 65536, o->threads)); }

#if W == 16 && defined __AVX512VNNI__
int has_whole = 1;
static void steps_of_32(floats x, Steps *to) {
    const __m512i middle = _mm512_set1_epi32(0x808080), digit = _mm512_set1_epi32(255);
    __m512i a = _mm512_slli_epi32(_mm512_loadu_si512(x), 1), b = _mm512_slli_epi32(_mm512_loadu_si512(x + 16), 1);
    uint32_t top = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b)) >> 1;  // without signs; a NaN is the largest
    uint32_t exponent = MAX((top + 0x10101) >> 23, 24);                  // the largest becomes less than 2^23, and its first digit less than 128
    union { uint32_t bits; float f; } up = {(276 - exponent) << 23}, step = {(exponent - 23) << 23};
    to->step = top < 0x7f800000 ? step.f : NAN;
    int32_t less[3] = {0};
    UNROLL for (int i = 0; i < 2; i++) {  // 128 more in every digit, so that none is negative
        __m512i v = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)(load(x + 16 * i) * up.f)), middle);
        UNROLL for (int d = 0; d < 3; d++) {
            __m512i q = _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(v, 8 * d), digit), _mm512_set1_epi32(128));
            _mm_storeu_si128((__m128i *)(to->digits[d] + 16 * i), _mm512_cvtepi32_epi8(q));
            less[d] -= 12 * _mm512_reduce_add_epi32(q);
        }
    }
    memcpy(to->less, less, sizeof less);
}
enum { TOGETHER = 6 };  // rows that meet what is unpacked once; of more, four and what is left
INLINE void whole_tile(const int R, const floats *x, bytes w, long K, vf *sums) {  // of 16 weight rows
    const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)), low = _mm512_set1_epi8(15);
    UNROLL for (int r = 0; r < R; r++) sums[r] = (vf){0};
    for (long i = 0; i < K / 32; i++, w += WHOLE_BLOCK) {
        const Steps *at[TOGETHER];
        __m512i a[TOGETHER][3];
        UNROLL for (int r = 0; r < R; r++) at[r] = (const Steps *)x[r] + i;
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int d = 0; d < 3; d++) a[r][d] = _mm512_set1_epi32(at[r]->less[d]);
        UNROLL for (int j = 0; j < 16; j += 4) {
            __m512i v = _mm512_loadu_si512(w + 16 * j), halves[2];
            __builtin_prefetch(w + 16 * j + 4 * WHOLE_BLOCK, 0, 2);
            halves[0] = _mm512_shuffle_epi8(twice, _mm512_and_si512(v, low));
            halves[1] = _mm512_shuffle_epi8(twice, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
            UNROLL for (int h = 0; h < 2; h++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int d = 0; d < 3; d++) {
                int32_t four;
                memcpy(&four, at[r]->digits[d] + 16 * h + j, sizeof four);
                a[r][d] = _mm512_dpbusd_epi32(a[r][d], halves[h], _mm512_set1_epi32(four));
            }
        }
        __m512i scale = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + 256))), 23);
        scale = _mm512_max_epu32(scale, _mm512_set1_epi32(1 << 22));  // 2^-127
        UNROLL for (int r = 0; r < R; r++) {
            __m512 rest = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(a[r][1], 8), a[r][0]));
            __m512 all_steps = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r][2]), _mm512_set1_ps(65536), rest);
            sums[r] = (vf)_mm512_fmadd_ps(all_steps, _mm512_mul_ps((__m512)scale, _mm512_set1_ps(at[r]->step)), (__m512)sums[r]);
        }
    }
}
static void whole_dots(const floats *x, float *const *y, int rows, const Rows *m, long n, int cols, any bias, long bias_kind) {
    for (int c = 0; c < cols; c += 16) {
        bytes w = m->w + (n + c) * at(WHOLE, m->k);
        vf b = bias ? fetch(bias, bias_kind, n + c, 16) : (vf){0}, sums[TOGETHER];
        for (int r = 0, some; r < rows; r += some) {
            switch (some = rows - r > TOGETHER ? ROWS : rows - r) {
                case 1: whole_tile(1, x + r, w, m->k, sums); break;
                case 2: whole_tile(2, x + r, w, m->k, sums); break;
                case 3: whole_tile(3, x + r, w, m->k, sums); break;
                case 4: whole_tile(4, x + r, w, m->k, sums); break;
                case 5: whole_tile(5, x + r, w, m->k, sums); break;
                default: whole_tile(6, x + r, w, m->k, sums);
            }
            for (int i = 0; i < some; i++) store(y[r + i] + c, sums[i] + b);
        }
    }
}
#else
int has_whole = 0;
static void steps_of_32(floats x, Steps *to) {}
static void whole_dots(const floats *x, float *const *y, int rows, const Rows *m, long n, int cols, any bias, long bias_kind) {}
#endif
