/* The functions that a pass of `nodes/generate/decode.c` calls by pointer, each with the seconds that it has taken:
   `train_profile.py`. Tensors are passed on as they come, so their format makes no difference. */

#include <stdint.h>
#include <time.h>

enum { RMS_NORM, ROTATE, ATTEND, DRAW, PARTS };

void *called[PARTS];
double seconds[PARTS];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

void rms_norm(void *x, void *weight, void *out, int64_t a, int64_t b, int64_t c, float eps, float offset, int threads) {
    double began = now();
    ((void (*)(void *, void *, void *, int64_t, int64_t, int64_t, float, float, int))called[RMS_NORM])(
        x, weight, out, a, b, c, eps, offset, threads);
    seconds[RMS_NORM] += now() - began;
}

void rotate(void *x, void *cos, void *sin, void *out, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f,
            int threads) {
    double began = now();
    ((void (*)(void *, void *, void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
               int))called[ROTATE])(x, cos, sin, out, a, b, c, d, e, f, threads);
    seconds[ROTATE] += now() - began;
}

int attend(void *q, void *k, void *v, void *keys, void *values, void *slots, void *positions, void *out, int64_t a,
           int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, float scale, int threads) {
    double began = now();
    int failed = ((int (*)(void *, void *, void *, void *, void *, void *, void *, void *, int64_t, int64_t, int64_t,
                           int64_t, int64_t, int64_t, int64_t, float, int))called[ATTEND])(
        q, k, v, keys, values, slots, positions, out, a, b, c, d, e, f, g, scale, threads);
    seconds[ATTEND] += now() - began;
    return failed;
}

int draw(void *logits, void *uniform, int64_t rows, int64_t words, float temperature, void *tokens, void *logprobs,
         int threads) {
    double began = now();
    int failed = ((int (*)(void *, void *, int64_t, int64_t, float, void *, void *, int))called[DRAW])(
        logits, uniform, rows, words, temperature, tokens, logprobs, threads);
    seconds[DRAW] += now() - began;
    return failed;
}
