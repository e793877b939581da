/* Attention of one token per row over the cache of the row's slot: `attend` of attention.py, for a CPU.

   Compiled where it runs, with K (width of a head), N (query heads of a key-value head), LANES (floats of a vector, a
   power of 2 up to 16) and, if the cache is in bfloat16, BF16. LANES divides K, and in bfloat16 2 * LANES does. A row is
   computed by one thread, its positions in order, so its bits depend on nothing but its own numbers. */

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

/* The numbers of a head in vectors, of which the first two have the even and the odd ones of its first 2 * LANES, and so
   on: two numbers that lie side by side are the halves of a lane, and either is a float by one operation. */
static inline void load(vector to[PARTS], const stored *from) {
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p += 2) {
        bits_vector pairs;
        memcpy(&pairs, from + p * LANES, sizeof pairs);
        to[p] = (vector)(pairs << 16), to[p + 1] = (vector)(pairs & 0xffff0000);
    }
}

/* Where lane i of vector p lies. */
static inline int place(int p, int i) { return (p & ~1) * LANES + 2 * i + (p & 1); }
#else
static inline void load(vector to[PARTS], const stored *from) {
    /* One by one: of all at once compilers make a call, and a copy in memory. */
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; p++) memcpy(&to[p], from + p * LANES, sizeof to[p]);
}

static inline int place(int p, int i) { return p * LANES + i; }
#endif

/* Of two vectors, side by side as lanes 0 to 2 * LANES - 1, each in blocks of 2 * half lanes: the first halves of blocks
   0 of both, then of blocks 1, and so on. */
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

/* Lane i of the result is the sum of the lanes of `parts[i]`. Each round folds the blocks of two vectors into one: there
   are half as many vectors, with twice as many blocks of half as many lanes. */
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
/* A query is multiplied in `FACTORS` registers: here of pairs of bfloat16, which the processor adds up in float32, and
   elsewhere of floats. The lanes of what `products` returns sum up to a query by a key. */
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

/* Scores of LANES positions, whose keys begin at `key`. Where there are but `count`, the last one stands in for others,
   whose scores nobody reads. */
static inline __attribute__((always_inline)) void score(float *to, const factor *query, const stored *key, int64_t count,
                                                        float scale) {
    vector parts[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) parts[i] = products(query, key + (i < count ? i : count - 1) * K);
    vector found = sums(parts) * scale;
    memcpy(to, &found, sizeof found);
}

/* Ask for `count` positions of a head before they are needed: each slot's lie in a place of their own, to which no
   processor looks ahead by itself (Zen 5: half the time). Into the second cache, for the first has no room for them. */
static inline void ask_for(const stored *from, int64_t count) {
    for (int64_t i = 0; i < count * K; i += 64 / (int64_t)sizeof(stored)) __builtin_prefetch(from + i, 0, 2);
}

/* Query heads whose results are in registers at once, and positions for which they are: of more heads results lie in
   memory (Zen 4, 7 heads of 128 in bfloat16: 2.6 times as long). With the 16 registers of AVX2 it is no better to read
   values again. */
#define TOGETHER (WIDTH < 16 || N * PARTS <= 2 * WIDTH ? N : PARTS <= WIDTH ? WIDTH / PARTS : 1)
#define TURN 16

/* Add what `count` positions have to the results of `many` heads; with each it asks for one from `ask` on. */
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

/* Row r, of `positions[r]` >= 0, writes its key and value there in slot `slots[r]` and sees all up to it, or the last
   `window` unless that is 0; the result of other rows is 0. Elements from one row to the next of q, k and v are `q_row`,
   `k_row` and `v_row`; a slot has G heads of C positions. Returns 1 where memory is lacking, otherwise 0. */
int attend(const stored *q, const stored *k, const stored *v, stored *keys, stored *values, const int64_t *slots,
           const int64_t *positions, stored *out, int64_t rows, int64_t G, int64_t C, int64_t q_row, int64_t k_row,
           int64_t v_row, int64_t window, float scale, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        /* First all rows write: a row of a prompt sees those before it. */
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
