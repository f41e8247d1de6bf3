/* The fine search of ops/torch.py: cells are visited by descending bound until no other cell can be better. */

#include "native.h"

/* Fine cells of a coarse cell, and the largest number of queries of a group. */
#define PLACES 16
/* Candidates per block. The search keeps the highest bound of each block. */
#define BLOCK 64
/* Sum of the scores that a query reads if all of them are zero. */
#define NOTHING 1e-15f

typedef struct {
    /* (rows candidates) The coarse tensor, with the rows of all pairs stacked. */
    const float *tensor;
    /* (rows) Row sums of the tensor. */
    const float *sums;
    /* (groups places channels) Unit features. */
    const float *queries;
    /* (groups) */
    const int64_t *pair;
    /* (groups mixed) Rows of the tensor that a group interpolates. */
    const int64_t *rows;
    /* (groups places mixed) or (places mixed) Weights of the interpolation. */
    const float *weights;
    /* (groups places) or NULL, which means that all queries are wanted. */
    const uint8_t *wanted;
    /* (pairs cells*16 channels) Unit features of the searched image. */
    const float *fine;
    /* (pairs cells*16) or NULL, which means that all cells are valid. */
    const uint8_t *valid;
    /* (groups places) Output: the best fine cell, or -1. */
    int64_t *index;
    /* (groups places) Output. */
    float *score;
    /* (groups) Output: number of coarse cells visited. */
    int64_t *visited;
    /* width is in coarse cells. */
    int64_t groups, places, channels, mixed, weights_apart, candidates, width;
    /* allowance is the factor by which rounding may lift a score above its bound. */
    float temperature, allowance;
    int32_t threads;
} Search;

/* Return the highest bound of a block. */
INLINE float highest_of(const float *limits)
{
    float high[LANES];
    for (int i = 0; i < LANES; i++)
        high[i] = limits[i];
    for (int from = LANES; from < BLOCK; from += LANES)
        for (int i = 0; i < LANES; i++)
            high[i] = limits[from + i] > high[i] ? limits[from + i] : high[i];
    float top = high[0];
    for (int i = 1; i < LANES; i++)
        top = high[i] > top ? high[i] : top;
    return top;
}

/* Compute cosines of the 16 fine cells of a coarse cell with the queries. The queries are interleaved by channel. */
INLINE void cosines(const float *cell, int64_t line, int64_t channels, const float *queries, float (*result)[PLACES])
{
    for (int place = 0; place < PLACES; place += LANES)
        for (int half = 0; half < 2; half++) {
            const float *a = cell + 2 * half * line, *b = a + line;
            lanes a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0};
            for (int64_t k = 0; k < channels; k++) {
                const lanes query = load(queries + k * PLACES + place);
                a0 += a[k] * query, a1 += a[k + channels] * query;
                a2 += a[k + 2 * channels] * query, a3 += a[k + 3 * channels] * query;
                b0 += b[k] * query, b1 += b[k + channels] * query;
                b2 += b[k + 2 * channels] * query, b3 += b[k + 3 * channels] * query;
            }
            float (*to)[PLACES] = result + 8 * half;
            store(to[0] + place, a0), store(to[1] + place, a1), store(to[2] + place, a2), store(to[3] + place, a3);
            store(to[4] + place, b0), store(to[5] + place, b1), store(to[6] + place, b2), store(to[7] + place, b3);
        }
}

