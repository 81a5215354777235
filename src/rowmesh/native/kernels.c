/* The hot loops of a step: sort ids, add gradients of equal rows, step rows.
 *
 * Plain C ABI, called by ctypes; every function has a torch path that gives the same bits
 * (tests/test_native.py). So sums are written out in their order, products are rounded before they
 * are added (-ffp-contract=off), and nothing may be reassociated (no -ffast-math): then the bits
 * depend neither on the compiler nor on which clone of a function a CPU runs. Integer arrays
 * that come in two widths are passed with `wide`: 0 for int32, 1 for int64. Functions that
 * can refuse return a negative number and have then changed nothing that counts; the caller takes
 * the torch path, which also phrases the error if the input was wrong.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "target.h"

#define LINE 16       /* floats in a cache line */
#define AHEAD 8       /* rows fetched ahead: about the time of one miss */
#define DIGIT_BITS 11 /* 2,048 counters fit the first cache together with what is written */

/* The caller refuses a library built from another interface than it knows. */
int32_t rm_interface(void) { return 4; }

static inline int64_t at(const void *values, int32_t wide, int64_t i) {
    return wide ? ((const int64_t *)values)[i] : ((const int32_t *)values)[i];
}

static inline void put(void *values, int32_t wide, int64_t i, int64_t value) {
    if (wide)
        ((int64_t *)values)[i] = value;
    else
        ((int32_t *)values)[i] = (int32_t)value;
}

typedef struct { uint32_t key, place; } item;

/* One pass of a stable radix sort. Items come from `from` (else they are the keys as given) and go to
 * `to` (else they are finished); `count` has where each digit begins. */
static inline void scatter(int64_t n, const void *keys, const item *from, item *to, void *sorted,
                           int32_t *order, int32_t wide, int shift, uint32_t mask,
                           uint32_t *count) {
    for (int64_t i = 0; i < n; i++) {
        item it = {from ? from[i].key : (uint32_t)at(keys, wide, i),
                   from ? from[i].place : (uint32_t)i};
        uint32_t place = count[it.key >> shift & mask]++;
        if (to)
            to[place] = it;
        else
            put(sorted, wide, place, it.key), order[place] = (int32_t)it.place;
    }
}

/* Lowest digit first. Counts do not depend on the order, so one reading of the keys makes all. */
static inline int32_t radix(int64_t n, const void *keys, int32_t wide, int bits, void *sorted,
                            int32_t *order) {
    int passes = (bits + DIGIT_BITS - 1) / DIGIT_BITS, width = (bits + passes - 1) / passes;
    uint32_t count[(32 + DIGIT_BITS - 1) / DIGIT_BITS][1 << DIGIT_BITS] = {{0}};
    uint32_t mask = ((uint32_t)1 << width) - 1;
    item *room = passes > 1 ? malloc(2 * (size_t)n * sizeof(item)) : NULL, *from = NULL, *to;
    if (passes > 1 && !room) return REFUSED;
    for (int64_t i = 0; i < n; i++)
        for (int p = 0; p < passes; p++) count[p][(uint32_t)at(keys, wide, i) >> p * width & mask]++;
    for (int p = 0; p < passes; p++, from = to) {
        for (uint32_t d = 0, before = 0, here; d <= mask; d++, before += here)
            here = count[p][d], count[p][d] = before;
        to = p + 1 == passes ? NULL : from == room ? room + n : room;
        if (from)
            scatter(n, NULL, from, to, sorted, order, wide, p * width, mask, count[p]);
        else
            scatter(n, keys, NULL, to, sorted, order, wide, p * width, mask, count[p]);
    }
    free(room);
    return 0;
}

/* Keys ascending, equal ones in the order given, and where each came from. Refuses keys that are
 * negative or of more than 32 bits. */
