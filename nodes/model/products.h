/* Products of rows with packed weights, for a CPU.

   An output is summed in the order of the inputs, by one lane of a tile or a vector: the bits of a row depend only on
   its own numbers, for any number of rows. With BF16 tensors are bfloat16, and sums are float32. A weight may also be
   in eight bits: then integers are multiplied, and the product is that of `eight_bit.py` to the bit.

   A GROUP is four bytes of an output's weights: one float, two of bfloat16, or four of eight bits. */

#include <float.h>
#include <stdlib.h>

#include "activations.h"

/* 1 if products of eight bits have an instruction of their own, which adds to each lane the products of a group of
   unsigned with a group of signed numbers. */
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define INT8
#define ADD_GROUPS(to, w, x) (int_register)_mm512_dpbusd_epi32((__m512i)(to), (__m512i)(w), (__m512i)(x))
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__AVXVNNI__)
#include <immintrin.h>
#define INT8
#define ADD_GROUPS(to, w, x) (int_register)_mm256_dpbusd_avx_epi32((__m256i)(to), (__m256i)(w), (__m256i)(x))
#endif
#ifdef INT8
const int int8_products = 1;
#else
const int int8_products = 0;
#endif

/* 1 if products of stored numbers, and of eight bits, use tiles. */
#if defined(BF16) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define TILES_STORED 1
#else
#define TILES_STORED 0
#endif
#if defined(INT8) && defined(__AMX_INT8__)
#define TILES_INT8 1
#else
#define TILES_INT8 0
#endif
#if TILES_STORED || TILES_INT8
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
typedef int32_t int_register __attribute__((vector_size(4 * WIDTH)));
typedef int8_t int8_vector __attribute__((vector_size(LANES)));
/* The rows in products: as they are or, without an instruction for pairs of bfloat16, as floats. */
#if defined(BF16) && !defined(__AVX512BF16__)
typedef float factor;
#define WIDENED 1
#else
typedef stored factor;
#define WIDENED 0
#endif
/* Inputs of a packed weight are padded to a multiple of STEP, and those of the same output are adjacent in groups: of
   PAIR stored numbers, or of QUAD of eight bits. */
#ifdef BF16
#define STEP 32
#define PAIR 2
#else
#define STEP 1
#define PAIR 1
#endif
#define STEP_INT8 64
#define QUAD 4
#define GROUP 4

/* Bytes of a row at a step of the inputs that tiles multiply. */
#define TILE_BYTES 64

static int64_t padded(int64_t I, int is_int8) { return whole(I, is_int8 ? STEP_INT8 : STEP); }

/* Bytes of a row's inputs, and of a block of a packed weight. In eight bits a block begins with its outputs' scales,
   and its elements are stored as unsigned, 128 more than they are: the instructions multiply signed by unsigned. */
static int64_t row_bytes(int64_t I, int is_int8) {
    return padded(I, is_int8) * (is_int8 ? 1 : (int64_t)sizeof(stored));
}
#define SCALES (BLOCK * (int64_t)sizeof(float))
#define OFFSET 128
static int64_t block_bytes(int64_t I, int is_int8) { return BLOCK * row_bytes(I, is_int8) + (is_int8 ? SCALES : 0); }

/* The use of a product's sums: PLAIN stores them, ADDED adds them to the present outputs, and GATED plus the number of
   an activation, for blocks of LANES gates and LANES others, stores activation(gate) * other. */
enum { PLAIN, ADDED, GATED };

/* 1 if the processor has the instructions that make these products as fast as oneDNN's. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
const int fast = 1;
#else
const int fast = 0;
#endif

/* The size of a packed weight [O, I], in stored numbers. */
int64_t packed_size(int64_t O, int64_t I, int is_int8) {
    return whole(O, BLOCK) / BLOCK * block_bytes(I, is_int8) / (int64_t)sizeof(stored);
}

