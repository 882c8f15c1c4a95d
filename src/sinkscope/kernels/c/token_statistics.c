/* Statistics of activations [N tokens, C channels], contiguous along C, from one read of each row.
 *
 * What each number is stands in kernels/token_statistics.py and kernels/token_means.py.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "threads.h"

enum { CHUNK = 256 }; /* channels whose float sums join a double, and of which the largest is searched */
enum { ROWS = 4 };    /* rows that are added to the sums of the channels together, while they lie in the cache */

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* y = x * weight of some channels, in the buffer where there is a weight. */
static inline const float *weighted(const float *x, const float *weight, int64_t count, float *buffer) {
    if (!weight) return x;
    for (int64_t c = 0; c < count; c++) buffer[c] = x[c] * weight[c];
    return buffer;
}

typedef struct {
    float largest;
    int64_t argmax;
    double total_abs, total;
} Extent;

static Extent extent_of(const float *x, const float *weight, int64_t num_channels) {
    Extent extent = {.largest = -1.0f};
    float buffer[CHUNK];
    int64_t from = 0;
    for (int64_t start = 0; start < num_channels; start += CHUNK) {
        int64_t count = smaller(CHUNK, num_channels - start);
        const float *y = weighted(x + start, weight ? weight + start : NULL, count, buffer);
        float largest = -1.0f, total_abs = 0, total = 0;
        #pragma omp simd reduction(max : largest) reduction(+ : total_abs, total)
        for (int64_t c = 0; c < count; c++) {
            float magnitude = fabsf(y[c]);
            largest = magnitude > largest ? magnitude : largest;
            total_abs += magnitude;
            total += y[c];
        }
        if (largest > extent.largest) extent.largest = largest, from = start;
        extent.total_abs += total_abs, extent.total += total;
    }
    if (isinf(extent.total_abs) && !isinf(extent.largest)) { /* the sums left the range of floats, the values did not */
        extent.total_abs = extent.total = 0;
        for (int64_t c = 0; c < num_channels; c++) {
            double y = weight ? (double)x[c] * weight[c] : x[c];
            extent.total_abs += fabs(y), extent.total += y;
        }
    }
    int64_t count = smaller(CHUNK, num_channels - from), c = 0;
    const float *y = weighted(x + from, weight ? weight + from : NULL, count, buffer);
    while (c < count - 1 && fabsf(y[c]) != extent.largest) c++;
    extent.argmax = from + c;
    if (isnan(extent.total_abs)) extent.largest = NAN; /* a maximum skips nan, a sum does not */
    return extent;
}

/* With `moments` the five numbers of `found` are largest, energy, mean |y|, kurtosis and participation ratio, else the
 * largest alone. */
static void read_row(const float *x, const float *weight, int64_t num_channels, int64_t moments, float *found,
                     int64_t *argmax) {
    double channels = (double)num_channels;
    Extent extent = extent_of(x, weight, num_channels);
    found[0] = extent.largest;
    *argmax = extent.argmax;
    if (!moments) return;
    /* In units of the largest value fourth powers neither overflow nor vanish, and near the mean they keep their
     * digits where it outweighs the spread. */
    double unit = extent.largest > 0 ? extent.largest : 1;
    float lift = unit < 1e-20 ? 1e25f : 1.0f; /* the inverse of a subnormal number is no float */
    float scale = (float)(1 / (unit * lift)), centre = (float)(extent.total / unit / channels), buffer[CHUNK];
    double first = 0, second = 0, third = 0, fourth = 0;
    for (int64_t start = 0; start < num_channels; start += CHUNK) {
        int64_t count = smaller(CHUNK, num_channels - start);
        const float *y = weighted(x + start, weight ? weight + start : NULL, count, buffer);
        float part_1 = 0, part_2 = 0, part_3 = 0, part_4 = 0;
        #pragma omp simd reduction(+ : part_1, part_2, part_3, part_4)
        for (int64_t c = 0; c < count; c++) {
            float apart = y[c] * lift * scale - centre, square = apart * apart;
            part_1 += apart;
            part_2 += square;
            part_3 += square * apart;
            part_4 += square * square;
        }
        first += part_1, second += part_2, third += part_3, fourth += part_4;
    }
    double c = centre, c2 = c * c, off = first / channels; /* the mean lies `off` the centre */
    double energy = second + 2 * c * first + channels * c2;
    double quartic = fourth + 4 * c * third + 6 * c2 * second + 4 * c2 * c * first + channels * c2 * c2;
    double central_2 = second - off * first;
    double central_4 = fourth - 4 * off * third + 6 * off * off * second - 3 * channels * off * off * off * off;
    int constant = central_2 <= 1e-13 * channels; /* the spread is what rounding leaves */
    found[1] = isinf(extent.largest) ? INFINITY : (float)(energy * unit * unit);
    found[2] = (float)(extent.total_abs / channels);
    found[3] = (float)(constant ? 0 : channels * central_4 / (central_2 * central_2));
    found[4] = (float)(extent.largest == 0 ? 0 : energy * energy / quartic);
}

