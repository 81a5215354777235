/* Pairwise dot products of a sample's vectors, and their gradient: DLRM's interaction.
 *
 * A sum runs over columns (forward) or vectors (backward) from the first to the last, every product
 * rounded before it is added: lanes are different sums, so the bits do not depend on their number.
 * One sample at a time, in scratch memory that stays in the first cache.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "target.h"

#define LANES 8
#define WIDE (2 * LANES) /* columns of a tile: two registers */
#define TALL 4           /* rows of a tile: eight sums under way hide the latency of an addition */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* out[r][c] = sum over i < n of left[r][i] * right[i][c], for a tile; strides in floats. */
INLINE void tile(int64_t n, const float *left, int64_t left_stride, const float *right,
                 int64_t right_stride, float *out, int64_t out_stride) {
    lanes sums[TALL][2] = {{{0}}};
    for (int64_t i = 0; i < n; i++) {
        lanes a = *(const lanes *)(right + i * right_stride);
        lanes b = *(const lanes *)(right + i * right_stride + LANES);
        for (int r = 0; r < TALL; r++) {
            float factor = left[r * left_stride + i];
            sums[r][0] += factor * a;
            sums[r][1] += factor * b;
        }
    }
    for (int r = 0; r < TALL; r++) {
        *(lanes *)(out + r * out_stride) = sums[r][0];
        *(lanes *)(out + r * out_stride + LANES) = sums[r][1];
    }
}

/* A sample's vectors, one a row of x: the dense one first. */
INLINE void gather(int64_t count, int64_t dim, const float *dense, const float *vectors, float *x,
                   int64_t stride) {
    memcpy(x, dense, (size_t)dim * sizeof(float));
    for (int64_t r = 1; r < count; r++)
        memcpy(x + r * stride, vectors + (r - 1) * dim, (size_t)dim * sizeof(float));
}

/* out[b] = [dense[b], <v_i, v_j> for i < j], with v_0 = dense[b] and v_1 .. of vectors[b]. */
CLONES int32_t rm_dots(int64_t samples, int64_t count, int64_t dim, const float *dense,
                       const float *vectors, float *out) {
    int64_t across = rounded(count, WIDE), down = rounded(count, LANES);
    int64_t size = dim + count * (count - 1) / 2;
    float *x = calloc((size_t)(down * dim + dim * across + down * across), sizeof(float));
    if (!x) return REFUSED;
    float *turned = x + down * dim, *products = turned + dim * across;
    for (int64_t b = 0; b < samples; b++, out += size) {
        gather(count, dim, dense + b * dim, vectors + b * (count - 1) * dim, x, dim);
        for (int64_t r = 0; r < count; r += LANES)
            for (int64_t c = 0; c < dim; c++) {
                const float *at = x + r * dim + c;
                *(lanes *)(turned + c * across + r) =
                    (lanes){at[0],       at[dim],     at[2 * dim], at[3 * dim],
                            at[4 * dim], at[5 * dim], at[6 * dim], at[7 * dim]};
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
 * diagonal, G V; and the dense vector's own, added last. */
CLONES int32_t rm_dots_backward(int64_t samples, int64_t count, int64_t dim, const float *dense,
                                const float *vectors, const float *grad, float *grad_dense,
                                float *grad_vectors) {
    int64_t across = rounded(dim, WIDE), down = rounded(count, TALL);
    int64_t size = dim + count * (count - 1) / 2;
    float *x = calloc((size_t)(count * across + down * count + down * across), sizeof(float));
    if (!x) return REFUSED;
    float *both = x + count * across, *found = both + down * count;
    for (int64_t b = 0; b < samples; b++, grad += size) {
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
