/* Conversion between the numbers of a tensor in memory, `stored` (bfloat16 with BF16, else float32), and floats. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Floats of a register. Compilers keep arrays of longer vectors in memory, not in registers. */
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif

#ifdef BF16
typedef uint16_t stored;

static inline stored rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    /* NaN stays NaN. */
    return x != x ? 0x7fc0 : (stored)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float wide(stored x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
#else
typedef float stored;

static inline stored rounded(float x) { return x; }

static inline float wide(stored x) { return x; }
#endif

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
