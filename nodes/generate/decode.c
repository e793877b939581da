/* A pass of a decoder's layers over rows that are each one token of some slot, and a draw of the next tokens:
   `decode.py`, for a CPU.

   Compiled at run time; with BF16 the tensors are bfloat16, products are summed in float32, and results are rounded
   where the model's own operations round. An output of a product is summed in the order of the inputs, by one lane of a
   tile or a vector: the bits of a row depend only on its own numbers, for any number of rows. */

#include <stdlib.h>

#include "activations.h"

#if defined(BF16) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Adjacent outputs of a packed weight, a block; and the most rows that a block is computed for at a time, without and
   with tiles, which have TILE rows. */
#define BLOCK (2 * LANES)
#define TALL 48
#define TILE 16
#define TILED (4 * TILE)
/* Rows whose sums with two registers of outputs are in registers at the same time. */
#ifdef __AVX512F__
#define ROWS 8
#else
#define ROWS 6
#endif
typedef uint32_t register_bits __attribute__((vector_size(4 * WIDTH)));
/* The rows in products: as they are or, without an instruction for pairs of bfloat16, as floats. */
#if defined(BF16) && !defined(__AVX512BF16__)
typedef float factor;
#define WIDENED 1
#else
typedef stored factor;
#define WIDENED 0
#endif
/* Inputs of a packed weight are padded with 0 to a multiple of STEP, and in bfloat16 stored as pairs. */
#ifdef BF16
#define STEP 32
#define PAIR 2
#else
#define STEP 1
#define PAIR 1
#endif

/* Cache lines of a block at a step. */
#define LINES (STEP * BLOCK * (int64_t)sizeof(stored) / 64)

/* The use of a product's sums: PLAIN stores them, ADDED adds them to the present outputs, and GATED plus the number of
   an activation, for blocks of LANES gates and LANES others, stores activation(gate) * other. */
enum { PLAIN, ADDED, GATED };

/* 1 if the processor has the instructions that make these products as fast as oneDNN's. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
const int fast = 1;
#else
const int fast = 0;
#endif

/* The number of elements of a packed weight [O, I]. */
int64_t packed_size(int64_t O, int64_t I) { return whole(O, BLOCK) * whole(I, STEP); }

/* Write a weight [O, I] into a packed one. Its output o becomes output `at` + o. With `gated`, blocks have LANES
   outputs of each of two weights, and o is number o of the first (`at` 0) or of the second one (`at` LANES). */
void pack(const stored *w, stored *to, int64_t O, int64_t I, int64_t at, int gated, int threads) {
    int64_t inputs = whole(I, STEP);
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < O; first += LANES)
        for (int64_t k = 0; k < inputs; k += PAIR)
            for (int64_t o = first; o < O && o < first + LANES; o++) {
                int64_t place = gated ? o / LANES * BLOCK + o % LANES + at : at + o;
                stored *pair = to + place / BLOCK * BLOCK * inputs + k * BLOCK + place % BLOCK * PAIR;
                for (int64_t i = 0; i < PAIR; i++) pair[i] = k + i < I ? w[o * I + k + i] : 0;
            }
}

/* Sums of m rows, up to ROWS, with 2 * WIDTH outputs of a block. With each step of the inputs it prefetches, `step`
   bytes further each time, from `ask` on. */
static inline __attribute__((always_inline)) void few(int m, const factor *x, int64_t x_row, int64_t I, const stored *w,
                                                      const char *ask, int64_t step, float *to) {
    register_vector sums[ROWS][2] = {0};
#pragma GCC unroll 4
    for (int64_t k = 0; k < I; k += PAIR, w += PAIR * BLOCK, ask += step) {
        __builtin_prefetch(ask, 0, 2);
#ifdef BF16
        register_bits pairs[2];
        for (int j = 0; j < 2; j++) memcpy(&pairs[j], w + j * 2 * WIDTH, sizeof pairs[j]);
#if WIDENED
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            register_vector each[2];
            for (int j = 0; j < 2; j++) each[j] = (register_vector)(odd ? pairs[j] & 0xffff0000 : pairs[j] << 16);
#pragma GCC unroll 8
            for (int i = 0; i < m; i++)
                for (int j = 0; j < 2; j++) sums[i][j] += x[i * x_row + k + odd] * each[j];
        }
#else
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            uint32_t own = x[i * x_row + k];
            if (k + 1 < I) memcpy(&own, x + i * x_row + k, sizeof own);
            __m512bh all = (__m512bh)_mm512_set1_epi32((int)own);
            for (int j = 0; j < 2; j++)
                sums[i][j] = (register_vector)_mm512_dpbf16_ps((__m512)sums[i][j], all, (__m512bh)pairs[j]);
        }
