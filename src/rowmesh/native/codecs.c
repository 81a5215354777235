/* Rows of fp32 as whole steps of a scale, one for every row: the int8 codec.
 *
 * Every number by itself, so the bits are those of the torch path (comm/codecs.py).
 */
#include <stdint.h>

#include "target.h"

#define MOST 127.0f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: what is added to it is rounded to nearest, ties to even */

/* scales[r] = max|x| / 127 of row r; steps[r][c] = x / scale, or 0 in a row of zeros. */
CLONES void rm_int8_encode(int64_t rows, int64_t dim, const uint32_t *bits, float *scales,
                           int8_t *steps) {
    for (int64_t r = 0; r < rows; r++, bits += dim, steps += dim) {
        union { uint32_t bits; float number; } largest = {0}; /* NaN if there is one */
        for (int64_t c = 0; c < dim; c++) {
            uint32_t size = bits[c] & 0x7FFFFFFFu;
            largest.bits = size > largest.bits ? size : largest.bits;
        }
        float scale = scales[r] = largest.number / MOST, divisor = scale == 0.0f ? 1.0f : scale;
        const float *x = (const float *)bits;
        for (int64_t c = 0; c < dim; c++) {
            float step = x[c] / divisor + ROUNDER - ROUNDER;
            step = step > MOST ? MOST : step < -MOST ? -MOST : step;
            steps[c] = (int8_t)(int32_t)step;
        }
    }
}

CLONES void rm_int8_decode(int64_t rows, int64_t dim, const float *scales, const int8_t *steps,
                           float *out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < dim; c++) out[r * dim + c] = (float)steps[r * dim + c] * scales[r];
}