int32_t rm_sort(int64_t n, const void *keys, int32_t wide, void *sorted, int32_t *order) {
    int64_t all = 0, last = INT64_MIN;
    int is_sorted = 1, bits = 0;
    for (int64_t i = 0; i < n; i++) {
        all |= at(keys, wide, i);
        is_sorted &= last <= at(keys, wide, i);
        last = at(keys, wide, i);
    }
    if (all < 0 || all >> 32 || n > INT32_MAX) return REFUSED;
    while (all >> bits) bits++;
    if (!is_sorted) /* a copy of the code for each width */
        return wide ? radix(n, keys, 1, bits, sorted, order) : radix(n, keys, 0, bits, sorted, order);
    if (n) memcpy(sorted, keys, (size_t)n * (wide ? 8 : 4));
    for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
    return 0;
}

/* Where runs of equal keys begin; returns how many there are. */
int64_t rm_run_starts(int64_t n, const void *keys, int32_t wide, int32_t *starts) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        starts[found] = (int32_t)i; /* overwritten by the next one unless it counts */
        found += i == 0 || at(keys, wide, i) != at(keys, wide, i - 1);
    }
    return found;
}

/* out[order[j]]: the run that j lies in. */
void rm_run_numbers(int64_t n, const int32_t *order, int64_t runs, const int32_t *starts,
                    int32_t *out) {
    for (int64_t run = 0; run < runs; run++) {
        int64_t end = run + 1 < runs ? starts[run + 1] : n;
        for (int64_t j = starts[run]; j < end; j++) out[order[j]] = (int32_t)run;
    }
}

/* Runs in another order: run place[i] as the i-th. */
void rm_move_runs(int64_t n, const int32_t *order, int64_t runs, const int32_t *starts,
                  const int64_t *place, int32_t *new_order, int32_t *new_starts) {
    int64_t used = 0;
    for (int64_t i = 0; i < runs; i++) {
        int64_t begin = starts[place[i]], end = place[i] + 1 < runs ? starts[place[i] + 1] : n;
        new_starts[i] = (int32_t)used;
        for (int64_t j = begin; j < end; j++) new_order[used++] = order[j];
    }
}

/* The ids of bags one after the other, with the bag, the reader and (unless NULL) the weight of
 * each. Readers go round with the bags (per_reader 0) or have per_reader bags in a row. Refuses bags
 * outside the values. */
int32_t rm_flatten(int64_t bags, const int64_t *begins, const int64_t *counts, int64_t num_values,
                   const void *values, int32_t wide, const float *weights, int64_t readers,
                   int64_t per_reader, int64_t *ids, int32_t *reader, int32_t *bag,
                   float *id_weights) {
    int64_t used = 0;
    for (int64_t b = 0, r = 0, left = per_reader; b < bags; b++) {
        int64_t begin = begins[b], count = counts[b];
        if (begin < 0 || count < 0 || begin + count > num_values) return REFUSED;
        for (int64_t i = 0; i < count; i++) {
            ids[used + i] = at(values, wide, begin + i);
            reader[used + i] = (int32_t)r;
            bag[used + i] = (int32_t)b;
        }
        for (int64_t i = 0; weights && i < count; i++) id_weights[used + i] = weights[begin + i];
        used += count;
        if (per_reader == 0)
            r = r + 1 == readers ? 0 : r + 1;
        else if (--left == 0)
            r++, left = per_reader;
    }
    return 0;
}

/* Whether 0 <= ids[i] < rows[reader[i]] for all. */
CLONES int32_t rm_ids_fit(int64_t n, const int64_t *ids, const int32_t *reader,
                          const int64_t *rows) {
    int32_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= (uint64_t)ids[i] >= (uint64_t)rows[reader[i]];
    return !bad;
}

/* Where the rows of each (reader's table, virtual shard) lie: StackLayout of runtime/stacks.py. */
typedef struct {
    const int64_t *first_entry, *num_shards, *owner, *slot0, *stride, *bases;
    const uint8_t *is_copied, *is_pooled; /* NULL if no reader is */
    int64_t num_entries, copies_base;
    int32_t shard_bits; /* -1: by num_shards */
} layout;

