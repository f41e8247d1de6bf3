/* The consensus of model/consensus.py: two layers of kernel size 3 in both directions. Hidden channels are held for
 * three rows of image 0 only. */

#include "native.h"

/* Columns of image 1 that are processed as one block. */
#define AT_ONCE 8
/* Channels of one vector that are certain to belong to one direction. */
#define TOGETHER (LANES < 8 ? LANES : 8)

typedef struct {
    /* (height0 width0 height1 width1) */
    const float *scores;
    /* (81 channels) Weights of the first layer. The channels of both directions lie side by side. */
    const float *first;
    /* (channels) */
    const float *bias;
    /* (81 channels) Weights of the second layer, for the channels of both directions. */
    const float *second;
    /* (3 width0 strip+2 wide channels) Workspace for three rows of image 0. */
    float *hidden;
    /* (height0 width0 height1 width1) */
    float *out;
    int64_t height0, width0, height1, width1, channels;
    /* Rows of image 1, an even number, that are processed before the next strip. */
    int64_t strip;
    float last_bias;
    int32_t threads;
} Consensus;

INLINE lanes rectified(lanes v)
{
    typedef int32_t whole_lanes __attribute__((vector_size(4 * LANES)));
    /* NaN stays NaN. */
    return (lanes)((whole_lanes)v & ~(whole_lanes)(v <= 0));
}

INLINE float sum_from(lanes v, int from)
{
    float sums[TOGETHER];
    for (int i = 0; i < TOGETHER; i++)
        sums[i] = v[from + i];
    for (int step = TOGETHER / 2; step; step /= 2)
        for (int i = 0; i < step; i++)
            sums[i] += sums[i + step];
    return sums[0];
}

/* Width of image 1 rounded up to whole blocks, plus one column on each side. */
INLINE int64_t wide(const Consensus *c)
{
    return (c->width1 + AT_ONCE - 1) / AT_ONCE * AT_ONCE + 2;
}

INLINE float *hidden_at(const Consensus *c, int64_t row0, int64_t column0)
{
    return c->hidden + ((row0 % 3) * c->width0 + column0) * (c->strip + 2) * wide(c) * c->channels;
}

/* Compute the hidden channels of one cell of image 0, for rows of image 1 from start - 1 on. `around` is workspace for
 * the scores of this cell and its eight neighbors, with a margin of zeros. */
static void consensus_first(const Consensus *c, int64_t row0, int64_t column0, int64_t start, float *around)
{
    const int64_t width = wide(c), channels = c->channels, rows = c->strip + 4, cells = c->height1 * c->width1;
    for (int n = 0; n < 9; n++) {
        const int64_t y = row0 + n / 3 - 1, x = column0 + n % 3 - 1;
        const int inside = y >= 0 && y < c->height0 && x >= 0 && x < c->width0;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t row = start - 2 + r;
            float *to = around + (n * rows + r) * width + 1;
            if (inside && row >= 0 && row < c->height1)
                memcpy(to, c->scores + (y * c->width0 + x) * cells + row * c->width1, c->width1 * sizeof(float));
            else
                memset(to, 0, c->width1 * sizeof(float));
        }
    }
    float *hidden = hidden_at(c, row0, column0);
    for (int64_t r = 0; r < c->strip + 2; r++) {
        if (start - 1 + r < 0 || start - 1 + r >= c->height1)
            continue;
        for (int64_t left = 0; left < c->width1; left += AT_ONCE)
            for (int64_t channel = 0; channel < channels; channel += LANES) {
                const lanes bias = load(c->bias + channel);
                lanes sums[AT_ONCE];
                for (int p = 0; p < AT_ONCE; p++)
                    sums[p] = bias;
                for (int n = 0; n < 27; n++) {
                    const float *scores = around + (n / 3 * rows + r + n % 3) * width + left;
                    const float *weights = c->first + 3 * n * channels + channel;
                    for (int x = 0; x < 3; x++) {
                        const lanes weight = load(weights + x * channels);
                        for (int p = 0; p < AT_ONCE; p++)
                            sums[p] += scores[p + x] * weight;
                    }
                }
                float *to = hidden + (r * width + left + 1) * channels + channel;
                for (int p = 0; p < AT_ONCE; p++)
                    if (left + p < c->width1)
                        store(to + p * channels, rectified(sums[p]));
            }
    }
}

