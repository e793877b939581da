/* Attention of one token per row over the cache of the row's slot: `attend` of attention.py, for a CPU.

   Compiled at run time, with K (width of a head), N (query heads of a key-value head), PAGE (positions of a page, a
   multiple of 16), LANES (floats of a vector, a power of 2 up to 16) and, if the cache is in bfloat16, BF16. LANES
   divides K; in bfloat16 2 * LANES does. One thread computes a row, its positions in order, so its bits depend only on
   its own numbers. */

#include <stdlib.h>

#include "numbers.h"

#if LANES > WIDTH
#undef LANES
#define LANES WIDTH
#endif
#define PARTS (K / LANES)

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_vector __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint32_t bits_vector __attribute__((vector_size(4 * LANES)));

/* The numbers of a head in vectors: the first two vectors have the even and the odd ones of its first 2 * LANES
   numbers, and so on. Two adjacent numbers are the halves of a 32-bit lane; one operation makes a float of each. */
static inline void load(vector to[PARTS], const stored *from) {
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p += 2) {
        bits_vector pairs;
        memcpy(&pairs, from + p * LANES, sizeof pairs);
        to[p] = (vector)(pairs << 16), to[p + 1] = (vector)(pairs & 0xffff0000);
    }
}

/* The bits of a float that is rounded to bfloat16; NaN stays NaN. */
static inline bits_vector rounded_bits(vector x) {
    bits_vector bits = (bits_vector)x, none = (bits_vector)(x != x);
    return (bits + 0x7fff + (bits >> 16 & 1) & 0xffff0000 & ~none) | (none & 0x7fc00000);
}

/* Store a head's numbers, in the order of `load`, times `scale`. */
static inline void store(stored *to, const vector from[PARTS], float scale) {
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p += 2) {
        bits_vector pairs = rounded_bits(from[p] * scale) >> 16 | rounded_bits(from[p + 1] * scale);
        memcpy(to + p * LANES, &pairs, sizeof pairs);
    }
}
#else
static inline void load(vector to[PARTS], const stored *from) {
    /* One by one: for all at once compilers generate a call, and a copy in memory. */
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) memcpy(&to[p], from + p * LANES, sizeof to[p]);
}

static inline void store(stored *to, const vector from[PARTS], float scale) {
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) {
        vector found = from[p] * scale;
        memcpy(to + p * LANES, &found, sizeof found);
    }
}
#endif

/* The lanes to pick from two vectors, whose lanes together are 0 to 2 * LANES - 1, in blocks of 2 * half lanes: the
   first halves of block 0 of both, then of block 1 of both, and so on. */
#define FROM(half, i) ((i) / (half) / 2 * 2 * (half) + (i) % (half) + (i) / (half) % 2 * LANES)
#define ROW(h) {FROM(h, 0), FROM(h, 1), FROM(h, 2), FROM(h, 3), FROM(h, 4), FROM(h, 5), FROM(h, 6), FROM(h, 7), \
                FROM(h, 8), FROM(h, 9), FROM(h, 10), FROM(h, 11), FROM(h, 12), FROM(h, 13), FROM(h, 14), FROM(h, 15)}
static const int32_t HALVES[4][16] = {ROW(1), ROW(2), ROW(4), ROW(8)};

static inline vector picked(vector a, vector b, lanes_vector from) {
#ifdef __clang__
    vector found;
    for (int i = 0; i < LANES; i++) found[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return found;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* Lane i of the result is the sum of the lanes of `parts[i]`. Each round folds the blocks of two vectors into one: it
   leaves half as many vectors, with twice as many blocks of half as many lanes. */
static inline __attribute__((always_inline)) void fold(vector parts[LANES], int half, int row) {
    lanes_vector first;
    memcpy(&first, HALVES[row], sizeof first);
#pragma GCC unroll 8
    for (int i = 0; i < half; i++)
        parts[i] = picked(parts[i], parts[i + half], first) + picked(parts[i], parts[i + half], first + half);
}

static inline __attribute__((always_inline)) vector sums(vector parts[LANES]) {
    if (LANES > 8) fold(parts, 8, 3);
    if (LANES > 4) fold(parts, 4, 2);
    if (LANES > 2) fold(parts, 2, 1);
    if (LANES > 1) fold(parts, 1, 0);
    return parts[0];
}

#if defined(BF16) && defined(__AVX512BF16__) && LANES == 16
/* A query is held in `FACTORS` registers: here of pairs of bfloat16, whose products the processor sums in float32, and
   otherwise of floats. The sum over the lanes of `products` is the product of query and key. */
#include <immintrin.h>
typedef __m512bh factor;
#define FACTORS (PARTS / 2)

static inline __attribute__((always_inline)) vector products(const factor *query, const stored *key) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int p = 0; p < FACTORS; p++) {
        factor each;
        memcpy(&each, key + 2 * p * LANES, sizeof each);
        sum = _mm512_dpbf16_ps(sum, query[p], each);
    }
    return (vector)sum;
}