/* Write a weight [O, I] into a packed one: of stored numbers or, if it has `scales` [O], of eight bits. Its output o
   becomes output `at` + o. With `gated`, blocks have LANES outputs of each of two weights, and o is number o of the
   first (`at` 0) or of the second one (`at` LANES). */
void pack(const void *w, const float *scales, char *to, int64_t O, int64_t I, int64_t at, int gated, int threads) {
    int is_int8 = scales != NULL;
    int64_t inputs = padded(I, is_int8), bytes = block_bytes(I, is_int8), each = is_int8 ? QUAD : PAIR;
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < O; first += LANES)
        for (int64_t k = 0; k < inputs; k += each)
            for (int64_t o = first; o < O && o < first + LANES; o++) {
                int64_t place = gated ? o / LANES * BLOCK + o % LANES + at : at + o;
                char *block = to + place / BLOCK * bytes, *group = block + k / each * BLOCK * GROUP;
                group += place % BLOCK * GROUP;
                if (is_int8) {
                    const uint8_t *from = (const uint8_t *)w + o * I + k;
                    if (!k) ((float *)block)[place % BLOCK] = scales[o];
                    for (int64_t i = 0; i < QUAD; i++) group[SCALES + i] = (char)(k + i < I ? from[i] ^ OFFSET : 0);
                } else {
                    const stored *from = (const stored *)w + o * I + k;
                    for (int64_t i = 0; i < PAIR; i++) ((stored *)group)[i] = k + i < I ? from[i] : 0;
                }
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

/* The same in eight bits, whose sums are integers, with the elements of a block. */
static inline __attribute__((always_inline)) void few_int8(int m, const int8_t *x, int64_t x_row, int64_t I,
                                                           const char *w, const char *ask, int64_t step, float *to) {
#ifdef INT8
    int_register sums[ROWS][2] = {0};
#pragma GCC unroll 4
    for (int64_t k = 0; k < I; k += QUAD, w += GROUP * BLOCK, ask += step) {
        __builtin_prefetch(ask, 0, 2);
        int_register each[2];
        for (int j = 0; j < 2; j++) memcpy(&each[j], w + j * GROUP * WIDTH, sizeof each[j]);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            int32_t own;
            memcpy(&own, x + i * x_row + k, sizeof own);
            int_register all = (int_register){0} + own;
            for (int j = 0; j < 2; j++) sums[i][j] = ADD_GROUPS(sums[i][j], each[j], all);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++) memcpy(to + i * BLOCK, sums[i], sizeof sums[i]);
#endif
}

/* The same for any number of rows with a whole block. */
static inline __attribute__((always_inline)) void any_rows(int is_int8, int64_t rows, const void *x, int64_t x_row,
                                                           int64_t I, const char *w, const char *ask, int64_t step,
                                                           float to[][BLOCK]) {
    for (int64_t o = 0; o < BLOCK; o += 2 * WIDTH)
        for (int64_t i = 0, m; i < rows; i += m, ask += step * I / (is_int8 ? QUAD : PAIR)) {
            const char *part = w + o * GROUP;
            float *sums = &to[i][o];
            m = rows - i >= ROWS ? ROWS : rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;
            if (is_int8) {
                const int8_t *own = (const int8_t *)x + i * x_row;
                if (m == ROWS) few_int8(ROWS, own, x_row, I, part, ask, step, sums);
                if (m == 4) few_int8(4, own, x_row, I, part, ask, step, sums);
                if (m == 2) few_int8(2, own, x_row, I, part, ask, step, sums);
                if (m == 1) few_int8(1, own, x_row, I, part, ask, step, sums);
            } else {
                const factor *own = (const factor *)x + i * x_row;
                const stored *pairs = (const stored *)part;
                if (m == ROWS) few(ROWS, own, x_row, I, pairs, ask, step, sums);
                if (m == 4) few(4, own, x_row, I, pairs, ask, step, sums);
                if (m == 2) few(2, own, x_row, I, pairs, ask, step, sums);
                if (m == 1) few(1, own, x_row, I, pairs, ask, step, sums);
            }
        }
}

/* GCC compiles the body of a parallel region before it inlines anything into it, so what depends on `is_int8` is a
   constant only in functions of their own. */
static __attribute__((noinline)) void many(int64_t rows, const void *x, int64_t x_row, int64_t I, const char *w,
                                           const char *ask, int64_t step, float to[][BLOCK]) {
    any_rows(0, rows, x, x_row, I, w, ask, step, to);
}

static __attribute__((noinline)) void many_int8(int64_t rows, const void *x, int64_t x_row, int64_t I, const char *w,
                                                const char *ask, int64_t step, float to[][BLOCK]) {
    any_rows(1, rows, x, x_row, I, w, ask, step, to);
}

/* x rounded to the stored format. */
static inline vector narrowed(vector x) {
    stored part[LANES];
    store(part, x);
    return load(part);
}

/* What a row of eight bits is multiplied by, and the sum of its elements. */
struct quantised_row {
    float scale;
    int32_t sum;
};

/* Sums of `count` rows with a block whose outputs begin at `at`, of O, and their use by `kind`. With `quantised` of the
   rows they are integers, and `scales` those of the block. */
struct sums {
    float (*rows)[BLOCK];
    int64_t count, at, O, out_row;
    const stored *bias;
    stored *out;
    int kind;
    const struct quantised_row *quantised;
    const float *scales;
};

/* Use the sums of some rows; the block has `left` outputs, at most BLOCK. */
static inline __attribute__((always_inline)) void use(const struct sums *sums, int64_t begin, int64_t end, int kind,
                                                      int64_t left) {
    int64_t at = kind >= GATED ? sums->at / 2 : sums->at;
    for (int64_t i = begin; i < end; i++) {
        stored *out = sums->out + i * sums->out_row + at;
        vector each[2];
        for (int j = 0; j < 2; j++) memcpy(&each[j], sums->rows[i] + j * LANES, sizeof each[j]);
#ifdef INT8
        for (int j = 0; j < 2 && sums->quantised; j++) {
            bits_vector exact = (bits_vector)each[j] - OFFSET * (uint32_t)sums->quantised[i].sum;
            vector scales;
            memcpy(&scales, sums->scales + j * LANES, sizeof scales);
            each[j] = __builtin_convertvector((int_vector)exact, vector) * scales * sums->quantised[i].scale;
            /* Round this before a bias is added: no fused multiplication and addition. */
            __asm__("" : "+m"(each[j]));
        }
#endif
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

#if TILES_STORED || TILES_INT8
static int allowed;
static int uses_tiles(int is_int8) { return allowed && (is_int8 ? TILES_INT8 : TILES_STORED); }

/* Request permission from the kernel to use the processor's tiles, once. */
static __attribute__((constructor)) void ask_for_tiles(void) { allowed = !syscall(SYS_arch_prctl, 0x1023, 18); }

static void begin_tiles(void) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
}

static void end_tiles(void) { _tile_release(); }

/* Add the products of a tile of rows and a tile of a weight. */
#if TILES_STORED
#define ADD_STORED(to, x, w) _tile_dpbf16ps(to, x, w)
#else
#define ADD_STORED(to, x, w) (void)0
#endif
#if TILES_INT8
#define ADD_INT8(to, x, w) _tile_dpbsud(to, x, w)
#else
#define ADD_INT8(to, x, w) (void)0
#endif
#define ADD_PRODUCTS(to, x, w)   \
    if (is_int8)                   \
        ADD_INT8(to, x, w);     \
    else                         \
        ADD_STORED(to, x, w)

/* Steps of the inputs for which the tiles of TILED rows and of a block fit in the first-level cache, and those for
   which the tiles of a block alone do. */
#define CHUNK 4
#define MANY 12

/* Add the products of one tile of rows, or two with `pair`, and some steps of the inputs to the sums; without `begun`
   these are 0. With each step prefetch `bytes` of the weight, and use `share` rows of the sums `before`, from `*used`
   on: that takes time in which tiles wait for the weight. */
static inline __attribute__((always_inline)) void add_tiles(int is_int8, int pair, int begun, int64_t steps,
                                                            const char *x, int64_t x_step, const char *w,
                                                            const char *ask, int64_t bytes, float to[][BLOCK],
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
    for (int64_t k = 0; k < steps; k++, x += x_step, w += TILE_BYTES * BLOCK, ask += TILE_BYTES * BLOCK) {
        _tile_loadd(6, w, 128);
        _tile_loadd(7, w + 64, 128);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ask + i, 0, 2);
        _tile_loadd(4, x, 64);
        ADD_PRODUCTS(0, 4, 6);
        ADD_PRODUCTS(1, 4, 7);
        if (pair) {
            _tile_loadd(5, x + TILE * TILE_BYTES, 64);
            ADD_PRODUCTS(2, 5, 6);
            ADD_PRODUCTS(3, 5, 7);
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

/* The sums of rows in `count` tiles [steps, count, TILE, TILE_BYTES] with a block. Of a block that does not fit in the
   first-level cache, a chunk is used for all rows before the next one is read. The sums `before` are used meanwhile. */
static inline __attribute__((always_inline)) void any_tiles(int is_int8, int64_t count, const char *x, int64_t steps,
                                                            const char *w, const char *ask, int64_t bytes,
                                                            float to[][BLOCK], const struct sums *before) {
    int64_t parts = steps * whole(count, 2) / 2, share = whole(before->count, parts) / parts;
    int64_t used = 0, x_step = count * TILE * TILE_BYTES, chunk = count > 2 && steps > MANY ? CHUNK : steps;
    for (int64_t k = 0; k < steps; k += chunk) {
        int64_t some = steps - k < chunk ? steps - k : chunk;
        const char *own_w = w + k * TILE_BYTES * BLOCK, *own_ask = ask + k * TILE_BYTES * BLOCK;
        for (int64_t t = 0; t < count; t += 2, own_ask += bytes) {
            const char *own = x + k * x_step + t * TILE * TILE_BYTES;
            float(*sums)[BLOCK] = to + t * TILE;
            if (t + 1 < count)
                add_tiles(is_int8, 1, k > 0, some, own, x_step, own_w, own_ask, bytes, sums, before, share, &used);
            else
                add_tiles(is_int8, 0, k > 0, some, own, x_step, own_w, own_ask, bytes, sums, before, share, &used);
        }
    }
}

static __attribute__((noinline)) void by_tiles(int64_t count, const char *x, int64_t steps, const char *w,
                                               const char *ask, int64_t bytes, float to[][BLOCK],
                                               const struct sums *before) {
    any_tiles(0, count, x, steps, w, ask, bytes, to, before);
}

static __attribute__((noinline)) void by_tiles_int8(int64_t count, const char *x, int64_t steps, const char *w,
                                                    const char *ask, int64_t bytes, float to[][BLOCK],
                                                    const struct sums *before) {
    any_tiles(1, count, x, steps, w, ask, bytes, to, before);
}
#else
static int uses_tiles(int is_int8) { return 0; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
static void by_tiles(int64_t count, const char *x, int64_t steps, const char *w, const char *ask, int64_t bytes,
                     float to[][BLOCK], const struct sums *before) {}
#define by_tiles_int8 by_tiles
#endif

/* Stored numbers of working memory for a product with R rows of I inputs. */
static int64_t product_size(int64_t R, int64_t I, int is_int8) {
    int64_t bytes = whole(R, TILE) * row_bytes(I, is_int8);
    if (is_int8) return (bytes + R * (int64_t)sizeof(struct quantised_row)) / (int64_t)sizeof(stored);
    return WIDENED ? bytes / (int64_t)sizeof(stored) * 2 : uses_tiles(0) ? bytes / (int64_t)sizeof(stored) : 0;
}

/* The place of row r's first step in working memory with R rows, and the bytes from one step to the next: rows one
   after the other, or as tiles, for each TILED rows [steps, tiles, TILE, TILE_BYTES]. */
static int64_t place_of(int64_t r, int64_t R, int64_t bytes, int tiled, int64_t *next) {
    int64_t first = r / TILED * TILED, rows = R - first < TILED ? R - first : TILED;
    *next = tiled ? whole(rows, TILE) * TILE_BYTES : TILE_BYTES;
    return tiled ? first * bytes + (r - first) * TILE_BYTES : r * bytes;
}

/* Write x [R, I] as tiles. Inputs that do not fill a step are 0; rows that do not fill a tile are those of an earlier
   product, and so are their sums, which nothing uses. Called by each thread of a team, as `quantise` is. */
static void tile_rows(const stored *x, int64_t R, int64_t I, int64_t x_row, char *to) {
#pragma omp for
    for (int64_t r = 0; r < R; r++) {
        int64_t next, left = I * (int64_t)sizeof(stored);
        char *step = to + place_of(r, R, row_bytes(I, 0), 1, &next);
        const char *from = (const char *)(x + r * x_row);
        for (; left >= TILE_BYTES; left -= TILE_BYTES, from += TILE_BYTES, step += next) memcpy(step, from, TILE_BYTES);
        if (left) {
            memset(step, 0, TILE_BYTES);
            memcpy(step, from, left);
        }
    }
}

static inline int8_vector to_int8(int_vector x) {
#ifdef __AVX512F__
    /* One instruction; GCC compiles the line below to one for each lane. */
    return (int8_vector)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x, int8_vector);
#endif
}

/* Write x [R, I] in eight bits, as `QuantisedRows.of` does: the largest magnitude of a row becomes 127. */
static void quantise(const stored *x, int64_t R, int64_t I, int64_t x_row, int tiled, char *to,
                     struct quantised_row *quantised) {
    const vector none = {0}, magic = none + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
#pragma omp for
    for (int64_t r = 0; r < R; r++) {
        const stored *own = x + r * x_row;
        /* The bits of magnitudes have the order of the magnitudes, and those of NaN are the largest. */
        int_vector most = {0};
        bits_vector sums = {0};
        for (int64_t d = 0; d < I; d += LANES) {
            int_vector bits = (int_vector)load_part(own + d, I - d) & 0x7fffffff, more = bits > most;
            most = (bits & more) | (most & ~more);
        }
        int32_t largest = 0;
        uint32_t sum = 0;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        float scale;
        memcpy(&scale, &largest, sizeof scale);
        scale /= 127.0f;
        if (scale < FLT_MIN) scale = FLT_MIN;
        int64_t next;
        char *step = to + place_of(r, R, row_bytes(I, 1), tiled, &next);
        for (int64_t d = 0; d < padded(I, 1); d += STEP_INT8, step += next)
            for (int64_t j = 0; j < STEP_INT8; j += LANES) {
                vector each = d + j < I ? load_part(own + d + j, I - d - j) : none;
                int_vector integers = __builtin_convertvector((each / scale + magic) - magic, int_vector);
                int8_vector narrow = to_int8(integers);
                sums += (bits_vector)integers; /* of what is no number it is any number, as the product is */
                memcpy(step + j, &narrow, sizeof narrow);
            }
        for (int i = 0; i < LANES; i++) sum += sums[i];
        quantised[r].scale = scale, quantised[r].sum = (int32_t)sum;
    }
}

/* x [R, I] times a packed weight of O outputs, of stored numbers or of eight bits, into rows of `out`. */
static void product(const stored *x, int64_t R, int64_t I, int64_t x_row, const stored *w, int is_int8, int64_t O,
                    const stored *bias, int kind, stored *out, int64_t out_row, stored *working, int threads) {
    if (!R) return;
    int tiled = uses_tiles(is_int8), copied = is_int8 || tiled || WIDENED;
    int64_t inputs = padded(I, is_int8), row = row_bytes(I, is_int8), bytes_each = block_bytes(I, is_int8);
    int64_t blocks = whole(O, BLOCK) / BLOCK, most = tiled ? TILED : TALL;
    char *own_rows = (char *)working;
    const char *rows = copied ? own_rows : (const char *)x;
    int64_t own_row = is_int8 || tiled ? row : (copied ? inputs : x_row) * (int64_t)sizeof(factor);
    struct quantised_row *quantised = is_int8 ? (struct quantised_row *)(own_rows + whole(R, TILE) * row) : NULL;
    /* While it computes with a block, it prefetches a later part of the weight, a share with each few rows: with up to
       TILED rows in tiles what comes some steps later, else the next block. Per step of tiles, or per group. */
    int64_t each = tiled ? 2 * TILE : ROWS, calls = tiled ? 1 : BLOCK / (2 * WIDTH);
    int64_t turns = whole(R, each) / each * calls, lines = TILE_BYTES * BLOCK / 64;
    int64_t bytes = tiled ? whole(lines, turns) / turns * 64 : turns > 1 ? BLOCK * GROUP / turns : 64;
    int64_t part = tiled ? bytes : calls * bytes * (row / GROUP);
    int64_t ahead = tiled && R <= TILED ? 8 * TILE_BYTES * BLOCK : bytes_each;
#pragma omp parallel num_threads(threads)
    {
        float memory[2][TILED][BLOCK] __attribute__((aligned(64)));
        /* With tiles, the sums of a block are used while those of the next one are computed. */
        struct sums before = {.kind = kind, .bias = bias, .O = O, .out_row = out_row}, now = before;
        if (is_int8) {
            quantise(x, R, I, x_row, tiled, own_rows, quantised);
        } else if (tiled) {
            tile_rows(x, R, I, x_row, own_rows);
        } else if (WIDENED) {
#pragma omp for
            for (int64_t r = 0; r < R; r++)
                for (int64_t k = 0; k < inputs; k++)
                    ((float *)own_rows)[r * inputs + k] = k < I ? wide(x[r * x_row + k]) : 0;
        }
        if (tiled) begin_tiles();
#pragma omp for
        for (int64_t b = 0; b < blocks; b++) {
            const char *block = (const char *)w + b * bytes_each, *ask = block + ahead;
            const char *elements = block + (is_int8 ? SCALES : 0);
            for (int64_t r = 0; r < R; r += now.count, ask += most / each * part) {
                now.rows = memory[now.rows == memory[0]], now.count = R - r < most ? R - r : most;
                now.at = b * BLOCK, now.out = out + r * out_row;
                const char *own = rows + r * own_row;
                if (is_int8) now.quantised = quantised + r, now.scales = (const float *)block;
                if (tiled) {
                    int64_t count = whole(now.count, TILE) / TILE;
                    if (is_int8)
                        by_tiles_int8(count, own, row / TILE_BYTES, elements, ask, bytes, now.rows, &before);
                    else
                        by_tiles(count, own, row / TILE_BYTES, elements, ask, bytes, now.rows, &before);
                    before = now;
                } else {
                    if (is_int8)
                        many_int8(now.count, own, row, inputs, elements, ask, bytes, now.rows);
                    else
                        many(now.count, own, copied ? inputs : x_row, I, elements, ask, bytes, now.rows);
                    finish(&now, 0, now.count);
                }
            }
        }
        if (tiled) end_tiles();
        finish(&before, 0, before.count);
    }
}