/* What an id needs of its entry, in half a cache line. */
typedef struct { int64_t slot0, stride, rows_base, bags_base; } entry;

static inline void fill_keys(const layout of, const entry *entries, int64_t n, const int64_t *ids,
                             const int32_t *reader, const int32_t *bag, int32_t wide_keys,
                             void *keys, int32_t wide_slots, void *slots) {
    int64_t mask = of.shard_bits < 0 ? 0 : ((int64_t)1 << of.shard_bits) - 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t id = ids[i], r = reader[i], shard = id & mask, row = id >> (of.shard_bits & 63);
        if (of.shard_bits < 0) shard = id % of.num_shards[r], row = id / of.num_shards[r];
        const entry *to = entries + of.first_entry[r] + shard;
        int64_t slot = to->slot0 + row * to->stride, key = to->rows_base + slot;
        if (of.is_pooled && of.is_pooled[r]) key = to->bags_base + bag[i];
        if (of.is_copied && of.is_copied[r]) key = of.copies_base + slot;
        put(keys, wide_keys, i, key);
        if (slots) put(slots, wide_slots, i, slot);
    }
}

/* For every id its key (runtime/routes.py) and, unless NULL, its slot. Refuses for want of memory. */
int32_t rm_keys(const layout *of, int64_t n, const int64_t *ids, const int32_t *reader,
                const int32_t *bag, int32_t wide_keys, void *keys, int32_t wide_slots,
                void *slots) {
    entry *entries = malloc((size_t)of->num_entries * sizeof(entry));
    if (!entries) return REFUSED;
    for (int64_t e = 0; e < of->num_entries; e++)
        entries[e] = (entry){of->slot0[e], of->stride[e], of->bases[2 * of->owner[e]],
                             of->bases[2 * of->owner[e] + 1]};
    if (wide_keys || wide_slots) /* the usual case is compiled by itself */
        fill_keys(*of, entries, n, ids, reader, bag, wide_keys, keys, wide_slots, slots);
    else
        fill_keys(*of, entries, n, ids, reader, bag, 0, keys, 0, slots);
    free(entries);
    return 0;
}

/* For runs that owners pool: slots in sorted order, complemented where they continue the run (0 for
 * other runs); and which ids stay terms of sums: of these runs only the first. `keep` is in sorted
 * order, `keep_id` in that of ids. A run has one key, so one answer of is_pooled. */
void rm_mark_pooled(int64_t n, const int32_t *order, int64_t runs, const int32_t *starts,
                    const int32_t *reader, const uint8_t *is_pooled, const void *slots,
                    int32_t wide, void *marked, uint8_t *keep, uint8_t *keep_id) {
    memset(keep, 1, (size_t)n);
    memset(keep_id, 1, (size_t)n);
    memset(marked, 0, (size_t)n * (wide ? 8 : 4));
    for (int64_t run = 0; run < runs; run++) {
        int64_t begin = starts[run], end = run + 1 < runs ? starts[run + 1] : n;
        if (!is_pooled[reader[order[begin]]]) continue;
        put(marked, wide, begin, at(slots, wide, order[begin]));
        for (int64_t j = begin + 1; j < end; j++) {
            put(marked, wide, j, ~at(slots, wide, order[j]));
            keep[j] = keep_id[order[j]] = 0;
        }
    }
}

/* The terms of sums that are marked; returns how many. Weights may be NULL. */
int64_t rm_keep_terms(int64_t n, const uint8_t *keep, const int32_t *positions,
                      const float *weights, int64_t sums, const int32_t *starts,
                      int32_t *kept_positions, float *kept_weights, int32_t *kept_starts) {
    int64_t used = 0;
    for (int64_t s = 0; s < sums; s++) {
        int64_t end = s + 1 < sums ? starts[s + 1] : n;
        kept_starts[s] = (int32_t)used;
        for (int64_t j = starts[s]; j < end; j++) {
            kept_positions[used] = positions[j]; /* overwritten unless it counts */
            if (weights) kept_weights[used] = weights[j];
            used += keep[j];
        }
    }
    return used;
}