static inline double term(float x, int64_t square) { return square ? (double)x * x : fabsf(x); }

/* Adds |x|, or with `square` x^2, of a few rows to each channel's sum. In doubles: where one token is massive, what the
 * others add up to is found by taking it away again. */
static void add_rows(const float *x, int64_t stride, int64_t num_rows, int64_t num_channels, int64_t square,
                     double *sums) {
    if (num_rows == ROWS) {
        const float *a = x, *b = a + stride, *c = b + stride, *d = c + stride;
        for (int64_t i = 0; i < num_channels; i++)
            sums[i] += (term(a[i], square) + term(b[i], square)) + (term(c[i], square) + term(d[i], square));
    } else
        for (int64_t n = 0; n < num_rows; n++)
            for (int64_t i = 0; i < num_channels; i++) sums[i] += term(x[n * stride + i], square);
}

/* found_N5, or found_N1 without `moments`, and argmax_N; parts_MC are the sums of each channel over M equal parts of
 * the tokens, of |x| or, without moments, of x^2. Without `found` these are all. */
void token_statistics(const float *x, int64_t stride, const float *weight, int64_t num_tokens, int64_t num_channels,
                      int64_t moments, float *found, int64_t *argmax, double *parts, int64_t num_parts) {
    #pragma omp parallel for if (!alone) schedule(static)
    for (int64_t part = 0; part < num_parts; part++) {
        double *sums = parts + part * num_channels;
        int64_t stop = num_tokens * (part + 1) / num_parts;
        for (int64_t c = 0; c < num_channels; c++) sums[c] = 0;
        for (int64_t start = num_tokens * part / num_parts; start < stop; start += ROWS) {
            int64_t num_rows = smaller(ROWS, stop - start);
            for (int64_t n = start; found && n < start + num_rows; n++)
                read_row(x + n * stride, weight, num_channels, moments, found + n * (moments ? 5 : 1), argmax + n);
            add_rows(x + start * stride, stride, num_rows, num_channels, !moments, sums);
        }
    }
}

/* [N] largest / mean of |x|, or with `square` the mean of x^2. */
void token_means(const float *x, int64_t stride, int64_t num_tokens, int64_t num_channels, int64_t square,
                 float *means) {
    #pragma omp parallel for if (!alone) schedule(static)
    for (int64_t n = 0; n < num_tokens; n++) {
        const float *row = x + n * stride;
        double total = 0;
        float largest = 0;
        for (int64_t start = 0; start < num_channels; start += CHUNK) {
            int64_t stop = smaller(start + CHUNK, num_channels);
            float part = 0;
            if (square) {
                #pragma omp simd reduction(+ : part)
                for (int64_t c = start; c < stop; c++) part += row[c] * row[c];
            } else {
                #pragma omp simd reduction(max : largest) reduction(+ : part)
                for (int64_t c = start; c < stop; c++) {
                    float magnitude = fabsf(row[c]);
                    largest = magnitude > largest ? magnitude : largest;
                    part += magnitude;
                }
            }
            total += part;
        }
        means[n] = (float)(square ? total / num_channels : (double)largest * num_channels / total);
    }
}
