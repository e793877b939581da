/* The operations between the matrix products of a layer, and their gradients, for a CPU; see `elementwise.py`.

   Compiled at run time; with BF16 the tensors are bfloat16, and everything is computed in float32 and rounded once. The
   bits of a row depend only on its own numbers: not on the rows beside it, the threads, or its place in memory. So each
   loop whose order matters is written once, with explicit lanes.

   Rows of given tensors have the stride `*_row`; rows of results are contiguous. */

#include <stdlib.h>

#include "activations.h"

/* Rows whose gradients of a weight are summed separately, for any number of threads. */
#define CHUNK 64
/* Rows of a transposed matrix's tile. */
#define LINE (64 / (int64_t)sizeof(stored))

static inline float inverse_rms(const stored *row, int64_t D, float eps) {
    vector squares = {0};
    for (int64_t d = 0; d < D; d += LANES) {
        vector x = load_part(row + d, D - d);
        squares += x * x;
    }
    return 1.0f / sqrtf(total(squares) / D + eps);
}

/* The factors of a row: weight + offset. `plain`, a constant at each call, leaves out the addition, which would take
   time even for an offset of 0. */
static inline vector factors(const stored *w, int64_t n, float offset, int plain) {
    return plain ? load_part(w, n) : load_part(w, n) + offset;
}

static inline __attribute__((always_inline)) void norm_row(const stored *x, const stored *w, stored *out, int64_t D,
                                                           float eps, float offset, int plain) {
    float inverse = inverse_rms(x, D, eps);
    for (int64_t d = 0; d < D; d += LANES)
        store_part(out + d, load_part(x + d, D - d) * inverse * factors(w + d, D - d, offset, plain), D - d);
}

/* out [R, D] = x / sqrt(mean(x^2) + eps) * (w + offset). */
void rms_norm(const stored *x, const stored *w, stored *out, int64_t R, int64_t D, int64_t x_row, float eps,
              float offset, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++)
        if (offset == 0)
            norm_row(x + r * x_row, w, out + r * D, D, eps, 0, 1);
        else
            norm_row(x + r * x_row, w, out + r * D, D, eps, offset, 0);
}

/* The gradient of one row; its gradient of the weight is added to `own`. */
static inline __attribute__((always_inline)) void norm_row_backward(const stored *g, const stored *x, const stored *w,
                                                                    stored *grad_x, float *own, int64_t D, float eps,
                                                                    float offset, int plain) {
    float inverse = inverse_rms(x, D, eps);
    vector products = {0};
    for (int64_t d = 0; d < D; d += LANES)
        products += load_part(g + d, D - d) * factors(w + d, D - d, offset, plain) * load_part(x + d, D - d);
    float mean = total(products) * inverse / D;
    for (int64_t d = 0; d < D; d += LANES) {
        vector normed = load_part(x + d, D - d) * inverse, given = load_part(g + d, D - d), added;
        memcpy(&added, own + d, sizeof added);
        added += given * normed;
        memcpy(own + d, &added, sizeof added);
        store_part(grad_x + d, (given * factors(w + d, D - d, offset, plain) - normed * mean) * inverse, D - d);
    }
}

/* With n = x / rms and v = w + offset: grad_x = (g * v - n * mean(g * v * n)) / rms, and grad_w = the sum of g * n over
   rows. Rows of g, x and grad_x are contiguous. Returns 1 if there is not enough memory, otherwise 0. */
int rms_norm_backward(const stored *g, const stored *x, const stored *w, stored *grad_x, stored *grad_w, int64_t R,
                      int64_t D, float eps, float offset, int threads) {
    int64_t chunks = (R + CHUNK - 1) / CHUNK, padded = whole(D, LANES);
    float *sums = calloc((chunks + 1) * padded, sizeof(float));
    if (!sums) return 1;
#pragma omp parallel for num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float *own = sums + chunk * padded;
        for (int64_t r = chunk * CHUNK; r < R && r < (chunk + 1) * CHUNK; r++) {
            const stored *row = x + r * D, *grad = g + r * D;
            if (offset == 0)
                norm_row_backward(grad, row, w, grad_x + r * D, own, D, eps, 0, 1);
            else
                norm_row_backward(grad, row, w, grad_x + r * D, own, D, eps, offset, 0);
        }
    }
    float *all = sums + chunks * padded;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t d = 0; d < D; d++) all[d] += sums[chunk * padded + d];
    for (int64_t d = 0; d < D; d++) grad_w[d] = rounded(all[d]);
    free(sums);
    return 0;
}