/* How far up the tree of labels node boundaries reach: before occurrence j (sorted) a new node
 * begins on the levels below marks[j]. nodes[level] counts them; level `depth` is the rows. */
void rm_mark_tree(int64_t n, const void *rows, int32_t wide, const int32_t *order, int32_t depth,
                  int32_t wide_labels, const void *const *labels, uint8_t *marks, int64_t *nodes) {
    for (int32_t level = 0; level <= depth; level++) nodes[level] = 0;
    for (int64_t j = 0; j < n; j++) {
        int32_t mark = 0;
        if (j == 0 || at(rows, wide, j) != at(rows, wide, j - 1))
            mark = depth + 1;
        else
            for (int32_t level = depth; level > 0 && !mark; level--)
                if (at(labels[level - 1], wide_labels, order[j]) !=
                    at(labels[level - 1], wide_labels, order[j - 1])) mark = level;
        marks[j] = (uint8_t)mark;
        for (int32_t level = 0; level < mark; level++) nodes[level]++;
    }
}

/* From zero, as torch's sums are: the first term is 0 + x, which makes -0 a 0. */
static inline void add(float *restrict to, const float *restrict from, int64_t dim, int is_first) {
    for (int64_t d = 0; d < dim; d++) to[d] = (is_first ? 0.0f : to[d]) + from[d];
}

static inline void add_weighted(float *restrict to, const float *restrict from, float weight,
                                int64_t dim, int is_first) {
    for (int64_t d = 0; d < dim; d++) to[d] = (is_first ? 0.0f : to[d]) + weight * from[d];
}

/* The sums of every row over the chosen levels of the tree (finest first), and the rows.
 * Occurrence j brings weights[order[j]] * values[index[order[j]]]; index NULL is 0 .. n - 1. With
 * no level chosen all rows are distinct and values are only put in order. `partial` has
 * num_levels rows of dim. Refuses an index outside the values. */
CLONES int32_t rm_add_tree(int64_t n, const void *rows, int32_t wide, const int32_t *order,
                           const int32_t *index, const float *weights, int64_t num_values,
                           const float *values, int64_t dim, const uint8_t *marks,
                           int32_t num_levels, const int32_t *levels, float *partial,
                           void *distinct, float *sums) {
    uint8_t is_new[256];
    int64_t row = 0;
    memset(is_new, 1, sizeof is_new);
    for (int64_t j = 0; j < n; j++) {
        int64_t later = j + AHEAD < n ? order[j + AHEAD] : order[j];
        later = index ? index[later] : later;
        for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(values + later * dim + d);
        int64_t from = index ? index[order[j]] : order[j];
        if ((uint64_t)from >= (uint64_t)num_values) return REFUSED;
        const float *value = values + from * dim;
        if (num_levels == 0) {
            memcpy(sums + j * dim, value, (size_t)dim * sizeof(float));
            put(distinct, wide, j, at(rows, wide, j));
            continue;
        }
        float *to = num_levels == 1 ? sums + row * dim : partial;
        if (weights)
            add_weighted(to, value, weights[order[j]], dim, is_new[0]);
        else
            add(to, value, dim, is_new[0]);
        is_new[0] = 0;
        int32_t mark = j + 1 < n ? marks[j + 1] : 255;
        for (int32_t k = 0; k + 1 < num_levels && mark > levels[k]; k++) {
            float *up = k + 2 == num_levels ? sums + row * dim : partial + (k + 1) * dim;
            add(up, partial + k * dim, dim, is_new[k + 1]);
            is_new[k] = 1, is_new[k + 1] = 0;
        }
        if (mark > levels[num_levels - 1]) {
            put(distinct, wide, row++, at(rows, wide, j));
            is_new[num_levels - 1] = 1;
        }
    }
    return 0;
}

