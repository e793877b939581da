/* Attention of one token per row over the cache of the row's slot: `attend` of attention.py, for a CPU.

   Compiled where it runs, with K (width of a head), N (query heads of a key-value head), LANES (floats of a vector,
   which divide K) and, if the cache is in bfloat16, BF16. A row is computed by one thread, its positions in order, so
   its bits depend on nothing but its own numbers. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PARTS (K / LANES)
/* Positions whose scores are computed side by side. */
#define TILE 4

typedef float vector __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint16_t stored;
typedef uint16_t narrow_vector __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_vector __attribute__((vector_size(4 * LANES)));

static inline vector load(const stored *from) {
    narrow_vector narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (vector)(__builtin_convertvector(narrow, bits_vector) << 16);
}

static inline stored rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    /* What is no number stays none. */
    return x != x ? 0x7fc0 : (stored)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
typedef float stored;

static inline vector load(const stored *from) {
    vector wide;
    memcpy(&wide, from, sizeof wide);
    return wide;
}

static inline stored rounded(float x) { return x; }
#endif

static inline float sum(vector x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* e^x for x <= 0, by the polynomial of Cephes' expf: within 2 units in the last place. */
static inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x, whole = rintf(bounded * 1.44269504f), power;
    float r = fmaf(whole, 2.12194440e-4f, fmaf(whole, -0.693359375f, bounded));
    float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = fmaf(fmaf(fmaf(fmaf(p, r, 8.3334519073e-3f), r, 4.1665795894e-2f), r, 1.6666665459e-1f), r, 5.0000001201e-1f);
    int32_t exponent = ((int32_t)whole + 127) << 23;
    memcpy(&power, &exponent, 4);
    return (fmaf(p * r, r, r) + 1.0f) * power;
}

/* Row r, of `positions[r]` >= 0, writes its key and value there in slot `slots[r]` and sees all up to it; the result of
   other rows is 0. Elements from one row to the next of q, k and v are `q_row`, `k_row` and `v_row`; a slot has G heads
   of C positions. Returns 1 where memory is lacking, otherwise 0. */
int attend(const stored *q, const stored *k, const stored *v, stored *keys, stored *values, const int64_t *slots,
           const int64_t *positions, stored *out, int64_t rows, int64_t G, int64_t C, int64_t q_row, int64_t k_row,
           int64_t v_row, float scale, int threads) {
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
        float *weights = malloc(sizeof(float) * N * C);
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
            const stored *key = keys + (slots[row] * G + g) * C * K, *value = values + (slots[row] * G + g) * C * K;
            vector query[N][PARTS], total[N][PARTS];
            for (int n = 0; n < N; n++)
                for (int p = 0; p < PARTS; p++)
                    query[n][p] = load(q + row * q_row + (g * N + n) * K + p * LANES) * scale;
            int64_t c = 0;
            for (; c + TILE <= length; c += TILE) {
                vector scores[N][TILE];
                memset(scores, 0, sizeof scores);
                for (int i = 0; i < TILE; i++)
                    for (int p = 0; p < PARTS; p++) {
                        vector part = load(key + (c + i) * K + p * LANES);
                        for (int n = 0; n < N; n++) scores[n][i] += query[n][p] * part;
                    }
                for (int n = 0; n < N; n++)
                    for (int i = 0; i < TILE; i++) weights[n * C + c + i] = sum(scores[n][i]);
            }
            for (; c < length; c++) {
                vector scores[N];
                memset(scores, 0, sizeof scores);
                for (int p = 0; p < PARTS; p++) {
                    vector part = load(key + c * K + p * LANES);
                    for (int n = 0; n < N; n++) scores[n] += query[n][p] * part;
                }
                for (int n = 0; n < N; n++) weights[n * C + c] = sum(scores[n]);
            }
            float inverse[N];
            for (int n = 0; n < N; n++) {
                float *w = weights + n * C, most = -INFINITY, mass = 0;
#pragma omp simd reduction(max : most)
                for (int64_t i = 0; i < length; i++) most = w[i] > most ? w[i] : most;
#pragma omp simd reduction(+ : mass)
                for (int64_t i = 0; i < length; i++) mass += w[i] = exponential(w[i] - most);
                inverse[n] = 1 / mass;
            }
            memset(total, 0, sizeof total);
            for (c = 0; c < length; c++)
                for (int p = 0; p < PARTS; p++) {
                    vector part = load(value + c * K + p * LANES);
                    for (int n = 0; n < N; n++) total[n][p] += weights[n * C + c] * part;
                }
            for (int n = 0; n < N; n++)
                for (int p = 0; p < PARTS; p++)
                    for (int i = 0; i < LANES; i++) to[n * K + p * LANES + i] = rounded(total[n][p][i] * inverse[n]);
        }
        free(weights);
    }
    return failed;
}