/* Add the contribution of one row of hidden channels to eight columns of a row of the result. */
INLINE void add_row(lanes *sums, const float *hidden, const float *weights, int64_t channels)
{
    const lanes before = load(weights), here = load(weights + channels), after = load(weights + 2 * channels);
    for (int p = 0; p < AT_ONCE; p++) {
        sums[p] += load(hidden + p * channels) * before;
        sums[p] += load(hidden + (p + 1) * channels) * here;
        sums[p] += load(hidden + (p + 2) * channels) * after;
    }
}

/* Compute the result for one cell of image 0, two rows at a time, from the hidden channels of 3x3 cells. */
static void consensus_second(const Consensus *c, int64_t row0, int64_t column0, int64_t start)
{
    const int64_t width = wide(c), channels = c->channels;
    float *out = c->out + (row0 * c->width0 + column0) * c->height1 * c->width1;
    for (int64_t row = start; row < start + c->strip && row < c->height1; row += 2)
        for (int64_t left = 0; left < c->width1; left += AT_ONCE) {
            /* [row][direction][column] */
            float totals[2][2][AT_ONCE];
            for (int p = 0; p < 4 * AT_ONCE; p++)
                (&totals[0][0][0])[p] = c->last_bias;
            for (int64_t channel = 0; channel < channels; channel += LANES) {
                lanes upper[AT_ONCE] = {{0}}, lower[AT_ONCE] = {{0}};
                for (int n = 0; n < 9; n++) {
                    const int64_t y = row0 + n / 3 - 1, x = column0 + n % 3 - 1;
                    if (y < 0 || y >= c->height0 || x < 0 || x >= c->width0)
                        continue;
                    const float *hidden = hidden_at(c, y, x) + ((row - start) * width + left) * channels + channel;
                    const float *weights = c->second + 9 * n * channels + channel;
                    const int64_t next = width * channels, three = 3 * channels;
                    add_row(upper, hidden, weights, channels);
                    add_row(upper, hidden + next, weights + three, channels);
                    add_row(lower, hidden + next, weights, channels);
                    add_row(upper, hidden + 2 * next, weights + 2 * three, channels);
                    add_row(lower, hidden + 2 * next, weights + three, channels);
                    add_row(lower, hidden + 3 * next, weights + 2 * three, channels);
                }
                for (int from = 0; from < LANES; from += TOGETHER) {
                    const int direction = 2 * (channel + from) >= channels;
                    for (int p = 0; p < AT_ONCE; p++) {
                        totals[0][direction][p] += sum_from(upper[p], from);
                        totals[1][direction][p] += sum_from(lower[p], from);
                    }
                }
            }
            for (int i = 0; i < 2 && row + i < c->height1 && row + i < start + c->strip; i++)
                for (int p = 0; p < AT_ONCE && left + p < c->width1; p++)
                    out[(row + i) * c->width1 + left + p] = (totals[i][0][p] < 0 ? 0 : totals[i][0][p]) +
                                                            (totals[i][1][p] < 0 ? 0 : totals[i][1][p]);
        }
}

/* Return 0, or 1 if memory is exhausted. */
EXPORT int dualrc_consensus(const Consensus *c)
{
    int failed = 0;
#pragma omp parallel num_threads(c->threads) reduction(| : failed)
    {
        float *around = calloc(9 * (c->strip + 4) * wide(c), sizeof(float));
        if (around == NULL)
            failed = 1;
        for (int64_t start = 0; start < c->height1; start += c->strip) {
            /* Margins stay zero, as do the rows of the last strip below the image. */
            const int64_t size = (c->strip + 2) * wide(c) * c->channels;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < 3 * c->width0; i++)
                memset(c->hidden + i * size, 0, size * sizeof(float));
            for (int64_t row0 = 0; row0 <= c->height0; row0++) {
                if (row0 < c->height0) {
#pragma omp for schedule(static)
                    for (int64_t column0 = 0; column0 < c->width0; column0++)
                        if (!failed)
                            consensus_first(c, row0, column0, start, around);
                }
                if (row0 > 0) {
#pragma omp for schedule(static)
                    for (int64_t column0 = 0; column0 < c->width0; column0++)
                        consensus_second(c, row0 - 1, column0, start);
                }
            }
        }
        free(around);
    }
    return failed;
}