/* One round of pairwise sums: neighbours of each block are added, an odd one at the end waits. */
static inline void fold(const float *restrict from, float *restrict to, int64_t blocks,
                        int64_t width) {
    int64_t half = width / 2, next = width - half;
    if (half == next) { /* no pair spans two blocks */
        for (int64_t i = 0; i < blocks * half; i++) to[i] = from[2 * i] + from[2 * i + 1];
        return;
    }
    for (int64_t k = 0; k < blocks; k++) {
        for (int64_t i = 0; i < half; i++)
            to[k * next + i] = from[k * width + 2 * i] + from[k * width + 2 * i + 1];
        to[k * next + half] = from[k * width + width - 1];
    }
}

/* The sum of squares of every block of `width` columns, folded until one is left; they begin at
 * what is returned. `room` is for 2 * dim floats. */
static inline float *block_squares(const float *restrict grad, int64_t dim, int64_t width,
                                   float *restrict room) {
    float *from = room, *to = room + dim;
    int64_t blocks = dim / width, left = width;
    if (width % 8 == 0) { /* three rounds in one */
        for (int64_t i = 0; i < dim / 8; i++) {
            const float *g = grad + 8 * i;
            float ab = g[0] * g[0] + g[1] * g[1], cd = g[2] * g[2] + g[3] * g[3];
            float ef = g[4] * g[4] + g[5] * g[5], gh = g[6] * g[6] + g[7] * g[7];
            from[i] = (ab + cd) + (ef + gh);
        }
        left = width / 8;
    } else
        for (int64_t d = 0; d < dim; d++) from[d] = grad[d] * grad[d];
    for (; left > 1; left -= left / 2) {
        fold(from, to, blocks, left);
        float *written = to;
        to = from, from = written;
    }
    return from;
}

/* out[i, k]: the squares of block k of row i. Refuses for want of memory. */
CLONES int32_t rm_block_squares(int64_t n, const float *grad, int64_t columns, int64_t width,
                                float *out) {
    float *room = malloc(2 * (size_t)columns * sizeof(float));
    if (!room) return REFUSED;
    for (int64_t i = 0; i < n; i++) {
        float *found = block_squares(grad + i * columns, columns, width, room);
        for (int64_t k = 0; k < columns / width; k++) out[i * (columns / width) + k] = found[k];
    }
    free(room);
    return 0;
}

/* Row-wise AdaGrad: v += mean square / divisor; w += g * (1 / (sqrt(v) + eps) * -lr).
 * squares: of whole rows, or NULL if grad has all columns. Refuses rows outside the table. */
CLONES int32_t rm_rowwise_adagrad(int64_t n, const void *rows, int32_t wide, const float *grad,
                                  int64_t dim, int64_t width, const float *squares, float divisor,
                                  float minus_lr, float eps, int64_t num_rows, float *moments,
                                  float *weight) {
    for (int64_t i = 0; i < n; i++)
        if ((uint64_t)at(rows, wide, i) >= (uint64_t)num_rows) return REFUSED;
    float *room = malloc(2 * (size_t)dim * sizeof(float));
    if (!room) return REFUSED;
    for (int64_t i = 0; i < n; i++) {
        int64_t row = at(rows, wide, i), later = at(rows, wide, i + AHEAD < n ? i + AHEAD : i);
        __builtin_prefetch(moments + later, 1);
        for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(weight + later * dim + d, 1);
        const float *g = grad + i * dim;
        float mean = squares ? squares[i] : 0.0f;
        if (!squares) {
            float *blocks = block_squares(g, dim, width, room);
            mean = blocks[0];
            for (int64_t k = 1; k < dim / width; k++) mean += blocks[k];
            mean /= (float)dim;
        }
        float moment = moments[row] + mean / divisor;
        moments[row] = moment;
        float scale = 1.0f / (sqrtf(moment) + eps) * minus_lr;
        float *restrict w = weight + row * dim;
        for (int64_t d = 0; d < dim; d++) w[d] += g[d] * scale;
    }
    free(room);
    return 0;
}
