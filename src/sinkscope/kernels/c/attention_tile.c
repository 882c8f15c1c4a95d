/* One tile of causal attention between its two matrix products: scores become weights, and what is read of them is
 * added up while a row lies in the cache.
 *
 * Axes: H heads (of all sequences), n queries of the tile, S keys of the tile, T positions, P chosen keys, R distances.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

enum { CHUNK = 512 }; /* numbers that are added up as floats before they join a double */
enum { VECTOR = 16 }; /* rows are filled up to a multiple of it: what is left over would be done one by one */
enum { LANES = 128 }; /* keys whose attention received is added up side by side */

/* What is further below a row's largest score counts as no attention: a float beside 1 cannot tell it from 0, and
 * squares of what is smaller still would be subnormal, which are many times slower. */
static const float FAINTEST = -40.0f;

/* e^x for -87 <= x <= 0, to a unit in the last place: the library's cannot be counted on to take many at once. */
static inline float exponential(float x) {
    const float rounding = 12582912.0f; /* 1.5 * 2^23: what is added to it stays as a whole number in the lowest bits */
    float shifted = x * 1.44269504f + rounding, power = shifted - rounding;
    float rest = x - power * 0.693359375f + power * 2.12194440e-4f;
    float series = 1.9875691500e-4f;
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    float value = series * rest * rest + rest + 1.0f, scale;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + (127u << 23);
    memcpy(&scale, &bits, 4);
    return value * scale;
}

typedef struct {
    float *inverse, *entropy, *mixing, *weighted;
} Row;

/* Turns the scores of one query with the keys that it sees into weights, which are still to be multiplied by
 * `inverse`, and writes what is read of them. */
static void weigh(float *scores, int64_t count, const float *sink, const float *key_weights, Row row) {
    float largest = sink ? *sink : -INFINITY;
    #pragma omp simd reduction(max : largest)
    for (int64_t s = 0; s < count; s++) largest = scores[s] > largest ? scores[s] : largest;
    double total = 0, dots = 0, squares = 0, weighted = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t stop = start + CHUNK < count ? start + CHUNK : count;
        float part = 0, part_dots = 0, part_squares = 0, part_weighted = 0;
        #pragma omp simd reduction(+ : part, part_dots, part_squares)
        for (int64_t s = start; s < stop; s++) {
            float below = scores[s] - largest, seen = below < FAINTEST ? FAINTEST : below;
            float weight = exponential(seen);
            weight = below < FAINTEST ? 0.0f : weight;
            scores[s] = weight;
            part += weight;
            part_dots += weight * seen;
            part_squares += weight * weight;
        }
        if (key_weights) {
            #pragma omp simd reduction(+ : part_weighted)
            for (int64_t s = start; s < stop; s++) part_weighted += scores[s] * scores[s] * key_weights[s];
        }
        total += part, dots += part_dots, squares += part_squares, weighted += part_weighted;
    }
    double whole = sink ? total + expf(*sink - largest) : total, inverse = 1 / whole;
    *row.inverse = (float)inverse;
    /* -sum a log a with log a = below - log whole; a row adds up to less than 1 beside a learned sink. */
    *row.entropy = (float)((total * logf((float)whole) - dots) * inverse);
    *row.mixing = (float)(squares * inverse * inverse);
    if (key_weights) *row.weighted = (float)(weighted * inverse * inverse);
}

/* scores_HnS become weights, 0 where a query does not see a key, to be multiplied by inverse_Hn. Of each row
 * entropy_HT, mixing_HT and, with key_weights_NT for each N = H / num_groups, weighted_HT are written; received_HT, or received_HP
 * of chosen keys (fewer than 0 are all), and by_distance_HR, at the sampled queries, are added to. The tile's queries
 * begin at `start`, its keys at `low`; a window of 0 is none. */
void attention_tile(float *scores, float *inverse, int64_t num_heads, int64_t num_groups, int64_t num_queries,
                    int64_t num_keys, int64_t length, int64_t start, int64_t low, int64_t window, const float *sinks,
                    const float *key_weights, float *entropy, float *mixing, float *weighted, float *received,
                    const int64_t *keys, int64_t num_chosen, float *by_distance, const int64_t *sampled,
                    int64_t num_sampled, const int64_t *distances, int64_t num_distances) {
    int64_t every_key = num_chosen < 0, num_parts = every_key ? (num_keys + LANES - 1) / LANES : 1;
    #pragma omp parallel if (!alone)
    {
        #pragma omp for collapse(2) schedule(static)
        for (int64_t h = 0; h < num_heads; h++)
            for (int64_t q = 0; q < num_queries; q++) {
                float *row = scores + (h * num_queries + q) * num_keys;
                int64_t last = start + q - low + 1, first = window && last > window ? last - window : 0;
                int64_t place = h * length + start + q;
                int64_t padded = (last + VECTOR - 1) / VECTOR * VECTOR;
                padded = padded < num_keys ? padded : num_keys;
                memset(row, 0, first * sizeof *row);
                for (int64_t s = last; s < padded; s++) row[s] = -INFINITY;
                memset(row + padded, 0, (num_keys - padded) * sizeof *row);
                weigh(row + first, padded - first, sinks ? sinks + h : NULL,
                      key_weights ? key_weights + h / num_groups * length + low + first : NULL,
                      (Row){inverse + h * num_queries + q, entropy + place, mixing + place, weighted + place});
                for (int64_t s = last; s < padded; s++) row[s] = 0; /* of a row without any attention it is nan */
            }
        #pragma omp for collapse(2) schedule(static)
        for (int64_t h = 0; h < num_heads; h++)
            for (int64_t part = 0; part < num_parts; part++) {
                const float *weights = scores + h * num_queries * num_keys, *scale = inverse + h * num_queries;
                if (!every_key) {
                    for (int64_t p = 0; p < num_chosen; p++) {
                        int64_t s = keys[p] - low;
                        if (s < 0 || s >= num_keys) continue;
                        float sum = 0;
                        for (int64_t q = 0; q < num_queries; q++) sum += weights[q * num_keys + s] * scale[q];
                        received[h * num_chosen + p] += sum;
                    }
                } else {
                    int64_t first = part * LANES, count = num_keys - first < LANES ? num_keys - first : LANES;
                    float lane[LANES] = {0}, *sums = received + h * length + low + first;
                    for (int64_t q = 0; q < num_queries; q++)
                        for (int64_t s = 0; s < count; s++) lane[s] += weights[q * num_keys + first + s] * scale[q];
                    for (int64_t s = 0; s < count; s++) sums[s] += lane[s];
                }
            }
        #pragma omp for schedule(static)
        for (int64_t h = 0; h < num_heads; h++)
            for (int64_t i = 0; i < num_sampled; i++) {
                int64_t row = h * num_queries + sampled[i] - start;
                if (sampled[i] < start || sampled[i] >= start + num_queries) continue;
                for (int64_t r = 0; r < num_distances; r++) {
                    int64_t s = sampled[i] - distances[r] - low;
                    if (s >= 0) by_distance[h * num_distances + r] += scores[row * num_keys + s] * inverse[row];
                }
            }
    }
}
