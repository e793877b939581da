/* Causal self-attention of whole sequences and its gradients, for a CPU; see `causal.py`.

   Compiled at run time; with BF16 the tensors are bfloat16, and everything is computed in float32 and rounded once. One
   thread computes all queries of a key-value head of a family, whose keys and values it keeps as floats, in an order
   that depends only on their number. Scores of BLOCK queries at a time are kept, with all keys that these see.

   Segments are laid end to end: b has the positions from starts[b] up to starts[b + 1]. Segments families[f] up to
   families[f + 1] are a family: a prefix, alone or with its continuations. Each continuation sees the prefix before
   itself, and no other segment. Given tensors [positions, heads, K] have strides for position and head; results are
   contiguous. N consecutive query heads share a key-value head. */

#include <stdlib.h>

#include "lanes.h"

/* A tile of a product has TALL rows of BROAD registers: as many as fit the processor's registers. */
#define TALL 6
#ifdef __AVX512F__
#define BROAD 4
#else
#define BROAD 2
#endif
#define BLOCK (4 * TALL)
/* The most buffers of a thread. */
#define PARTS 11

typedef struct {
    int64_t position, head;
} Strides;

/* c [TALL, wide_by registers] = (or += with `add`) a [TALL, n] b [n, wide_by registers]; element (i, k) of a is
   a[i * a_row + k * a_step]. */
