/* Draws a token for each row of logits by its inverse CDF: `Sampler` of sampling.py, for a CPU. It writes nothing as
   large as the logits, which are 10 MB for 16 rows of a large vocabulary.

   Compiled at run time; with BF16 the logits are bfloat16. One thread computes a row, its words in order, so its bits
   depend only on its own numbers. */

#include <stdlib.h>

#include "lanes.h"

/* Words whose mass is one sum: a multiple of LANES. */
#define WORDS 512

/* LANES logits from `v` on, divided by the temperature; -infinity beyond the last one of V. */
static inline vector scaled(const stored *row, int64_t v, int64_t V, float temperature) {
    vector found = load_part(row + v, V - v) / temperature;
    for (int64_t i = V - v; i < LANES; i++) found[i] = -INFINITY;
    return found;
}

/* For each row of softmax(logits [R, V] / temperature): the first token up to which the mass exceeds the row's
   `uniform` (0 to below 1) times the whole, and its log-probability, which is NaN if a logit is. Returns 1 if there is
   not enough memory, otherwise 0. */
int draw(const stored *logits, const double *uniform, int64_t R, int64_t V, float temperature, int64_t *tokens,
         float *logprobs, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        /* Mass up to the end of each block, in double: in float, rounding over a large vocabulary would move draws to
           other tokens. */
        double *sums = malloc(sizeof(double) * whole(V, WORDS) / WORDS);
        if (!sums) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for
        for (int64_t r = 0; r < R; r++) {
            if (!sums) continue;
            const stored *row = logits + r * V;
            vector highest = scaled(row, 0, V, temperature);
            for (int64_t v = LANES; v < V; v += LANES) {
                vector each = scaled(row, v, V, temperature);
                bits_vector higher = (bits_vector)(each > highest);
                highest = (vector)((higher & (bits_vector)each) | (~higher & (bits_vector)highest));
            }
            float most = largest(highest);
            int64_t blocks = 0;
            double mass = 0;
            for (int64_t v = 0; v < V; blocks++) {
                int64_t end = V - v < WORDS ? V : v + WORDS;
                vector each = {0};
                for (; v < end; v += LANES) each += exponentials(scaled(row, v, V, temperature) - most);
                sums[blocks] = mass += total(each);
            }
            double target = uniform[r] * mass;
            int64_t block = 0;
            while (block < blocks - 1 && !(sums[block] > target)) block++;
            /* The block's words one by one. By rounding, their sum may be less than it was. */
            float words[WORDS];
            int64_t begin = block * WORDS, count = V - begin < WORDS ? V - begin : WORDS, token = 0;
            for (int64_t v = 0; v < count; v += LANES) {
                vector each = exponentials(scaled(row, begin + v, V, temperature) - most);
                memcpy(words + v, &each, sizeof each);
            }
            double left = target - (block ? sums[block - 1] : 0), within = 0, upto = 0;
            for (int64_t v = 0; v < count; v++) within += words[v];
            if (left > within * (1 - 0x1p-52)) left = within * (1 - 0x1p-52);
            while (token < count - 1 && !((upto += words[token]) > left)) token++;
            tokens[r] = begin + token;
            logprobs[r] = (float)(wide(row[begin + token]) / temperature - (double)most - log(mass));
        }
        free(sums);
    }
    return failed;
}