#endif
#else
        register_vector each[2];
        for (int j = 0; j < 2; j++) memcpy(&each[j], w + j * WIDTH, sizeof each[j]);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++)
            for (int j = 0; j < 2; j++) sums[i][j] += x[i * x_row + k] * each[j];
#endif
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) memcpy(to + i * BLOCK, sums[i], sizeof sums[i]);
}

/* The same for any number of rows with a whole block. */
static void many(int64_t rows, const factor *x, int64_t x_row, int64_t I, const stored *w, const char *ask,
                 int64_t step, float to[][BLOCK]) {
    for (int64_t o = 0; o < BLOCK; o += 2 * WIDTH)
        for (int64_t i = 0, m; i < rows; i += m, ask += step * I / PAIR) {
            const factor *own = x + i * x_row;
            const stored *part = w + o * PAIR;
            float *sums = &to[i][o];
            m = rows - i >= ROWS ? ROWS : rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;
            if (m == ROWS) few(ROWS, own, x_row, I, part, ask, step, sums);
            if (m == 4) few(4, own, x_row, I, part, ask, step, sums);
            if (m == 2) few(2, own, x_row, I, part, ask, step, sums);
            if (m == 1) few(1, own, x_row, I, part, ask, step, sums);
        }
}

/* x rounded to the stored format. */
static inline vector narrowed(vector x) {
    stored part[LANES];
    store(part, x);
    return load(part);
}

/* Sums of `count` rows with a block whose outputs begin at `at`, of O, and their use by `kind`. */
struct sums {
    float (*rows)[BLOCK];
    int64_t count, at, O, out_row;
    const stored *bias;
    stored *out;
    int kind;
};

/* Use the sums of some rows; the block has `left` outputs, at most BLOCK. */
static inline __attribute__((always_inline)) void use(const struct sums *sums, int64_t begin, int64_t end, int kind,
                                                      int64_t left) {
    int64_t at = kind >= GATED ? sums->at / 2 : sums->at;
    for (int64_t i = begin; i < end; i++) {
        stored *out = sums->out + i * sums->out_row + at;
        vector each[2];
        for (int j = 0; j < 2; j++) memcpy(&each[j], sums->rows[i] + j * LANES, sizeof each[j]);
        if (kind >= GATED) {
            vector gate = narrowed(each[0]), made = gate * sigmoid(argument(gate, kind - GATED)) * narrowed(each[1]);
            store_part(out, made, left / 2);
            continue;
        }
        for (int64_t j = 0; j < 2 && j * LANES < left; j++) {
            int64_t part = left - j * LANES;
            if (sums->bias) each[j] += load_part(sums->bias + at + j * LANES, part);
            if (kind == ADDED) each[j] = load_part(out + j * LANES, part) + narrowed(each[j]);
            store_part(out + j * LANES, each[j], part);
        }
    }
}

/* The same, compiled for the kinds of whole blocks. */
static __attribute__((noinline)) void finish(const struct sums *sums, int64_t begin, int64_t end) {
    int64_t left = sums->O - sums->at;
    if (left < BLOCK)
        use(sums, begin, end, sums->kind, left);
    else if (sums->kind == PLAIN)
        use(sums, begin, end, PLAIN, BLOCK);
    else if (sums->kind == ADDED)
        use(sums, begin, end, ADDED, BLOCK);
    else if (sums->kind == GATED)
        use(sums, begin, end, GATED, BLOCK);
    else
        use(sums, begin, end, sums->kind, BLOCK);
}

#ifdef TILES
static int tiles;

/* Request permission from the kernel to use the processor's tiles, once. */
static __attribute__((constructor)) void ask_for_tiles(void) { tiles = !syscall(SYS_arch_prctl, 0x1023, 18); }

static void begin_tiles(void) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;
    if (tiles) _tile_loadconfig(&config);
}

static void end_tiles(void) {
    if (tiles) _tile_release();
}

/* Steps of the inputs for which the tiles of TILED rows and of a block fit in the first-level cache, and those for
   which the tiles of a block alone do. */
#define CHUNK 4
#define MANY 12

/* Add the products of one tile of rows, or two with `pair`, and some steps of the inputs to the sums; without `begun`
   these are 0. With each step prefetch `bytes` of the weight, and use `share` rows of the sums `before`, from `*used`
   on: that takes time in which tiles wait for the weight. */
