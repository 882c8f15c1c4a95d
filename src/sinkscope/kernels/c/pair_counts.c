/* Pairs of samples that agree, disagree or are tied, counted exactly in many columns: what Kendall's tau is made of.
 *
 * A column is ordered by y and then, from that order, by x: a radix sort keeps the order of what is equal. Pairs whose
 * x grows while y falls are then the inversions in the ranks of y.
 * Axes: N samples, C columns.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

enum { DIGIT_BITS = 11, NUM_DIGITS = 1 << DIGIT_BITS, NUM_PASSES = 3 }; /* 3 digits hold 32 bits */
enum { BLOCK = 64, SUPERBLOCK = BLOCK * BLOCK };                        /* ranks in a word of bits; in 64 words */
enum { LINE = 64 };                                                     /* bytes of a line of the cache */

typedef struct {
    uint32_t *upper, *lower; /* bits that are ordered as the numbers are; floats have no lower ones */
} Keys;

typedef struct {
    Keys x, y;
    uint32_t *order, *spare, *ranks, *next, *later_superblocks;
    uint64_t *seen;
    uint16_t *later_blocks;
} Memory;

/* A negative number's bits grow with its magnitude and are turned round. Adding 0 makes one zero of the two. */
static void read_floats(const float *values, int64_t stride, int64_t n, Keys keys) {
    for (int64_t i = 0; i < n; i++) {
        float value = values[i * stride] + 0.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        keys.upper[i] = bits ^ ((uint32_t)((int32_t)bits >> 31) | (uint32_t)1 << 31);
    }
}

static void read_doubles(const double *values, int64_t stride, int64_t n, Keys keys) {
    for (int64_t i = 0; i < n; i++) {
        double value = values[i * stride] + 0.0;
        uint64_t bits;
        memcpy(&bits, &value, 8);
        bits ^= (uint64_t)((int64_t)bits >> 63) | (uint64_t)1 << 63;
        keys.upper[i] = bits >> 32, keys.lower[i] = (uint32_t)bits;
    }
}

static inline int equal(Keys keys, uint32_t i, uint32_t j) {
    return keys.upper[i] == keys.upper[j] && (!keys.lower || keys.lower[i] == keys.lower[j]);
}

/* Sorts the order by the keys, from the lowest digit on. */
static void sort_by(const uint32_t *keys, int64_t n, Memory *m) {
    uint32_t starts[NUM_PASSES][NUM_DIGITS] = {0};
    for (int64_t i = 0; i < n; i++)
        for (int pass = 0; pass < NUM_PASSES; pass++)
            starts[pass][keys[i] >> DIGIT_BITS * pass & (NUM_DIGITS - 1)]++;
    for (int pass = 0; pass < NUM_PASSES; pass++) {
        uint32_t *start = starts[pass], *order = m->order, *sorted = m->spare, sum = 0;
        for (int digit = 0; digit < NUM_DIGITS >> (pass == NUM_PASSES - 1); digit++) {
            uint32_t count = start[digit];
            start[digit] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++)
            sorted[start[keys[order[i]] >> DIGIT_BITS * pass & (NUM_DIGITS - 1)]++] = order[i];
        m->order = sorted, m->spare = order;
    }
}

static void sort(Keys keys, int64_t n, Memory *m) {
    if (keys.lower) sort_by(keys.lower, n, m);
    sort_by(keys.upper, n, m);
}

/* Pairs i < j of the order with rank i > rank j; equal numbers get different ranks in the order in which they come, and
 * so are no inversion. For each rank, those seen before it that are larger are counted in its own word of bits, in the
 * later words of its superblock and in the later superblocks. */