static inline void load_query(factor to[FACTORS], const stored *from) {
    memcpy(to, from, sizeof(factor) * FACTORS);
}
#else
typedef vector factor;
#define FACTORS PARTS

static inline __attribute__((always_inline)) vector products(const factor *query, const stored *key) {
    vector each[PARTS];
    load(each, key);
    vector sum = query[0] * each[0];
#pragma GCC unroll 16
    for (int p = 1; p < PARTS; p++) sum += query[p] * each[p];
    return sum;
}

static inline void load_query(factor to[FACTORS], const stored *from) { load(to, from); }
#endif

/* Scores of LANES positions, whose keys begin at `key`. If there are only `count`, the last one is used for the others,
   whose scores are not read. */
static inline __attribute__((always_inline)) void score(float *to, const factor *query, const stored *key, int64_t count,
                                                        float scale) {
    vector parts[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) parts[i] = products(query, key + (i < count ? i : count - 1) * K);
    vector found = sums(parts) * scale;
    memcpy(to, &found, sizeof found);
}

/* Prefetch `count` positions of a head: pages are apart in memory, and processors prefetch only what is adjacent
   (Zen 5: half the time). Into the second-level cache, since the first has no room for them. */
static inline void ask_for(const stored *from, int64_t count) {
    for (int64_t i = 0; i < count * K; i += 64 / (int64_t)sizeof(stored)) __builtin_prefetch(from + i, 0, 2);
}