static inline __attribute__((always_inline)) void add_tiles(int pair, int begun, int64_t steps, const stored *x,
                                                            int64_t x_step, const stored *w, const char *ask,
                                                            int64_t bytes, float to[][BLOCK],
                                                            const struct sums *before, int64_t share, int64_t *used) {
    if (begun) {
        _tile_loadd(0, to[0], 128);
        _tile_loadd(1, to[0] + 16, 128);
        if (pair) _tile_loadd(2, to[TILE], 128);
        if (pair) _tile_loadd(3, to[TILE] + 16, 128);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, x += x_step, w += STEP * BLOCK, ask += STEP * BLOCK * sizeof(stored)) {
        _tile_loadd(6, w, 128);
        _tile_loadd(7, w + 32, 128);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ask + i, 0, 2);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (pair) {
            _tile_loadd(5, x + TILE * STEP, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (*used < before->count) {
            int64_t begin = *used;
            *used = begin + share < before->count ? begin + share : before->count;
            finish(before, begin, *used);
        }
    }
    _tile_stored(0, to[0], 128);
    _tile_stored(1, to[0] + 16, 128);
    if (pair) _tile_stored(2, to[TILE], 128);
    if (pair) _tile_stored(3, to[TILE] + 16, 128);
}

/* The sums of rows in `count` tiles [inputs / STEP, count, TILE, STEP] with a block. Of a block that does not fit in
   the first-level cache, a chunk is used for all rows before the next one is read. The sums `before` are used
   meanwhile. */
static void by_tiles(int64_t count, const stored *x, int64_t inputs, const stored *w, const char *ask, int64_t bytes,
                     float to[][BLOCK], const struct sums *before) {
    int64_t steps = inputs / STEP, parts = steps * whole(count, 2) / 2, share = whole(before->count, parts) / parts;
    int64_t used = 0, x_step = count * TILE * STEP, chunk = count > 2 && steps > MANY ? CHUNK : steps;
    for (int64_t k = 0; k < steps; k += chunk) {
        int64_t some = steps - k < chunk ? steps - k : chunk;
        const stored *own_w = w + k * STEP * BLOCK;
        const char *own_ask = ask + k * STEP * BLOCK * sizeof(stored);
        for (int64_t t = 0; t < count; t += 2, own_ask += bytes) {
            const stored *own = x + k * x_step + t * TILE * STEP;
            float(*sums)[BLOCK] = to + t * TILE;
            if (t + 1 < count)
                add_tiles(1, k > 0, some, own, x_step, own_w, own_ask, bytes, sums, before, share, &used);
            else
                add_tiles(0, k > 0, some, own, x_step, own_w, own_ask, bytes, sums, before, share, &used);
        }
    }
}
#else
enum { tiles = 0 };
static void begin_tiles(void) {}
static void end_tiles(void) {}
static void by_tiles(int64_t count, const stored *x, int64_t inputs, const stored *w, const char *ask, int64_t bytes,
                     float to[][BLOCK], const struct sums *before) {}
#endif

/* Elements of working memory for a product with R rows of I inputs. */
static int64_t product_size(int64_t R, int64_t I) {
    int64_t factors = whole(R, TILE) * whole(I, STEP);
    return WIDENED ? factors * (int64_t)(sizeof(float) / sizeof(stored)) : tiles ? factors : 0;
}

/* Write x [R, I] as tiles: for each TILED rows [inputs / STEP, tiles, TILE, STEP]. Rows and inputs that do not fill a
   tile are 0. Called by each thread of a team. */
static void tile_rows(const stored *x, int64_t R, int64_t I, int64_t x_row, stored *to) {
    int64_t inputs = whole(I, STEP);
#pragma omp for
    for (int64_t t = 0; t < whole(R, TILE) / TILE; t++) {
        int64_t first = t * TILE / TILED * TILED, rows = R - first < TILED ? R - first : TILED;
        int64_t count = whole(rows, TILE) / TILE;
        stored *tile = to + first * inputs + (t - first / TILE) * TILE * STEP;
        for (int64_t k = 0; k < inputs; k += STEP, tile += count * TILE * STEP)
            for (int64_t i = 0, r = t * TILE; i < TILE; i++, r++) {
                int64_t filled = r < R ? I - k : 0;
                if (filled >= STEP)
                    memcpy(tile + i * STEP, x + r * x_row + k, STEP * sizeof(stored));
                else
                    for (int64_t j = 0; j < STEP; j++) tile[i * STEP + j] = j < filled ? x[r * x_row + k + j] : 0;
            }
    }
}

/* x [R, I] times a packed weight of O outputs, into rows of `out`. */
static void product(const stored *x, int64_t R, int64_t I, int64_t x_row, const stored *w, int64_t O,
                    const stored *bias, int kind, stored *out, int64_t out_row, stored *working, int threads) {
    if (!R) return;
    int64_t inputs = whole(I, STEP), blocks = whole(O, BLOCK) / BLOCK, most = tiles ? TILED : TALL;
    const factor *factors = WIDENED ? (const factor *)working : (const factor *)x;
    int64_t factors_row = WIDENED ? inputs : x_row;
    /* While it computes with a block, it prefetches a later part of the weight, a share with each few rows: with up to
       TILED rows in tiles what comes some steps later, else the next block. */
    int64_t each = tiles ? 2 * TILE : ROWS, calls = tiles ? 1 : BLOCK / (2 * WIDTH);
    int64_t turns = whole(R, each) / each * calls;
    int64_t bytes = tiles ? whole(LINES, turns) / turns * 64 : turns > 1 ? 128 / turns : 64;
    int64_t part = tiles ? bytes : calls * bytes * inputs / PAIR, ahead = tiles && R <= TILED ? 8 * STEP : inputs;
#pragma omp parallel num_threads(threads)
    {
        float memory[2][TILED][BLOCK] __attribute__((aligned(64)));
        /* With tiles, the sums of a block are used while those of the next one are computed. */
        struct sums before = {.kind = kind, .bias = bias, .O = O, .out_row = out_row}, now = before;
        if (tiles) {
            tile_rows(x, R, I, x_row, working);
        } else if (WIDENED) {
#pragma omp for
            for (int64_t r = 0; r < R; r++)
                for (int64_t k = 0; k < inputs; k++)
                    ((float *)working)[r * inputs + k] = k < I ? wide(x[r * x_row + k]) : 0;
        }
        begin_tiles();
#pragma omp for
        for (int64_t b = 0; b < blocks; b++) {
            const stored *block = w + b * BLOCK * inputs;
            const char *ask = (const char *)(block + BLOCK * ahead);
            for (int64_t r = 0; r < R; r += now.count, ask += most / each * part) {
                now.rows = memory[now.rows == memory[0]], now.count = R - r < most ? R - r : most;
                now.at = b * BLOCK, now.out = out + r * out_row;
                if (tiles) {
                    const stored *own = working + r * inputs;
                    by_tiles(whole(now.count, TILE) / TILE, own, inputs, block, ask, bytes, now.rows, &before);
                    before = now;
                } else {
                    many(now.count, factors + r * factors_row, factors_row, I, block, ask, bytes, now.rows);
                    finish(&now, 0, now.count);
                }
            }
        }
        end_tiles();
        finish(&before, 0, before.count);
    }
}

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
    int64_t at[PARTS], layer_size, layers, V, D, H, G, K, I, activation;
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
    int64_t queries = m->H * m->K, most = m->D > m->I ? m->D : m->I;
    return rows_size(m, rows) + whole(product_size(rows, most > queries ? most : queries), 64 / sizeof(stored));
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
        product(normed, R, D, D, of[QKV], row, of[QKV_BIAS], PLAIN, qkv, row, rest, threads);
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
                            seen, R, G, pages, queries, G * K, row, m->windows[layer], 1 / sqrtf(K), threads);
        /* The output of a branch that is normed before it is added replaces the branch's input. */
        int branch = of[O_NORM] ? PLAIN : ADDED, gate = GATED + (int)m->activation;
        stored *to = of[O_NORM] ? normed : x;
        product(seen, R, queries, queries, of[O_PROJ], D, NULL, branch, to, D, rest, threads);
        if (of[O_NORM]) add_normed(m, of[O_NORM], normed, x, R, threads);
        m->rms_norm(x, of[MLP_NORM], normed, R, D, D, m->eps, m->offset, threads);
        product(normed, R, D, D, of[GATE_UP], 2 * I, NULL, gate, gated, I, rest, threads);
        product(gated, R, I, I, of[DOWN], D, NULL, branch, to, D, rest, threads);
        if (of[DOWN_NORM]) add_normed(m, of[DOWN_NORM], normed, x, R, threads);
    }
    m->rms_norm(x, m->norm, out, R, D, D, m->eps, m->offset, threads);
    return failed;
}

/* Logits `out` [R, V] of hidden states [R, D], whose rows are contiguous. */
void logits(const struct model *m, const stored *hidden, int64_t R, stored *working, stored *out, int threads) {
    product(hidden, R, m->D, m->D, m->head, m->V, NULL, PLAIN, out, m->V, working, threads);
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
