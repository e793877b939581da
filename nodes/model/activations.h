/* Activations of a gate: x * sigmoid(a(x)). For SILU a(x) is x. For GELU, in Hendrycks and Gimpel's approximation by a
   tanh (arXiv 1606.08415), it is sqrt(8 / pi) * (x + 0.044715 * x^3). */

#include "lanes.h"

enum { SILU, GELU };
#define FIRST 1.5957691216057308f
#define THIRD 0.07135481627260025f

static inline vector argument(vector x, int activation) { return activation == GELU ? x * (x * x * THIRD + FIRST) : x; }

/* x * a'(x). */
static inline vector steepness(vector x, int activation) {
    return activation == GELU ? x * (x * x * (3 * THIRD) + FIRST) : x;
}

/* 1 / (1 + e^-x). */
static inline vector sigmoid(vector x) {
    const vector one = (vector){0} + 1.0f;
    bits_vector below = (bits_vector)(x < 0.0f);
    vector e = exponentials((vector)((bits_vector)x | 0x80000000)), share = one / (one + e);
    return (vector)((below & (bits_vector)(e * share)) | (~below & (bits_vector)share));
}
