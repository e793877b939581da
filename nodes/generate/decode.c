/* A pass of a decoder's layers over rows that are each one token of some slot, and a draw of the next tokens:
   `decode.py`, for a CPU.

   Compiled at run time; with BF16 the tensors are bfloat16, and results are rounded where the model's own operations
   round. The bits of a row depend only on its own numbers, for any number of rows. */

#include "products.h"

/* A layer's tensors, by their offsets in the layer's weights; -1 is none. Linear maps are packed: those of queries,
   keys and values as one, gate and up by blocks. */
enum { NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, O_PROJ, O_NORM, MLP_NORM, GATE_UP, DOWN, DOWN_NORM, PARTS };

/* The most tables of rotary positions of a model. */
#define ROPES 2

struct model {
    /* Functions of elementwise.c, attention.c and sampling.c. */
    void (*rms_norm)(const stored *, const stored *, stored *, int64_t, int64_t, int64_t, float, float, int);
    void (*rotate)(const stored *, const stored *, const stored *, stored *, int64_t, int64_t, int64_t, int64_t, int64_t,
                   int64_t, int);
    int (*attend)(const stored *, const stored *, const stored *, stored *, stored *, const int64_t *, const int64_t *,
                  stored *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
    int (*draw)(const stored *, const double *, int64_t, int64_t, float, int64_t *, float *, int);
    const stored *weights, *words, *norm, *head, *cos[ROPES], *sin[ROPES];
    const int64_t *windows, *ropes; /* of each layer: its window, and the index of its rotary tables */
    /* With `is_int8`, linear maps of layers are in eight bits. */
    int64_t at[PARTS], layer_size, layers, V, D, H, G, K, I, activation, is_int8;
    /* `offset` is added to the weights of norms; embeddings are multiplied by `scale`. */
    float eps, offset, scale;
};

/* Elements of the working memory of a pass over this many rows, without that of its products. */
static int64_t rows_size(const struct model *m, int64_t rows) {
    int64_t each = 2 * m->D + 2 * (m->H + m->G) * m->K + m->G * m->K + m->H * m->K + m->I + 2 * ROPES * m->K;
    return whole(rows * each, 64 / sizeof(stored));
}

/* The same with that of its products. */
static int64_t pass_size(const struct model *m, int64_t rows) {
    int64_t queries = m->H * m->K, most = m->D > m->I ? m->D : m->I, widest = most > queries ? most : queries;
    int64_t layers = product_size(rows, widest, (int)m->is_int8), head = product_size(rows, m->D, 0);
    return rows_size(m, rows) + whole(layers > head ? layers : head, 64 / sizeof(stored));
}

/* Elements of the working memory of `decode` and `logits` for this many rows, and of `sample` for `drawn` of them. */
int64_t working_size(const struct model *m, int64_t rows, int64_t drawn) {
    return pass_size(m, rows) + whole(rows * m->D, 64 / sizeof(stored)) + whole(drawn * m->V, 64 / sizeof(stored)) +
           drawn * (int64_t)(sizeof(double) / sizeof(stored));
}

/* x [R, D] += the norm of a branch's output `made`, which is normed in place. */
static void add_normed(const struct model *m, const stored *norm, stored *made, stored *x, int64_t R, int threads) {
    int64_t count = R * m->D;
    m->rms_norm(made, norm, made, R, m->D, m->D, m->eps, m->offset, threads);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < count; i += LANES)
        store_part(x + i, load_part(x + i, count - i) + load_part(made + i, count - i), count - i);
}

/* Hidden states `out` [R, D] after the final norm, for rows that are `tokens` at `positions` of `slots`. Their keys and
   values are written to `keys` and `values`: `cache` elements of a layer, in slots of `pages`. Returns 1 if there is
   not enough memory, otherwise 0. */
