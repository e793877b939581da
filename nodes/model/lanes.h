/* Vectors of LANES floats, which the compiler maps to the registers that there are, and sums of them in a fixed
   order. */

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float register_vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t int_vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_vector __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint16_t narrow_vector __attribute__((vector_size(2 * LANES)));

static inline vector load(const stored *from) {
    narrow_vector narrow;
    memcpy(&narrow, from, sizeof narrow);
#ifdef __AVX512F__
    /* One instruction; GCC compiles the line below to four. */
    return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow), 16);
#else
    return (vector)(__builtin_convertvector(narrow, bits_vector) << 16);
#endif
}

/* As `rounded`, except that with AVX512_BF16 subnormal numbers become 0. */
static inline void store(stored *to, vector x) {
#ifdef __AVX512BF16__
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
    bits_vector bits = (bits_vector)x, none = (bits_vector)(x != x);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    narrow_vector narrow = __builtin_convertvector((bits & ~none) | (none & 0x7fc0), narrow_vector);
#endif
    memcpy(to, &narrow, sizeof narrow);
}
#else
static inline vector load(const stored *from) {
    vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline void store(stored *to, vector x) { memcpy(to, &x, sizeof x); }
#endif

/* The first n numbers, at most LANES; the other lanes are 0. */
static inline vector load_part(const stored *from, int64_t n) {
    if (n >= LANES) return load(from);
    stored part[LANES] = {0};
    memcpy(part, from, n * sizeof(stored));
    return load(part);
}

static inline void store_part(stored *to, vector x, int64_t n) {
    if (n >= LANES) {
        store(to, x);
        return;
    }
    stored part[LANES];
    store(part, x);
    memcpy(to, part, n * sizeof(stored));
}

static inline float sum(const float lanes[LANES]) {
    float parts[LANES];
    memcpy(parts, lanes, sizeof parts);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

#if defined(__AVX512F__) && !defined(__clang__)
/* For each lane the index of the lane `half` lanes away, which `sum` adds to it, or it to that one. */
#define ACROSS(half) ((int_vector){0 ^ half, 1 ^ half, 2 ^ half, 3 ^ half, 4 ^ half, 5 ^ half, 6 ^ half, 7 ^ half, \
                                   8 ^ half, 9 ^ half, 10 ^ half, 11 ^ half, 12 ^ half, 13 ^ half, 14 ^ half, 15 ^ half})

static inline float total(vector x) {
    x += __builtin_shuffle(x, ACROSS(8));
    x += __builtin_shuffle(x, ACROSS(4));
    x += __builtin_shuffle(x, ACROSS(2));
    return x[0] + x[1];
}

static inline float largest(vector x) { return _mm512_reduce_max_ps((__m512)x); }
#else
static inline float total(vector x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    return sum(lanes);
}

static inline float largest(vector x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}
#endif

/* As `exponential`, and 0 below -87. */
static inline vector exponentials(vector x) {
    const vector none = {0}, magic = none + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    vector whole = (x * 1.44269504f + magic) - magic;
    vector r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    int_vector power = (__builtin_convertvector(whole, int_vector) + 127) << 23, low = x < -87.0f, nan = x != x;
    vector found = ((p * r) * r + r + 1.0f) * (vector)power;
    return (vector)((~(bits_vector)low & (bits_vector)found) | ((bits_vector)nan & (bits_vector)x));
}

#if defined(__AVX512F__) && !defined(__clang__)
/* In a matrix of LANES rows, swap blocks of HALF columns between rows i and i + HALF. With HALF = 8, 4, 2 and 1 in turn
   this transposes the matrix. */
#define KEEP(h, l) ((l) & (h) ? LANES + (l) - (h) : (l))
#define TAKE(h, l) ((l) & (h) ? LANES + (l) : (l) + (h))
#define ALL(f, h) {f(h, 0), f(h, 1), f(h, 2), f(h, 3), f(h, 4), f(h, 5), f(h, 6), f(h, 7), f(h, 8), f(h, 9), f(h, 10), \
                   f(h, 11), f(h, 12), f(h, 13), f(h, 14), f(h, 15)}
#define SWAP(HALF)                                                              \
    for (int i = 0; i < LANES; i++)                                             \
        if (!(i & HALF)) {                                                      \
            vector first = rows[i], second = rows[i + HALF];                    \
            rows[i] = __builtin_shuffle(first, second, (int_vector)ALL(KEEP, HALF)); \
            rows[i + HALF] = __builtin_shuffle(first, second, (int_vector)ALL(TAKE, HALF)); \
        }

static inline void transpose(vector rows[LANES]) {
    _Pragma("GCC unroll 16") SWAP(8);
    _Pragma("GCC unroll 16") SWAP(4);
    _Pragma("GCC unroll 16") SWAP(2);
    _Pragma("GCC unroll 16") SWAP(1);
}
#else
static inline void transpose(vector rows[LANES]) {
    float from[LANES][LANES], to[LANES][LANES];
    memcpy(from, rows, sizeof from);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j][i] = from[i][j];
    memcpy(rows, to, sizeof to);
}
#endif

/* The least multiple of `unit` that is at least n. */
static inline int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