/* out [R, D] = activation(gate) * up. */
void gated(const stored *gate, const stored *up, stored *out, int64_t R, int64_t D, int64_t gate_row, int64_t up_row,
           int activation, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++)
        for (int64_t d = 0; d < D; d += LANES) {
            vector x = load_part(gate + r * gate_row + d, D - d);
            vector share = sigmoid(argument(x, activation));
            store_part(out + r * D + d, x * share * load_part(up + r * up_row + d, D - d), D - d);
        }
}

/* grad_gate = g * up * activation'(gate) and grad_up = g * activation(gate), all [R, D] with contiguous rows. */
void gated_backward(const stored *g, const stored *gate, const stored *up, stored *grad_gate, stored *grad_up,
                    int64_t R, int64_t D, int activation, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++)
        for (int64_t d = 0; d < D; d += LANES) {
            int64_t at = r * D + d;
            vector x = load_part(gate + at, D - d), share = sigmoid(argument(x, activation));
            vector given = load_part(g + at, D - d) * share;
            store_part(grad_up + at, given * x, D - d);
            vector bend = steepness(x, activation) * (1.0f - share) + 1.0f;
            store_part(grad_gate + at, given * load_part(up + at, D - d) * bend, D - d);
        }
}

/* out [R, H, K] = x with each pair (x[i], x[i + K / 2]) turned by the angle of its row. cos and sin are [T, K], row r
   uses row r % T of them, and the first half of sin is negated. `back` turns by the opposite angle. */
void rotate(const stored *x, const stored *cos, const stored *sin, stored *out, int64_t R, int64_t H, int64_t K,
            int64_t T, int64_t x_row, int64_t back, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r++)
        for (int64_t h = 0; h < H; h++) {
            int64_t half = K / 2;
            const stored *from = x + r * x_row + h * K, *c = cos + r % T * K, *s = sin + r % T * K;
            const stored *first = back ? s + half : s, *second = back ? s : s + half;
            stored *to = out + (r * H + h) * K;
            for (int64_t k = 0; k < half; k += LANES) {
                int64_t n = half - k;
                vector a = load_part(from + k, n), b = load_part(from + k + half, n);
                store_part(to + k, a * load_part(c + k, n) + b * load_part(first + k, n), n);
                store_part(to + k + half, b * load_part(c + k + half, n) + a * load_part(second + k, n), n);
            }
        }
}

/* out [D, R] = the transpose of x [R, D], whose rows have the stride x_row; bits stay the same. A lane holds one number
   each of LINE / LANES consecutive rows, so that a vector is a whole cache line of the result. */
void transposed(const stored *x, stored *out, int64_t R, int64_t D, int64_t x_row, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < R; r += LINE)
        for (int64_t d = 0; d < D; d += LANES) {
            vector lanes[LANES] = {0};
            for (int64_t i = 0; i < LINE && r + i < R; i++) {
                const stored *from = x + (r + i) * x_row + d;
                __builtin_prefetch(from + LINE * x_row);
                vector each = load_part(from, D - d);
#ifdef BF16
                bits_vector first = (bits_vector)each >> 16;
                lanes[i / 2] = i % 2 ? (vector)((bits_vector)lanes[i / 2] | (bits_vector)each) : (vector)first;
#else
                lanes[i] = each;
#endif
            }
            transpose(lanes);
            for (int64_t i = 0; i < LANES && d + i < D; i++)
                memcpy(out + (d + i) * R + r, &lanes[i], R - r < LINE ? (R - r) * sizeof(stored) : sizeof(vector));
        }
}