int decode(const struct model *m, const int64_t *tokens, const int64_t *slots, const int64_t *positions, int64_t R,
           stored *keys, stored *values, int64_t cache, int64_t pages, stored *working, stored *out, int threads) {
    int64_t D = m->D, H = m->H, G = m->G, K = m->K, I = m->I, queries = H * K, row = (H + 2 * G) * K;
    stored *x = working, *normed = x + R * D, *qkv = normed + R * D, *q = qkv + R * row, *k = q + R * queries;
    stored *seen = k + R * G * K, *gated = seen + R * queries, *tables = gated + R * I;
    stored *rest = working + rows_size(m, R);
    int is_int8 = (int)m->is_int8;
    float attention_scale = (float)(1 / sqrt((double)K)); /* rounded once, as in the model's modules */
    for (int64_t r = 0; r < R; r++) {
        memcpy(x + r * D, m->words + tokens[r] * D, D * sizeof(stored));
        if (m->scale != 1)
            for (int64_t d = 0; d < D; d += LANES)
                store_part(x + r * D + d, load_part(x + r * D + d, D - d) * m->scale, D - d);
        for (int t = 0; t < ROPES && m->cos[t]; t++) {
            stored *cos = tables + 2 * t * R * K, *sin = cos + R * K;
            memcpy(cos + r * K, m->cos[t] + positions[r] * K, K * sizeof(stored));
            memcpy(sin + r * K, m->sin[t] + positions[r] * K, K * sizeof(stored));
        }
    }
    int failed = 0;
    for (int64_t layer = 0; layer < m->layers && !failed; layer++) {
        const stored *of[PARTS];
        for (int p = 0; p < PARTS; p++) of[p] = m->at[p] < 0 ? NULL : m->weights + layer * m->layer_size + m->at[p];
        const stored *cos = tables + 2 * m->ropes[layer] * R * K, *sin = cos + R * K;
        m->rms_norm(x, of[NORM], normed, R, D, D, m->eps, m->offset, threads);
        product(normed, R, D, D, of[QKV], is_int8, row, of[QKV_BIAS], PLAIN, qkv, row, rest, threads);
        const stored *own_q = qkv, *own_k = qkv + queries;
        int64_t q_row = row, k_row = row;
        if (of[Q_NORM]) {
            for (int64_t r = 0; r < R; r++) {
                m->rms_norm(own_q + r * row, of[Q_NORM], q + r * queries, H, K, K, m->eps, m->offset, 1);
                m->rms_norm(own_k + r * row, of[K_NORM], k + r * G * K, G, K, K, m->eps, m->offset, 1);
            }
            own_q = q, own_k = k, q_row = queries, k_row = G * K;
        }
        m->rotate(own_q, cos, sin, q, R, H, K, R, q_row, 0, threads);
        m->rotate(own_k, cos, sin, k, R, G, K, R, k_row, 0, threads);
        failed |= m->attend(q, k, qkv + queries + G * K, keys + layer * cache, values + layer * cache, slots, positions,
                            seen, R, G, pages, queries, G * K, row, m->windows[layer], attention_scale, threads);
        /* The output of a branch that is normed before it is added replaces the branch's input. */
        int branch = of[O_NORM] ? PLAIN : ADDED, gate = GATED + (int)m->activation;
        stored *to = of[O_NORM] ? normed : x;
        product(seen, R, queries, queries, of[O_PROJ], is_int8, D, NULL, branch, to, D, rest, threads);
        if (of[O_NORM]) add_normed(m, of[O_NORM], normed, x, R, threads);
        m->rms_norm(x, of[MLP_NORM], normed, R, D, D, m->eps, m->offset, threads);
        product(normed, R, D, D, of[GATE_UP], is_int8, 2 * I, NULL, gate, gated, I, rest, threads);
        product(gated, R, I, I, of[DOWN], is_int8, D, NULL, branch, to, D, rest, threads);
        if (of[DOWN_NORM]) add_normed(m, of[DOWN_NORM], normed, x, R, threads);
    }
    m->rms_norm(x, m->norm, out, R, D, D, m->eps, m->offset, threads);
    return failed;
}

/* Logits `out` [R, V] of hidden states [R, D], whose rows are contiguous. */
void logits(const struct model *m, const stored *hidden, int64_t R, stored *working, stored *out, int threads) {
    product(hidden, R, m->D, m->D, m->head, 0, m->V, NULL, PLAIN, out, m->V, working, threads);
}

/* A pass over R rows, whose `inputs` [4, R] are tokens, slots, positions and the number of the next token in its
   response; and for the first `drawn` of them this next token and its log-probability, by the entry of `uniform`
   [slots, T] for it. Returns as `decode` does. */
int sample(const struct model *m, const int64_t *inputs, int64_t R, int64_t drawn, stored *keys, stored *values,
           int64_t cache, int64_t pages, const double *uniform, int64_t T, float temperature, stored *working,
           int64_t *tokens, float *logprobs, int threads) {
    const int64_t *slots = inputs + R, *positions = slots + R, *steps = positions + R;
    stored *hidden = working + pass_size(m, R), *made = hidden + whole(R * m->D, 64 / sizeof(stored));
    double *own = (double *)(made + whole(drawn * m->V, 64 / sizeof(stored)));
    if (decode(m, inputs, slots, positions, R, keys, values, cache, pages, working, hidden, threads)) return 1;
    if (!drawn) return 0;
    logits(m, hidden, drawn, working, made, threads);
    for (int64_t r = 0; r < drawn; r++) own[r] = uniform[slots[r] * T + steps[r]];
    return m->draw(made, own, drawn, m->V, temperature, tokens, logprobs, threads);
}
