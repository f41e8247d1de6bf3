/* The fine search of model/fine.py: cells are visited by falling limit until no other can do better. */

#include "native.h"

#define BLOCK 64 /* candidates whose highest limit is kept */

typedef struct {
    const float *tensor;     /* rows candidates: the coarse tensor, rows of all pairs below each other */
    const float *sums;       /* rows */
    const float *queries;    /* groups places channels: unit features */
    const int64_t *pair;     /* groups */
    const int64_t *rows;     /* groups mixed: the rows of the tensor that a group reads */
    const float *weights;    /* places mixed, of each group or of all: how it mixes them */
    const uint8_t *wanted;   /* groups places, or NULL: all are */
    const float *fine;       /* pairs cells*16 channels: unit features of the searched picture */
    const uint8_t *valid;    /* pairs cells*16, or NULL: all count */
    int64_t *index;          /* groups places: what is found, -1: nothing */
    float *score;            /* groups places */
    int64_t *visited;        /* groups */
    int64_t groups, places, channels, mixed, weights_apart, candidates, width; /* width in coarse cells */
    float temperature, allowance; /* allowance: what a cosine above 1 may make of a limit, by rounding */
    int32_t threads;
} Search;

/* The highest of the limits of a block. */
INLINE float highest_of(const float *limits)
{
    lanes high = load(limits);
    for (int i = LANES; i < BLOCK; i += LANES)
        high = larger(load(limits + i), high);
    float top = high[0];
    for (int i = 1; i < LANES; i++)
        top = high[i] > top ? high[i] : top;
    return top;
}

/* Cosines of the 16 fine cells of a coarse cell with 16 queries, whose features lie side by side. */
INLINE void cosines(const float *cell, int64_t line, int64_t channels, const float *queries, lanes *result)
{
    for (int half = 0; half < 2; half++) {
        const float *a = cell + 2 * half * line, *b = a + line;
        lanes a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
        for (int64_t k = 0; k < channels; k++) {
            lanes query = load(queries + k * LANES);
            a0 += a[k] * query;
            a1 += a[k + channels] * query;
            a2 += a[k + 2 * channels] * query;
            a3 += a[k + 3 * channels] * query;
            b0 += b[k] * query;
            b1 += b[k + channels] * query;
            b2 += b[k + 2 * channels] * query;
            b3 += b[k + 3 * channels] * query;
        }
        lanes *to = result + 8 * half;
        to[0] = a0, to[1] = a1, to[2] = a2, to[3] = a3, to[4] = b0, to[5] = b1, to[6] = b2, to[7] = b3;
    }
}