static int64_t inversions(int64_t n, Memory *m) {
    int64_t total = 0, num_superblocks = n / SUPERBLOCK + 1, num_blocks = num_superblocks * BLOCK;
    memset(m->seen, 0, num_blocks * sizeof *m->seen);
    memset(m->later_blocks, 0, num_blocks * sizeof *m->later_blocks);
    memset(m->later_superblocks, 0, num_superblocks * sizeof *m->later_superblocks);
    for (int64_t i = 0; i < n; i++) {
        uint32_t rank = m->next[m->ranks[m->order[i]]]++, block = rank / BLOCK, superblock = rank / SUPERBLOCK;
        uint16_t *later = m->later_blocks + superblock * BLOCK, inside = block % BLOCK;
        total += m->later_superblocks[superblock] + later[inside];
        total += __builtin_popcountll(m->seen[block] >> rank % BLOCK);
        m->seen[block] |= (uint64_t)1 << rank % BLOCK;
        for (uint16_t k = 0; k < BLOCK; k++) later[k] += (uint16_t)(k < inside);
        for (uint32_t k = 0; k < superblock; k++) m->later_superblocks[k]++;
    }
    return total;
}

/* Leaves concordant - discordant pairs and the pairs that are not tied in x and in y. */
static void count(int64_t n, Memory *m, int64_t *agreement, int64_t *untied_x, int64_t *untied_y) {
    int64_t tied_x = 0, tied_y = 0, tied_both = 0, run = 0, run_both = 0, pairs = n * (n - 1) / 2;
    for (int64_t i = 0; i < n; i++) m->order[i] = m->next[i] = (uint32_t)i;
    sort(m->y, n, m);
    for (int64_t i = 0; i < n; i++) {
        run = i && equal(m->y, m->order[i], m->order[i - 1]) ? run + 1 : 0;
        tied_y += run;
        m->ranks[m->order[i]] = (uint32_t)(i - run); /* of equal numbers the first one's */
    }
    sort(m->x, n, m);
    run = 0;
    for (int64_t i = 1; i < n; i++) {
        uint32_t here = m->order[i], before = m->order[i - 1];
        run = equal(m->x, here, before) ? run + 1 : 0;
        run_both = run && m->ranks[here] == m->ranks[before] ? run_both + 1 : 0;
        tied_x += run;
        tied_both += run_both;
    }
    *agreement = pairs - tied_x - tied_y + tied_both - 2 * inversions(n, m);
    *untied_x = pairs - tied_x;
    *untied_y = pairs - tied_y;
}

/* sums_3C of x_NC and y_NC, contiguous floats or, with `doubles`, doubles; at least one sample, fewer than 2^31.
 * `failed` becomes 1 where there was not enough memory. */
void pair_counts(const void *x, const void *y, int64_t n, int64_t num_columns, int64_t doubles, int64_t *sums,
                 int64_t *failed) {
    int64_t num_superblocks = n / SUPERBLOCK + 1, num_blocks = num_superblocks * BLOCK;
    #pragma omp parallel if (!alone)
    {
        /* Whole lines of the cache: a number is read from the vector that was just stored, and must lie in one line. */
        int64_t bytes = num_blocks * (2 + 8) + (8 * n + num_superblocks) * 4;
        char *all = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
        if (!all) {
            #pragma omp atomic write
            *failed = 1;
        }
        Memory m = {.later_blocks = (uint16_t *)all, .seen = (uint64_t *)(all + 2 * num_blocks)};
        m.order = (uint32_t *)(m.seen + num_blocks), m.spare = m.order + n, m.ranks = m.spare + n, m.next = m.ranks + n;
        m.x.upper = m.next + n, m.y.upper = m.x.upper + n;
        if (doubles) m.x.lower = m.y.upper + n, m.y.lower = m.x.lower + n;
        m.later_superblocks = m.y.upper + 3 * n;
        /* Neighbouring columns lie in the same lines of the cache. */
        #pragma omp for schedule(dynamic, 8)
        for (int64_t c = 0; c < num_columns; c++) {
            if (!all) continue;
            if (doubles) {
                read_doubles((const double *)x + c, num_columns, n, m.x);
                read_doubles((const double *)y + c, num_columns, n, m.y);
            } else {
                read_floats((const float *)x + c, num_columns, n, m.x);
                read_floats((const float *)y + c, num_columns, n, m.y);
            }
            count(n, &m, sums + c, sums + num_columns + c, sums + 2 * num_columns + c);
        }
        free(all);
    }
}