/* Search for one group. Workspace: `limits` per candidate, `tops` per block, `queries` for 16 feature vectors. */
static void search_group(const Search *s, int64_t group, float *limits, float *tops, float *queries)
{
    const int64_t *rows = s->rows + group * s->mixed;
    const float *weights = s->weights + group * s->weights_apart;
    const int64_t candidates = s->candidates, channels = s->channels, fine_width = 4 * s->width;
    const int64_t blocks = (candidates + BLOCK - 1) / BLOCK;
    /* First fine cell of this pair. */
    const int64_t first = s->pair[group] * candidates * PLACES;

    float share[s->mixed][PLACES], total[PLACES];
    for (int p = 0; p < PLACES; p++)
        total[p] = NOTHING;
    for (int64_t m = 0; m < s->mixed; m++)
        for (int p = 0; p < PLACES; p++) {
            share[m][p] = p < s->places ? weights[p * s->mixed + m] : 0;
            total[p] += share[m][p] * s->sums[rows[m]];
        }
    /* Queries that are not wanted start at infinity, so that they never keep the search open. */
    float best[PLACES];
    int32_t best_index[PLACES];
    for (int p = 0; p < PLACES; p++) {
        int wanted = p < s->places && (s->wanted == NULL || s->wanted[group * s->places + p]);
        best[p] = wanted && total[p] > NOTHING ? 0 : INFINITY;
        best_index[p] = -1;
    }
    for (int64_t p = 0; p < s->places; p++)
        for (int64_t k = 0; k < channels; k++)
            queries[k * PLACES + p] = s->queries[(group * s->places + p) * channels + k];

    /* Upper bound of every query: sum(w t) / sum(w s) is at most the largest t / s. */
    for (int64_t m = 0; m < s->mixed; m++) {
        const float *row = s->tensor + rows[m] * candidates, sum = s->sums[rows[m]];
        const float scale = sum > 0 ? (1 + 1e-5f) / sum : 0;
        for (int64_t j = 0; j < candidates; j++) {
            const float limit = row[j] > 0 ? row[j] * scale : 0, before = m > 0 ? limits[j] : 0;
            limits[j] = limit > before ? limit : before;
        }
    }
    for (int64_t j = candidates; j < blocks * BLOCK; j++)
        limits[j] = 0;
    for (int64_t b = 0; b < blocks; b++)
        tops[b] = highest_of(limits + b * BLOCK);

    int64_t visited = 0;
    for (;;) {
        int64_t b = 0;
        for (int64_t i = 1; i < blocks; i++)
            b = tops[i] > tops[b] ? i : b;
        const float limit = tops[b];
        float least = best[0];
        for (int p = 1; p < PLACES; p++)
            least = best[p] < least ? best[p] : least;
        if (!(limit > 0) || limit * s->allowance < least)
            break;
        int64_t cell = b * BLOCK;
        while (limits[cell] != limit)
            cell++;
        limits[cell] = 0;
        tops[b] = highest_of(limits + b * BLOCK);

        float coarse[PLACES] = {0};
        for (int64_t m = 0; m < s->mixed; m++) {
            const float read = s->tensor[rows[m] * candidates + cell];
            for (int p = 0; p < PLACES; p++)
                coarse[p] += share[m][p] * read;
        }
        int useful = 0;
        for (int p = 0; p < PLACES; p++) {
            coarse[p] /= total[p];
            useful |= coarse[p] > 0 && coarse[p] * s->allowance >= best[p];
        }
        if (!useful)
            continue;

        visited++;
        const int64_t corner = cell / s->width * 4 * fine_width + cell % s->width * 4;
        /* Cosines of the fine cells of this coarse cell with the queries, and their maximum per query. */
        float cosine[PLACES][PLACES], high[PLACES];
        int32_t index[PLACES] = {0};
        cosines(s->fine + (first + corner) * channels, fine_width * channels, channels, queries, cosine);
        for (int p = 0; p < PLACES; p++)
            high[p] = -INFINITY;
        for (int a = 0; a < PLACES; a++) {
            const int64_t place = corner + a / 4 * fine_width + a % 4;
            if (s->valid == NULL || s->valid[first + place])
                for (int p = 0; p < PLACES; p++) {
                    index[p] = cosine[a][p] > high[p] ? (int32_t)place : index[p];
                    high[p] = cosine[a][p] > high[p] ? cosine[a][p] : high[p];
                }
        }
        float score[PLACES];
        for (int p = 0; p < PLACES; p++)
            score[p] = coarse[p] * (high[p] > 0 ? high[p] : 0);
        if (s->temperature > 0)
            for (int p = 0; p < PLACES; p++)
                score[p] = coarse[p] * expf((high[p] - 1) / s->temperature);
        for (int p = 0; p < PLACES; p++) {
            /* Ties go to the first cell in row-major order, independent of the order of the visits. */
            int better = (score[p] > best[p]) | ((score[p] == best[p]) & (index[p] < best_index[p]));
            best[p] = better ? score[p] : best[p];
            best_index[p] = better ? index[p] : best_index[p];
        }
    }
    for (int64_t p = 0; p < s->places; p++) {
        s->index[group * s->places + p] = best_index[p];
        s->score[group * s->places + p] = best_index[p] < 0 ? 0 : best[p];
    }
    s->visited[group] = visited;
}

/* Return 0, or 1 if memory is exhausted. */
EXPORT int dualrc_search(const Search *s)
{
    int failed = 0;
#pragma omp parallel num_threads(s->threads) reduction(| : failed)
    {
        int64_t blocks = (s->candidates + BLOCK - 1) / BLOCK;
        float *memory = calloc(blocks * (BLOCK + 1) + PLACES * s->channels, sizeof(float));
        if (memory == NULL)
            failed = 1;
#pragma omp for schedule(dynamic, 8)
        for (int64_t group = 0; group < s->groups; group++)
            if (memory != NULL) {
                float *tops = memory + blocks * BLOCK;
                search_group(s, group, memory, tops, tops + blocks);
            }
        free(memory);
    }
    return failed;
}