static inline __attribute__((always_inline)) void tile(float *c, int64_t c_row, const float *a, int64_t a_row,
                                                       int64_t a_step, const float *b, int64_t b_row, int64_t n,
                                                       int wide_by, int add) {
    register_vector sums[TALL][BROAD];
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 8
        for (int j = 0; j < wide_by; j++) {
            if (add)
                memcpy(&sums[i][j], c + i * c_row + j * WIDTH, sizeof(register_vector));
            else
                sums[i][j] = (register_vector){0};
        }
    for (int64_t k = 0; k < n; k++) {
        register_vector each[BROAD];
#pragma GCC unroll 8
        for (int j = 0; j < wide_by; j++) memcpy(&each[j], b + k * b_row + j * WIDTH, sizeof(register_vector));
#pragma GCC unroll 8
        for (int i = 0; i < TALL; i++) {
            float one = a[i * a_row + k * a_step];
#pragma GCC unroll 8
            for (int j = 0; j < wide_by; j++) sums[i][j] += one * each[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 8
        for (int j = 0; j < wide_by; j++) memcpy(c + i * c_row + j * WIDTH, &sums[i][j], sizeof(register_vector));
}

/* The same for `rows` rows, a multiple of TALL, and any number of vectors. */
static void multiply(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b,
                     int64_t b_row, int64_t rows, int64_t n, int64_t vectors, int add) {
    int64_t registers = vectors * (LANES / WIDTH);
    for (int64_t i = 0; i < rows; i += TALL) {
        float *to = c + i * c_row;
        const float *from = a + i * a_row;
        int64_t j = 0;
        for (; j + BROAD <= registers; j += BROAD)
            tile(to + j * WIDTH, c_row, from, a_row, a_step, b + j * WIDTH, b_row, n, BROAD, add);
        /* The remaining registers in one tile: tiles of a single register would wait for their own sums. */
        float *last = to + j * WIDTH;
        const float *beside = b + j * WIDTH;
        if (registers - j == 3) tile(last, c_row, from, a_row, a_step, beside, b_row, n, 3, add);
        if (registers - j == 2) tile(last, c_row, from, a_row, a_step, beside, b_row, n, 2, add);
        if (registers - j == 1) tile(last, c_row, from, a_row, a_step, beside, b_row, n, 1, add);
    }
}

/* Write rows `begin` to `end` of a head as floats times `scale`, in rows of `width`, a multiple of LANES. */
static void widen(float *to, const stored *from, int64_t step, int64_t begin, int64_t end, int64_t K, int64_t width,
                  float scale) {
    for (int64_t s = begin; s < end; s++)
        for (int64_t k = 0; k < K; k += LANES) {
            vector x = load_part(from + s * step + k, K - k) * scale;
            memcpy(to + (s - begin) * width + k, &x, sizeof x);
        }
}

/* to [K, `width`] = the transpose of from [S, K], which has rows of `from_width`; both have room for whole vectors. */
static void turn(float *to, const float *from, int64_t S, int64_t K, int64_t width, int64_t from_width) {
    for (int64_t s = 0; s < S; s += LANES)
        for (int64_t k = 0; k < K; k += LANES) {
            vector rows[LANES] = {0};
            for (int i = 0; i < LANES && s + i < S; i++)
                memcpy(&rows[i], from + (s + i) * from_width + k, sizeof(vector));
            transpose(rows);
            for (int i = 0; i < LANES && k + i < K; i++) memcpy(to + (k + i) * width + s, &rows[i], sizeof(vector));
        }
}

static void narrow(stored *to, int64_t step, const float *from, int64_t rows, int64_t K, int64_t width, float scale) {
    for (int64_t s = 0; s < rows; s++)
        for (int64_t k = 0; k < K; k += LANES) {
            vector x;
            memcpy(&x, from + s * width + k, sizeof x);
            store_part(to + s * step + k, x * scale, K - k);
        }
}

/* Replace a row's first `count` scores by their softmax, or only the last `window` of them unless that is 0. The others
   become 0, up to `end` and to the next multiple of LANES. */
static void softmax(float *row, int64_t count, int64_t end, int64_t window) {
    int64_t padded = whole(count, LANES), unseen = 0 < window && window < count ? count - window : 0;
    end = end < padded ? padded : end;
    vector mass = {0}, most, x;
    for (int64_t j = 0; j < unseen; j++) row[j] = row[count - 1];
    for (int64_t j = count; j < padded; j++) row[j] = row[count - 1];
    memcpy(&most, row, sizeof most);
    for (int64_t j = LANES; j < padded; j += LANES) {
        memcpy(&x, row + j, sizeof x);
        bits_vector more = (bits_vector)(x > most);
        most = (vector)((more & (bits_vector)x) | (~more & (bits_vector)most));
    }
    float top = largest(most);
    for (int64_t j = 0; j < padded; j += LANES) {
        memcpy(&x, row + j, sizeof x);
        x = exponentials(x - top);
        memcpy(row + j, &x, sizeof x);
    }
    for (int64_t j = 0; j < unseen; j++) row[j] = 0;
    for (int64_t j = count; j < end; j++) row[j] = 0;
    for (int64_t j = 0; j < padded; j += LANES) {
        memcpy(&x, row + j, sizeof x);
        mass += x;
    }
    float inverse = 1 / total(mass);
    for (int64_t j = 0; j < padded; j += LANES) {
        memcpy(&x, row + j, sizeof x);
        x *= inverse;
        memcpy(row + j, &x, sizeof x);
    }
}

/* Allocate a thread's buffers, of sizes[i] floats each, all zero. */
static float *take(int count, const int64_t sizes[], float *parts[]) {
    int64_t total = 0;
    for (int i = 0; i < count; i++) total += whole(sizes[i], LANES);
    float *memory = calloc(total + LANES, sizeof(float));
    for (int i = 0; i < count && memory; i++) {
        parts[i] = i ? parts[i - 1] + whole(sizes[i - 1], LANES) : (float *)whole((int64_t)memory, sizeof(vector));
    }
    return memory;
}

/* The arguments of a call. `at` has the strides of q, k, v and of the gradient of `causal`'s output, in this order.
   Rows of K floats take `wide_k` floats in memory, and rows of scores `wide_s`, for any sequence. */
typedef struct {
    const stored *q, *k, *v, *grad;
    stored *out, *grad_q, *grad_k, *grad_v;
    const Strides *at;
    const int64_t *starts, *families;
    int64_t G, N, K, window, wide_k, wide_s;
    float scale;
} Attention;

/* The address of head n of segment b in `x`, whose strides are at[which]. */
static const stored *head(const Attention *a, const stored *x, int which, int64_t b, int64_t n) {
    return x + a->starts[b] * a->at[which].position + n * a->at[which].head;
}

/* The address of head n at position s of segment b in a result with this many heads. */
static stored *made_head(stored *x, int64_t heads, const Attention *a, int64_t b, int64_t s, int64_t n) {
    return x + ((a->starts[b] + s) * heads + n) * a->K;
}

static int64_t length(const Attention *a, int64_t b) { return a->starts[b + 1] - a->starts[b]; }

/* The number of positions of the prefix that segment b of family f sees before its own. */
static int64_t seen_before(const Attention *a, int64_t f, int64_t b) {
    return b == a->families[f] ? 0 : length(a, a->families[f]);
}

/* A computation for key-value head g of family f, with the buffers `parts`. */
typedef void Group(const Attention *a, int64_t f, int64_t g, float *parts[]);

/* Call `group` for each key-value head of F families, by `threads` threads. Returns 1 if there is not enough memory,
   otherwise 0. */
static int each_group(Group *group, const Attention *a, int64_t F, int count, const int64_t sizes[], int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *parts[PARTS], *memory = take(count, sizes, parts);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t x = 0; x < F * a->G; x++)
            if (memory) group(a, x / a->G, x % a->G, parts);
        free(memory);
    }
    return failed;
}

/* Write keys and values of segment b as floats after the first `before` rows, which are those of its prefix. Also write
   the keys transposed, and the values if `values_t` is given. */
static void read_keys(const Attention *a, int64_t b, int64_t g, int64_t before, float *keys, float *values,
                      float *keys_t, float *values_t) {
    int64_t own = length(a, b), at = before * a->wide_k;
    widen(keys + at, head(a, a->k, 1, b, g), a->at[1].position, 0, own, a->K, a->wide_k, 1);
    widen(values + at, head(a, a->v, 2, b, g), a->at[2].position, 0, own, a->K, a->wide_k, 1);
    turn(keys_t + before, keys + at, own, a->K, a->wide_s, a->wide_k);
    if (values_t) turn(values_t + before, values + at, own, a->K, a->wide_s, a->wide_k);
}

static void outputs(const Attention *a, int64_t f, int64_t g, float *parts[]) {
    float *keys = parts[0], *values = parts[1], *turned = parts[2], *query = parts[3], *score = parts[4];
    float *made = parts[5];
    int64_t K = a->K, heads = a->G * a->N, wide_k = a->wide_k, wide_s = a->wide_s;
    for (int64_t b = a->families[f]; b < a->families[f + 1]; b++) {
        int64_t own = length(a, b), before = seen_before(a, f, b);
        read_keys(a, b, g, before, keys, values, turned, NULL);
        for (int64_t n = g * a->N; n < (g + 1) * a->N; n++)
            for (int64_t first = 0; first < own; first += TALL) {
                int64_t last = first + TALL < own ? first + TALL : own, end = before + last;
                widen(query, head(a, a->q, 0, b, n), a->at[0].position, first, last, K, wide_k, a->scale);
                multiply(score, wide_s, query, wide_k, 1, turned, wide_s, TALL, K, whole(end, LANES) / LANES, 0);
                for (int64_t i = first; i < last; i++)
                    softmax(score + (i - first) * wide_s, before + i + 1, end, a->window);
                multiply(made, wide_k, score, wide_s, 1, values, wide_k, TALL, end, wide_k / LANES, 0);
                narrow(made_head(a->out, heads, a, b, first, n), heads * K, made, last - first, K, wide_k, 1);
            }
    }
}

/* Replace a query's scores in `weight` by their softmax over the first `count` keys, within its `window`, and the
   gradient of these weights in `grad` by that of the scores; 0 for keys up to `end` that the query does not see. */
static void score_gradient(float *weight, float *grad, int64_t count, int64_t end, int64_t window) {
    softmax(weight, count, end, window);
    int64_t seen = whole(count, LANES);
    vector products = {0}, share, x;
    for (int64_t j = 0; j < seen; j += LANES) {
        memcpy(&share, weight + j, sizeof share), memcpy(&x, grad + j, sizeof x);
        products += share * x;
    }
    float mean = total(products);
    for (int64_t j = 0; j < seen; j += LANES) {
        memcpy(&share, weight + j, sizeof share), memcpy(&x, grad + j, sizeof x);
        x = share * (x - mean);
        memcpy(grad + j, &x, sizeof x);
    }
    for (int64_t j = count; j < end; j++) grad[j] = 0;
}

static void gradients(const Attention *a, int64_t f, int64_t g, float *parts[]) {
    float *keys = parts[0], *values = parts[1], *keys_t = parts[2], *values_t = parts[3], *to_keys = parts[4];
    float *to_values = parts[5], *query = parts[6], *given = parts[7], *weight = parts[8], *to_score = parts[9];
    float *to_query = parts[10];
    int64_t K = a->K, heads = a->G * a->N, wide_k = a->wide_k, wide_s = a->wide_s, prefix = a->families[f];
    for (int64_t b = prefix; b < a->families[f + 1]; b++) {
        int64_t own = length(a, b), before = seen_before(a, f, b), S = before + own;
        read_keys(a, b, g, before, keys, values, keys_t, values_t);
        /* Gradients of the prefix are summed over the family, so they are not reset. */
        memset(to_keys + before * wide_k, 0, (whole(S, TALL) - before) * wide_k * sizeof(float));
        memset(to_values + before * wide_k, 0, (whole(S, TALL) - before) * wide_k * sizeof(float));
        for (int64_t n = g * a->N; n < (g + 1) * a->N; n++)
            for (int64_t block = 0; block < own; block += BLOCK) {
                int64_t last = block + BLOCK < own ? block + BLOCK : own, tall = whole(before + last, TALL);
                widen(query, head(a, a->q, 0, b, n), a->at[0].position, block, last, K, wide_k, a->scale);
                widen(given, head(a, a->grad, 3, b, n), a->at[3].position, block, last, K, wide_k, 1);
                for (int64_t first = block; first < last; first += TALL) {
                    int64_t next = first + TALL < own ? first + TALL : own, end = before + next;
                    int64_t vectors = whole(end, LANES) / LANES;
                    float *w = weight + (first - block) * wide_s, *d = to_score + (first - block) * wide_s;
                    const float *one = query + (first - block) * wide_k, *above = given + (first - block) * wide_k;
                    multiply(w, wide_s, one, wide_k, 1, keys_t, wide_s, TALL, K, vectors, 0);
                    multiply(d, wide_s, above, wide_k, 1, values_t, wide_s, TALL, K, vectors, 0);
                    /* Up to the last keys that queries of the block see. */
                    for (int64_t i = 0; i < next - first; i++)
                        score_gradient(w + i * wide_s, d + i * wide_s, before + first + i + 1, tall, a->window);
                    multiply(to_query, wide_k, d, wide_s, 1, keys, wide_k, TALL, end, wide_k / LANES, 0);
                    stored *to = made_head(a->grad_q, heads, a, b, first, n);
                    narrow(to, heads * K, to_query, next - first, K, wide_k, a->scale);
                }
                multiply(to_values, wide_k, weight, 1, wide_s, given, wide_k, tall, last - block, wide_k / LANES, 1);
                multiply(to_keys, wide_k, to_score, 1, wide_s, query, wide_k, tall, last - block, wide_k / LANES, 1);
            }
        if (b == prefix) continue;
        const int64_t at = before * wide_k;
        narrow(made_head(a->grad_k, a->G, a, b, 0, g), a->G * K, to_keys + at, own, K, wide_k, 1);
        narrow(made_head(a->grad_v, a->G, a, b, 0, g), a->G * K, to_values + at, own, K, wide_k, 1);
    }
    narrow(made_head(a->grad_k, a->G, a, prefix, 0, g), a->G * K, to_keys, length(a, prefix), K, wide_k, 1);
    narrow(made_head(a->grad_v, a->G, a, prefix, 0, g), a->G * K, to_values, length(a, prefix), K, wide_k, 1);
}

/* The most keys that a query sees. */
static int64_t longest(const int64_t *starts, const int64_t *families, int64_t F) {
    int64_t most = 0;
    for (int64_t f = 0; f < F; f++)
        for (int64_t b = families[f], first = b; b < families[f + 1]; b++) {
            int64_t keys = starts[b + 1] - starts[b] + (b == first ? 0 : starts[first + 1] - starts[first]);
            most = keys > most ? keys : most;
        }
    return most;
}

static Attention attention(const Strides *at, const int64_t *starts, const int64_t *families, int64_t S, int64_t G,
                           int64_t N, int64_t K, int64_t window, float scale) {
    return (Attention){
        .at = at, .starts = starts, .families = families, .G = G, .N = N, .K = K, .window = window,
        .wide_k = whole(K, LANES), .wide_s = whole(S, LANES) + LANES, .scale = scale,
    };
}

/* out [positions, G * N, K] for F families: each query sees the keys up to its own position, or only the last `window`
   of them unless that is 0. Returns as `each_group`. */
int causal(const stored *q, const stored *k, const stored *v, stored *out, const Strides *at, const int64_t *starts,
           const int64_t *families, int64_t F, int64_t G, int64_t N, int64_t K, int64_t window, float scale,
           int threads) {
    const int64_t S = longest(starts, families, F);
    Attention a = attention(at, starts, families, S, G, N, K, window, scale);
    a.q = q, a.k = k, a.v = v, a.out = out;
    const int64_t keys = S * a.wide_k;
    const int64_t sizes[] = {keys, keys, K * a.wide_s, BLOCK * a.wide_k, TALL * a.wide_s, TALL * a.wide_k};
    return each_group(outputs, &a, F, 6, sizes, threads);
}

/* Gradients of q, k and v, given `grad`, the gradient of `causal`'s output, whose strides are at[3]. */
int causal_backward(const stored *q, const stored *k, const stored *v, const stored *grad, stored *grad_q,
                    stored *grad_k, stored *grad_v, const Strides *at, const int64_t *starts, const int64_t *families,
                    int64_t F, int64_t G, int64_t N, int64_t K, int64_t window, float scale, int threads) {
    const int64_t S = longest(starts, families, F);
    Attention a = attention(at, starts, families, S, G, N, K, window, scale);
    a.q = q, a.k = k, a.v = v, a.grad = grad, a.grad_q = grad_q, a.grad_k = grad_k, a.grad_v = grad_v;
    /* Keys are padded to whole tiles. */
    const int64_t of_keys = whole(S, TALL) * a.wide_k, turned = K * a.wide_s;
    const int64_t of_queries = BLOCK * a.wide_k, scores = BLOCK * a.wide_s;
    const int64_t sizes[] = {of_keys,    of_keys,    turned, turned, of_keys,         of_keys,
                             of_queries, of_queries, scores, scores, TALL * a.wide_k};
    return each_group(gradients, &a, F, 11, sizes, threads);
}
