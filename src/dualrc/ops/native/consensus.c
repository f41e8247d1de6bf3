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

/* Sum groups of TOGETHER lanes. The sum of group g of vector p goes to sums[g * AT_ONCE + p]. */
#if LANES >= 8 && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
#endif
#endif

#ifdef SHUFFLES
/* Lane i of a vector with twice as many columns as the vectors a and b, whose sums have 2 * step terms left each. */
#define LOW(i, step) ((i) % 8 / 4 * LANES + (i) / 8 * 8 + (i) % 4 / (step) * 2 * (step) + (i) % (step))
#define HIGH(i, step) (LOW(i, step) + (step))
#define FOUR(pick, i, step) pick(i, step), pick(i + 1, step), pick(i + 2, step), pick(i + 3, step)
#if LANES == 16
#define MASK(pick, step) FOUR(pick, 0, step), FOUR(pick, 4, step), FOUR(pick, 8, step), FOUR(pick, 12, step)
#else
#define MASK(pick, step) FOUR(pick, 0, step), FOUR(pick, 4, step)
#endif
#define ADD(a, b, step) \
    (__builtin_shufflevector(a, b, MASK(LOW, step)) + __builtin_shufflevector(a, b, MASK(HIGH, step)))

INLINE void sum_groups(const lanes *v, float *sums)
{
    const lanes a = ADD(v[0], v[1], 4), b = ADD(v[2], v[3], 4), c = ADD(v[4], v[5], 4), d = ADD(v[6], v[7], 4);
    const lanes ab = ADD(a, b, 2), cd = ADD(c, d, 2);
    store(sums, ADD(ab, cd, 1));
}
#else
INLINE void sum_groups(const lanes *v, float *sums)
{
    for (int i = 0; i < LANES / TOGETHER * AT_ONCE; i++) {
        float part[TOGETHER];
        for (int k = 0; k < TOGETHER; k++)
            part[k] = v[i % AT_ONCE][i / AT_ONCE * TOGETHER + k];
        for (int step = TOGETHER / 2; step; step /= 2)
            for (int k = 0; k < step; k++)
                part[k] += part[k + step];
        sums[i] = part[0];
    }
}
#endif

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
                float sums[2][LANES / TOGETHER][AT_ONCE];
                sum_groups(upper, sums[0][0]), sum_groups(lower, sums[1][0]);
                for (int group = 0; group < LANES / TOGETHER; group++) {
                    const int direction = 2 * (channel + group * TOGETHER) >= channels;
                    for (int p = 0; p < AT_ONCE; p++) {
                        totals[0][direction][p] += sums[0][group][p];
                        totals[1][direction][p] += sums[1][group][p];
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
