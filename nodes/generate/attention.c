/* Attention of one token per row over the cache of the row's slot: `attend` of attention.py, for a CPU.

   Compiled at run time, with K (width of a head), N (query heads of a key-value head), LANES (floats of a vector, a
   power of 2 up to 16) and, if the cache is in bfloat16, BF16. LANES divides K; in bfloat16 2 * LANES does. One thread
   computes a row, its positions in order, so its bits depend only on its own numbers. */

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

/* The index in the head of lane i of vector p. */
static inline int place(int p, int i) { return (p & ~1) * LANES + 2 * i + (p & 1); }
#else
static inline void load(vector to[PARTS], const stored *from) {
    /* One by one: for all at once compilers generate a call, and a copy in memory. */
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) memcpy(&to[p], from + p * LANES, sizeof to[p]);
}

static inline int place(int p, int i) { return p * LANES + i; }
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

/* Prefetch `count` positions of a head: each slot has a memory region of its own, which processors do not prefetch by
   themselves (Zen 5: half the time). Into the second-level cache, since the first has no room for them. */
static inline void ask_for(const stored *from, int64_t count) {
    for (int64_t i = 0; i < count * K; i += 64 / (int64_t)sizeof(stored)) __builtin_prefetch(from + i, 0, 2);
}

/* Query heads whose results are in registers at the same time, and positions for which they stay there. With more
   heads, results would be in memory (Zen 4, 7 heads of 128 in bfloat16: 2.6 times as long). With the 16 registers of
   AVX2 reading values again is no better. */
#define TOGETHER (WIDTH < 16 || N * PARTS <= 2 * WIDTH ? N : PARTS <= WIDTH ? WIDTH / PARTS : 1)
#define TURN 16

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
   and `v_row` are the strides of rows of q, k and v; a slot has G heads of C positions. Returns 1 if there is not
   enough memory, otherwise 0. */
int attend(const stored *q, const stored *k, const stored *v, stored *keys, stored *values, const int64_t *slots,
           const int64_t *positions, stored *out, int64_t rows, int64_t G, int64_t C, int64_t q_row, int64_t k_row,
           int64_t v_row, int64_t window, float scale, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        /* All rows write first: a row of a prompt attends to the rows before it. */
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t g = 0; g < G && positions[row] >= 0; g++) {
                int64_t place = ((slots[row] * G + g) * C + positions[row]) * K;
                memcpy(keys + place, k + row * k_row + g * K, K * sizeof(stored));
                memcpy(values + place, v + row * v_row + g * K, K * sizeof(stored));
            }
        int64_t stride = (C + LANES - 1) / LANES * LANES;
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
            int64_t unseen = 0 < window && window < length ? length - window : 0;
            int64_t begin = ((slots[row] * G + g) * C + unseen) * K;
            const stored *key = keys + begin, *value = values + begin;
            length -= unseen;
            factor query[N][FACTORS];
            vector total[N][PARTS];
            for (int n = 0; n < N; n++) load_query(query[n], q + row * q_row + (g * N + n) * K);
            int64_t whole = length / LANES * LANES;
            ask_for(value + whole * K, length - whole);
            for (int64_t c = 0; c < whole; c += LANES) {
                ask_for(value + c * K, LANES);
                for (int n = 0; n < N; n++) score(weights + n * stride + c, query[n], key + c * K, LANES, scale);
            }
            for (int n = 0; n < N && whole < length; n++)
                score(weights + n * stride + whole, query[n], key + whole * K, length - whole, scale);
            float inverse[N];
            for (int n = 0; n < N; n++) {
                float *w = weights + n * stride, most = -INFINITY, mass = 0;
#pragma omp simd reduction(max : most)
                for (int64_t i = 0; i < length; i++) most = w[i] > most ? w[i] : most;
#pragma omp simd reduction(+ : mass)
                for (int64_t i = 0; i < length; i++) mass += w[i] = exponential(w[i] - most);
                inverse[n] = 1 / mass;
            }
            memset(total, 0, sizeof total);
            int64_t after = x + 1 < rows * G ? x + 1 : x;
            const stored *next = keys + (slots[after / G] * G + after % G) * C * K;
            for (int64_t c = 0; c < length; c += TURN) {
                int64_t count = length - c < TURN ? length - c : TURN;
                for (int n = 0; n < N; n += TOGETHER) {
                    const float *own = weights + n * stride + c;
                    const stored *ask = n ? NULL : next + c * K;
                    if (N - n >= TOGETHER)
                        add(TOGETHER, total + n, own, stride, value + c * K, count, ask);
                    else
                        add(N % TOGETHER, total + n, own, stride, value + c * K, count, ask);
                }
            }
            for (int n = 0; n < N; n++)
                for (int p = 0; p < PARTS; p++)
                    for (int i = 0; i < LANES; i++) to[n * K + place(p, i)] = rounded(total[n][p][i] * inverse[n]);
        }
        free(weights);
    }
    return failed;
}
