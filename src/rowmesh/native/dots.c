/* Pairwise dot products of a sample's vectors, and their gradient: DLRM's interaction.
 *
 * A sum runs over columns (forward) or vectors (backward) from the first to the last, every term a
 * fused multiply-add: lanes are different sums, so the bits do not depend on their number.
 * One sample at a time, in scratch memory that stays in the first cache.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "target.h"

#define LANES 8
#define WIDE (2 * LANES) /* columns of a tile: two registers */
#define TALL 6           /* rows of a tile: with twelve sums there are registers left for factors */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t order __attribute__((vector_size(4 * LANES)));

/* Lanes of a (0 to 7) and b (8 to 15) in another order. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LEFT(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define RIGHT(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define FRONT(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define BACK(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

static int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

FUSED INLINE lanes add_product(float factor, lanes vector, lanes sum) {
    for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(factor, vector[i], sum[i]);
    return sum;
}

/* out[r][c] = sum over i < n of left[r][i] * right[i][c], for a tile; strides in floats. */
FUSED INLINE void tile(int64_t n, const float *left, int64_t left_stride, const float *right,
                       int64_t right_stride, float *out, int64_t out_stride) {
    lanes sums[TALL][2] = {{{0}}};
    for (int64_t i = 0; i < n; i++) {
        lanes a = *(const lanes *)(right + i * right_stride);
        lanes b = *(const lanes *)(right + i * right_stride + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) {
            float factor = left[r * left_stride + i];
            sums[r][0] = add_product(factor, a, sums[r][0]);
            sums[r][1] = add_product(factor, b, sums[r][1]);
        }
    }
    for (int r = 0; r < TALL; r++) {
        *(lanes *)(out + r * out_stride) = sums[r][0];
        *(lanes *)(out + r * out_stride + LANES) = sums[r][1];
    }
}

/* to[c][r] = from[r][c] for eight rows and columns; strides in floats. */
FUSED INLINE void turn(const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    lanes a[LANES], b[LANES];
    for (int r = 0; r < LANES; r++) a[r] = *(const lanes *)(from + r * from_stride);
    for (int r = 0; r < LANES; r += 2) {
        b[r] = LOW(a[r], a[r + 1]);
        b[r + 1] = HIGH(a[r], a[r + 1]);
    }
    for (int r = 0; r < LANES; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = LEFT(b[r + i], b[r + i + 2]);
            a[r + 2 * i + 1] = RIGHT(b[r + i], b[r + i + 2]);
        }
    for (int c = 0; c < LANES / 2; c++) {
        *(lanes *)(to + c * to_stride) = FRONT(a[c], a[c + 4]);
        *(lanes *)(to + (c + 4) * to_stride) = BACK(a[c], a[c + 4]);
    }
}

/* A sample's vectors, one a row of x: the dense one first. */
FUSED INLINE void gather(int64_t count, int64_t dim, const float *dense, const float *vectors,
                         float *x, int64_t stride) {
    memcpy(x, dense, (size_t)dim * sizeof(float));
    for (int64_t r = 1; r < count; r++)
        memcpy(x + r * stride, vectors + (r - 1) * dim, (size_t)dim * sizeof(float));
}

/* out[b] = [dense[b], <v_i, v_j> for i < j], with v_0 = dense[b] and v_1 .. of vectors[b]. */
FUSED static int32_t dots(int64_t samples, int64_t count, int64_t dim, const float *dense,
                          const float *vectors, float *out) {
    int64_t across = rounded(count, WIDE), down = rounded(rounded(count, TALL), LANES);
    int64_t size = dim + count * (count - 1) / 2;
    float *x = calloc((size_t)(down * dim + dim * across + down * across), sizeof(float));
    if (!x) return REFUSED;
    float *turned = x + down * dim, *products = turned + dim * across;
    for (int64_t b = 0; b < samples; b++, out += size) {
        gather(count, dim, dense + b * dim, vectors + b * (count - 1) * dim, x, dim);
        for (int64_t r = 0; r < count; r += LANES) {
            int64_t c = 0;
            for (; c + LANES <= dim; c += LANES)
                turn(x + r * dim + c, dim, turned + c * across + r, across);
            for (; c < dim; c++)
                for (int64_t i = r; i < r + LANES; i++) turned[c * across + i] = x[i * dim + c];
        }
        for (int64_t r = 0; r < count - 1; r += TALL)
            for (int64_t c = (r + 1) / WIDE * WIDE; c < across; c += WIDE)
                tile(dim, x + r * dim, dim, turned + c, across, products + r * across + c, across);
        memcpy(out, x, (size_t)dim * sizeof(float));
        float *to = out + dim;
        for (int64_t r = 0, left = count - 1; left > 0; to += left, r++, left--)
            memcpy(to, products + r * across + r + 1, (size_t)left * sizeof(float));
    }
    free(x);
    return 0;
}

/* Gradients of both inputs: with G the symmetric matrix of the products' gradients, zero on the
 * diagonal, G V; and the dense vector's own, added last. Rows of grad may have gaps between them. */
FUSED static int32_t dots_backward(int64_t samples, int64_t count, int64_t dim, const float *dense,
                                   const float *vectors, const float *grad, int64_t grad_stride,
                                   float *grad_dense, float *grad_vectors) {
    int64_t across = rounded(dim, WIDE), down = rounded(count, TALL);
    float *x = calloc((size_t)(count * across + down * count + down * across), sizeof(float));
    if (!x) return REFUSED;
    float *both = x + count * across, *found = both + down * count;
    for (int64_t b = 0; b < samples; b++, grad += grad_stride) {
        gather(count, dim, dense + b * dim, vectors + b * (count - 1) * dim, x, across);
        const float *from = grad + dim;
        for (int64_t r = 0; r < count; r++)
            for (int64_t c = r + 1; c < count; c++, from++)
                both[r * count + c] = both[c * count + r] = *from;
        for (int64_t r = 0; r < count; r += TALL)
            for (int64_t c = 0; c < across; c += WIDE)
                tile(count, both + r * count, count, x + c, across, found + r * across + c, across);
        for (int64_t c = 0; c < dim; c++) grad_dense[b * dim + c] = found[c] + grad[c];
        for (int64_t r = 1; r < count; r++)
            memcpy(grad_vectors + (b * (count - 1) + r - 1) * dim, found + r * across,
                   (size_t)dim * sizeof(float));
    }
    free(x);
    return 0;
}

int32_t rm_dots(int64_t samples, int64_t count, int64_t dim, const float *dense,
                const float *vectors, float *out) {
    return has_fused() ? dots(samples, count, dim, dense, vectors, out) : REFUSED;
}

int32_t rm_dots_backward(int64_t samples, int64_t count, int64_t dim, const float *dense,
                         const float *vectors, const float *grad, int64_t grad_stride,
                         float *grad_dense, float *grad_vectors) {
    if (!has_fused()) return REFUSED;
    return dots_backward(samples, count, dim, dense, vectors, grad, grad_stride, grad_dense,
                         grad_vectors);
}