/* Turn `count` scores, a multiple of 16, into weights that are not divided by their sum. Returns 1 / sum. */
static inline float exponentiate(float *w, int64_t count) {
    float lanes[16], most = -INFINITY;
    memcpy(lanes, w, sizeof lanes);
    for (int64_t c = 16; c < count; c += 16)
        for (int i = 0; i < 16; i++) lanes[i] = w[c + i] > lanes[i] ? w[c + i] : lanes[i];
    for (int i = 0; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    memset(lanes, 0, sizeof lanes);
    for (int64_t c = 0; c < count; c += 16)
        for (int i = 0; i < 16; i++) lanes[i] += w[c + i] = exponential(w[c + i] - most);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return 1 / lanes[0];
}

/* Query heads whose results are in registers at the same time, for the positions of a page. With more heads, results
   would be in memory (Zen 4, 7 heads of 128 in bfloat16: 2.6 times as long). With the 16 registers of AVX2 reading
   values again is no better. */
#define TOGETHER (WIDTH < 16 || N * PARTS <= 2 * WIDTH ? N : PARTS <= WIDTH ? WIDTH / PARTS : 1)

/* Add the weighted values of `count` positions to the results of `many` heads; with each, prefetch a position from
   `ask` on. */
static inline __attribute__((always_inline)) void add(int many, vector total[][PARTS], const float *weights,
                                                      int64_t stride, const stored *value, int64_t count,
                                                      const stored *ask) {
    vector sums[TOGETHER][PARTS], each[PARTS];
    memcpy(sums, total, sizeof(vector) * many * PARTS);
    for (int64_t i = 0; i < count; i++) {
        if (ask) ask_for(ask + i * K, 1);
        load(each, value + i * K);
#pragma GCC unroll 16
        for (int n = 0; n < many; n++)
#pragma GCC unroll 16
            for (int p = 0; p < PARTS; p++) sums[n][p] += weights[n * stride + i] * each[p];
    }
    memcpy(total, sums, sizeof(vector) * many * PARTS);
}

/* Row r with `positions[r]` >= 0 writes its key and value at this position of slot `slots[r]` and attends to all
   positions up to it, or only to the last `window` unless that is 0; the result of other rows is 0. `q_row`, `k_row`
   and `v_row` are the strides of rows of q, k and v. The cache is [slots, pages, G, PAGE, K]: what a row reads is
   adjacent, however many pages its slot has (Granite Rapids, 25 of 2,064 positions: 0.6 of the time).
   Returns 1 if there is not enough memory, otherwise 0. */
int attend(const stored *q, const stored *k, const stored *v, stored *keys, stored *values, const int64_t *slots,
           const int64_t *positions, stored *out, int64_t rows, int64_t G, int64_t pages, int64_t q_row, int64_t k_row,
           int64_t v_row, int64_t window, float scale, int threads) {
    int64_t head = PAGE * K, page = G * head, slot = pages * page, stride = pages * PAGE;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        /* All rows write first: a row of a prompt attends to the rows before it. */
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t g = 0; g < G && positions[row] >= 0; g++) {
                int64_t at = positions[row], place = slots[row] * slot + at / PAGE * page + g * head + at % PAGE * K;
                memcpy(keys + place, k + row * k_row + g * K, K * sizeof(stored));
                memcpy(values + place, v + row * v_row + g * K, K * sizeof(stored));
            }
        float *weights = malloc(sizeof(float) * N * stride);
        if (!weights) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t x = 0; x < rows * G; x++) {
            int64_t row = x / G, g = x % G, length = positions[row] + 1;
            stored *to = out + x * N * K;
            if (length <= 0 || !weights) {
                memset(to, 0, sizeof(stored) * N * K);
                continue;
            }
            /* From the page of the first position that it sees; positions count from there. */
            int64_t unseen = 0 < window && window < length ? length - window : 0, first = unseen / PAGE;
            int64_t begin = slots[row] * slot + first * page + g * head;
            const stored *key = keys + begin, *value = values + begin;
            length -= first * PAGE, unseen -= first * PAGE;
            int64_t own = (length + PAGE - 1) / PAGE;
            factor query[N][FACTORS];
            vector total[N][PARTS];
            for (int n = 0; n < N; n++) load_query(query[n], q + row * q_row + (g * N + n) * K);
            for (int64_t p = 0; p < own; p++) {
                int64_t count = length - p * PAGE < PAGE ? length - p * PAGE : PAGE;
                ask_for(value + p * page, count);
                for (int n = 0; n < N; n++) {
                    float *w = weights + n * stride + p * PAGE;
                    const stored *from = key + p * page;
                    if (count == PAGE) {
                        for (int i = 0; i < PAGE; i += LANES) score(w + i, query[n], from + i * K, LANES, scale);
                        continue;
                    }
                    for (int64_t i = 0; i < count; i += LANES) score(w + i, query[n], from + i * K, count - i, scale);
                    for (int64_t i = count; i < PAGE; i++) w[i] = -INFINITY;
                }
            }
            float inverse[N];
            for (int n = 0; n < N; n++) {
                for (int64_t i = 0; i < unseen; i++) weights[n * stride + i] = -INFINITY;
                inverse[n] = exponentiate(weights + n * stride, own * PAGE);
            }
            memset(total, 0, sizeof total);
            int64_t after = x + 1 < rows * G ? x + 1 : x;
            const stored *next = keys + slots[after / G] * slot + first * page + after % G * head;
            for (int64_t p = 0; p < own; p++) {
                int64_t from = p ? 0 : unseen, end = length - p * PAGE < PAGE ? length - p * PAGE : PAGE;
                for (int n = 0; n < N; n += TOGETHER) {
                    const float *w = weights + n * stride + p * PAGE + from;
                    const stored *part = value + p * page + from * K, *ask = n ? NULL : next + p * page + from * K;
                    if (N - n >= TOGETHER)
                        add(TOGETHER, total + n, w, stride, part, end - from, ask);
                    else
                        add(N % TOGETHER, total + n, w, stride, part, end - from, ask);
                }
            }
            for (int n = 0; n < N; n++) store(to + n * K, total[n], inverse[n]);
        }
        free(weights);
    }
    return failed;
}
