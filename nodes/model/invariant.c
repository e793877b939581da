/* Products of rows and the log-softmax, for a CPU; see `invariant.py`.

   Compiled at run time; with BF16 the tensors are bfloat16, and everything is computed in float32 and rounded once. The
   numbers of a row are added in an order that depends on their count only: not on the rows beside it, the threads, or
   its place in memory. So each loop whose order matters is written once, with explicit lanes. */

#include <stdlib.h>

#include "lanes.h"

/* A tile of a product has always this many rows of both matrices; the last tile repeats rows. */
#define TALL 6
#define WIDE 4
/* Rows of an input that stay in the cache while all weights pass by. */
#define CHUNK 96

/* Products of TALL rows of floats, padded to a multiple of LANES, with WIDE rows of K weights. Never inlined: with more
   knowledge at a call the compiler might generate other code. */
static __attribute__((noinline)) void tile(const float *const x[TALL], const stored *const w[WIDE], int64_t K,
                                           float found[TALL][WIDE]) {
    vector totals[TALL][WIDE];
    memset(totals, 0, sizeof totals);
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        vector each[WIDE];
        for (int j = 0; j < WIDE; j++) each[j] = load(w[j] + k);
        for (int i = 0; i < TALL; i++) {
            vector row;
            memcpy(&row, x[i] + k, sizeof row);
            for (int j = 0; j < WIDE; j++) totals[i][j] += row * each[j];
        }
    }
    if (k < K)
        for (int j = 0; j < WIDE; j++) {
            stored rest[LANES] = {0};
            memcpy(rest, w[j] + k, (K - k) * sizeof(stored));
            vector last = load(rest);
            for (int i = 0; i < TALL; i++) {
                vector row;
                memcpy(&row, x[i] + k, sizeof row);
                totals[i][j] += row * last;
            }
        }
    for (int i = 0; i < TALL; i++)
        for (int j = 0; j < WIDE; j++) {
            float lanes[LANES];
            memcpy(lanes, &totals[i][j], sizeof lanes);
            found[i][j] = sum(lanes);
        }
}

/* out [R, O] = x [R, K] w [O, K]^T + bias, which may be null. Returns 1 if there is not enough memory, otherwise 0. */
int linear(const stored *x, const stored *w, const stored *bias, stored *out, int64_t R, int64_t O, int64_t K,
           int threads) {
    int64_t padded = whole(K, LANES);
    float *rows = malloc(sizeof(float) * (R < CHUNK ? R : CHUNK) * padded);
    if (!rows) return 1;
#pragma omp parallel num_threads(threads)
    for (int64_t first = 0; first < R; first += CHUNK) {
        int64_t count = R - first < CHUNK ? R - first : CHUNK;
#pragma omp for
        for (int64_t r = 0; r < count; r++) {
            for (int64_t k = 0; k < K; k++) rows[r * padded + k] = wide(x[(first + r) * K + k]);
            memset(rows + r * padded + K, 0, (padded - K) * sizeof(float));
        }
#pragma omp for
        for (int64_t o = 0; o < O; o += WIDE) {
            const stored *weights[WIDE];
            for (int j = 0; j < WIDE; j++) weights[j] = w + (o + j < O ? o + j : O - 1) * K;
            for (int64_t r = 0; r < count; r += TALL) {
                const float *given[TALL];
                float found[TALL][WIDE];
                for (int i = 0; i < TALL; i++) given[i] = rows + (r + i < count ? r + i : count - 1) * padded;
                tile(given, weights, K, found);
                for (int i = 0; i < TALL && r + i < count; i++)
                    for (int j = 0; j < WIDE && o + j < O; j++)
                        out[(first + r + i) * O + o + j] =
                            rounded(bias ? found[i][j] + wide(bias[o + j]) : found[i][j]);
            }
        }
    }
    free(rows);
    return 0;
}

/* out [R, V] = log softmax(logits / temperature), with one temperature for each row. */
void log_softmax(const stored *logits, const float *temperature, float *out, int64_t R, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++) {
        float *row = out + r * V, most = -INFINITY, lanes[LANES] = {0};
        for (int64_t v = 0; v < V; v++) {
            row[v] = wide(logits[r * V + v]) / temperature[r];
            most = row[v] > most ? row[v] : most;
        }
        int64_t v = 0;
        for (; v + LANES <= V; v += LANES)
            for (int i = 0; i < LANES; i++) lanes[i] += exponential(row[v + i] - most);
        for (int i = 0; v + i < V; i++) lanes[i] += exponential(row[v + i] - most);
        float mass = logf(sum(lanes));
        for (v = 0; v < V; v++) row[v] = row[v] - most - mass;
    }
}