/* Search for one group; `limits` and `tops` have room for all candidates and blocks, `queries` for 16 of channels. */
MANY_PROCESSORS void dualrc_search_group(const Search *s, int64_t group, float *limits, float *tops, float *queries)
{
    const int64_t *rows = s->rows + group * s->mixed;
    const float *weights = s->weights + group * s->weights_apart;
    const int64_t candidates = s->candidates, channels = s->channels, fine_width = 4 * s->width;
    const int64_t blocks = (candidates + BLOCK - 1) / BLOCK;
    const int64_t first = s->pair[group] * candidates * 16; /* fine cell of this pair */

    lanes share[s->mixed], total = filled(1e-15f);
    for (int64_t m = 0; m < s->mixed; m++) {
        share[m] = (lanes){0};
        for (int64_t p = 0; p < s->places; p++)
            share[m][p] = weights[p * s->mixed + m];
        total += share[m] * s->sums[rows[m]];
    }
    whole_lanes wanted = {0};
    for (int64_t p = 0; p < s->places; p++) {
        int asked = s->wanted == NULL || s->wanted[group * s->places + p];
        wanted[p] = asked && total[p] > 1e-15f ? -1 : 0;
        for (int64_t k = 0; k < channels; k++)
            queries[k * LANES + p] = s->queries[(group * s->places + p) * channels + k];
    }

    /* What no query can exceed: one that reads sum(w t) / sum(w s) stays below the largest t / s. */
    for (int64_t j = candidates; j < blocks * BLOCK; j++)
        limits[j] = 0;
    for (int64_t m = 0; m < s->mixed; m++) {
        const float *row = s->tensor + rows[m] * candidates, sum = s->sums[rows[m]];
        const float scale = sum > 0 ? (1 + 1e-5f) / sum : 0;
        if (m == 0)
            for (int64_t j = 0; j < candidates; j++)
                limits[j] = row[j] * scale;
        else
            for (int64_t j = 0; j < candidates; j++)
                limits[j] = row[j] * scale > limits[j] ? row[j] * scale : limits[j];
    }
    for (int64_t b = 0; b < blocks; b++)
        tops[b] = highest_of(limits + b * BLOCK);

    lanes best = {0};
    whole_lanes best_index = (whole_lanes){0} - 1;
    int64_t visited = 0;
    for (;;) {
        int64_t b = 0;
        for (int64_t i = 1; i < blocks; i++)
            b = tops[i] > tops[b] ? i : b;
        const float limit = tops[b];
        if (!(limit > 0))
            break;
        lanes open = choose(wanted, best, filled(INFINITY));
        float least = open[0];
        for (int p = 1; p < LANES; p++)
            least = open[p] < least ? open[p] : least;
        if (limit * s->allowance < least)
            break;
        int64_t cell = b * BLOCK;
        while (limits[cell] != limit)
            cell++;
        limits[cell] = 0;
        tops[b] = highest_of(limits + b * BLOCK);

        lanes coarse = {0};
        for (int64_t m = 0; m < s->mixed; m++)
            coarse += share[m] * s->tensor[rows[m] * candidates + cell];
        coarse /= total;
        whole_lanes useful = wanted & (coarse > 0) & (coarse * s->allowance >= best);
        int any = 0;
        for (int p = 0; p < LANES; p++)
            any |= useful[p];
        if (!any)
            continue;

        visited++;
        const int64_t corner = cell / s->width * 4 * fine_width + cell % s->width * 4;
        lanes cosine[16];
        cosines(s->fine + (first + corner) * channels, fine_width * channels, channels, queries, cosine);
        lanes high = filled(-INFINITY);
        whole_lanes index = {0};
        for (int a = 0; a < 16; a++) {
            const int64_t place = corner + a / 4 * fine_width + a % 4;
            if (s->valid != NULL && !s->valid[first + place])
                continue;
            whole_lanes higher = cosine[a] > high;
            high = choose(higher, cosine[a], high);
            index = choose_whole(higher, (whole_lanes){0} + (int32_t)place, index);
        }
        lanes score;
        if (s->temperature > 0)
            for (int p = 0; p < LANES; p++)
                score[p] = coarse[p] * expf((high[p] - 1) / s->temperature);
        else
            score = coarse * larger(high, (lanes){0});
        /* Among equals the first in the picture wins, whatever the order of the visit. */
        whole_lanes better = (score > best) | ((score == best) & (index < best_index));
        better &= score > 0;
        best = choose(better, score, best);
        best_index = choose_whole(better, index, best_index);
    }
    for (int64_t p = 0; p < s->places; p++) {
        s->index[group * s->places + p] = best_index[p];
        s->score[group * s->places + p] = best[p];
    }
    s->visited[group] = visited;
}

/* 0, or 1 where there is no memory. */
EXPORT int dualrc_search(const Search *s)
{
    int failed = 0;
#pragma omp parallel num_threads(s->threads) reduction(| : failed)
    {
        int64_t blocks = (s->candidates + BLOCK - 1) / BLOCK;
        float *memory = calloc(blocks * (BLOCK + 1) + LANES * s->channels, sizeof(float));
        if (memory == NULL)
            failed = 1;
#pragma omp for schedule(dynamic, 8)
        for (int64_t group = 0; group < s->groups; group++)
            if (memory != NULL) {
                float *tops = memory + blocks * BLOCK;
                dualrc_search_group(s, group, memory, tops, tops + blocks);
            }
        free(memory);
    }
    return failed;
}

EXPORT int64_t dualrc_search_size(void)
{
    return sizeof(Search);
}
