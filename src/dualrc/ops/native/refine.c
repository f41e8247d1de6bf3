/* The refinement of matches: model/subpixel.py, model/support.py and model/align.py in a few loops. */

#include "native.h"

/* Fine cells of the window around a match, and the one at its center. */
#define WINDOW 9
#define MIDDLE 4
/* Added to variances, which may be zero. */
#define LITTLE 1e-6f

typedef struct {
    /* (pairs cells channels) Unit features. */
    const float *features0, *features1;
    /* (count) Pair and row-major fine cells of the matches. */
    const int64_t *pair, *index0, *index1;
    /* (2 count) Last input of the correction, from image 0 to image 1 and then back, or NULL. */
    const float *known;
    /* (count 9 9) Output, or NULL. */
    float *cosines;
    /* (2 count, 2 channels + 82) and (2 count, 2) Output if `known` is given: inputs of the correction of
     * model/subpixel.py, and offsets of the soft-argmax. */
    float *inputs, *offsets;
    /* Heights and widths of the maps are in fine cells. */
    int64_t count, channels, height0, width0, height1, width1;
    float temperature;
    int32_t threads;
} Meet;

typedef struct {
    /* (5 places) x, y, u, v and confidence of every grid position, zero where there is no match. */
    const float *maps;
    /* (count) Grid positions of the matches. */
    const int64_t *at;
    /* (5 count) The same five values in the order of the matches. */
    const float *known;
    /* (neighbors) Grid offsets of the neighbors. */
    const int64_t *offsets;
    /* (count), (count 2 2) and (count 2) Output. */
    float *share, *motion, *shift;
    int64_t count, places, neighbors;
    float sigma, near, own, doubt, ridge;
    int32_t threads;
} Explain;

typedef struct {
    /* (pairs height width) Brightness. */
    const float *light0, *light1;
    /* (count) */
    const int64_t *pair;
    /* (count 2), (count 2), (count 2 2) */
    const float *points0, *points1, *motion;
    /* (places) Offsets and weights of the samples, padded to a multiple of LANES with weight 0. */
    const float *across, *down, *weights;
    /* (count 2) Output. */
    float *moves;
    int64_t count, places, height0, width0, height1, width1;
    float reach, damping, longest, farthest, least, gain, largest;
    int32_t rounds, threads;
} Fit;

INLINE float sum_of(lanes v)
{
    float sum[LANES];
    store(sum, v);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++)
            sum[i] += sum[i + step];
    return sum[0];
}

/* Return pointers to the features of the 3x3 cells around a cell. Border cells are replicated. */
INLINE void window_of(const float *features, int64_t index, int64_t height, int64_t width, int64_t channels,
                      const float **window)
{
    int64_t row = index / width, column = index % width;
    for (int i = 0; i < WINDOW; i++) {
        int64_t y = row + i / 3 - 1, x = column + i % 3 - 1;
        y = y < 0 ? 0 : y >= height ? height - 1 : y;
        x = x < 0 ? 0 : x >= width ? width - 1 : x;
        window[i] = features + (y * width + x) * channels;
    }
}

/* exp(x) for x from -80 to 0, with a relative error of a few millionths. */
INLINE float fading(float x)
{
    float power = (x > -80 ? x : -80) * 1.44269504f;
    int32_t floor = (int32_t)power - 1;
    /* From 0 to ln 2. */
    float rest = (power - floor) * 0.693147181f;
    rest *= 0.25f;
    float exp = 1 + rest * (1 + rest * (0.5f + rest * (1 / 6.f + rest * (1 / 24.f + rest * (1 / 120.f + rest / 720)))));
    exp *= exp;
    exp *= exp;
    union { int32_t bits; float value; } two = {(floor + 127) << 23};
    return exp * two.value;
}

/* Write the inputs of the correction and the soft-argmax for one direction of a match. The cosine of cell i of the own
 * window with cell j of the other one is at i * own + j * other. */
static void describe(const Meet *m, int64_t row, const float *middle, const float *other_middle, const float *cosines,
                     int own, int other)
{
    const int64_t channels = m->channels;
    float *to = m->inputs + row * (2 * channels + WINDOW * WINDOW + 1);
    memcpy(to, middle, channels * sizeof(float));
    memcpy(to + channels, other_middle, channels * sizeof(float));
    to += 2 * channels;
    for (int i = 0; i < WINDOW; i++)
        for (int j = 0; j < WINDOW; j++)
            to[i * WINDOW + j] = 4 * cosines[i * own + j * other];
    to[WINDOW * WINDOW] = m->known[row];

    float highest = -INFINITY, total = 0, x = 0, y = 0;
    for (int j = 0; j < WINDOW; j++) {
        const float cosine = cosines[MIDDLE * own + j * other];
        highest = cosine > highest ? cosine : highest;
    }
    for (int j = 0; j < WINDOW; j++) {
        const float weight = fading((cosines[MIDDLE * own + j * other] - highest) / m->temperature);
        total += weight, x += weight * (j % 3 - 1), y += weight * (j / 3 - 1);
    }
    m->offsets[2 * row] = x / total, m->offsets[2 * row + 1] = y / total;
}

static void meet_match(const Meet *m, int64_t match)
{
    const int64_t channels = m->channels, whole = channels / LANES * LANES, pair = m->pair[match];
    const float *window0[WINDOW], *window1[WINDOW];
    window_of(m->features0 + pair * m->height0 * m->width0 * channels, m->index0[match], m->height0, m->width0,
              channels, window0);
    window_of(m->features1 + pair * m->height1 * m->width1 * channels, m->index1[match], m->height1, m->width1,
              channels, window1);
    float cosines[WINDOW * WINDOW];
    for (int i = 0; i < WINDOW; i += 3)
        for (int j = 0; j < WINDOW; j += 3) {
            lanes sums[9] = {{0}};
            for (int64_t k = 0; k < whole; k += LANES) {
                lanes a0 = load(window0[i] + k), a1 = load(window0[i + 1] + k), a2 = load(window0[i + 2] + k);
                lanes b0 = load(window1[j] + k), b1 = load(window1[j + 1] + k), b2 = load(window1[j + 2] + k);
                sums[0] += a0 * b0, sums[1] += a0 * b1, sums[2] += a0 * b2;
                sums[3] += a1 * b0, sums[4] += a1 * b1, sums[5] += a1 * b2;
                sums[6] += a2 * b0, sums[7] += a2 * b1, sums[8] += a2 * b2;
            }
            for (int n = 0; n < 9; n++) {
                const float *a = window0[i + n / 3], *b = window1[j + n % 3];
                float sum = sum_of(sums[n]);
                for (int64_t k = whole; k < channels; k++)
                    sum += a[k] * b[k];
                cosines[(i + n / 3) * WINDOW + j + n % 3] = sum;
            }
        }
    if (m->cosines != NULL)
        memcpy(m->cosines + match * WINDOW * WINDOW, cosines, sizeof cosines);
    if (m->known != NULL) {
        describe(m, match, window0[MIDDLE], window1[MIDDLE], cosines, WINDOW, 1);
        describe(m, match + m->count, window1[MIDDLE], window0[MIDDLE], cosines, 1, WINDOW);
    }
}

static void explain_match(const Explain *e, int64_t match)
{
    const int64_t count = e->neighbors, at = e->at[match];
    float x[count], y[count], u[count], v[count], trust[count];
    const float *maps = e->maps + at, *known = e->known + match;
    const float here_x = known[0], here_y = known[e->count];
    const float there_x = known[2 * e->count], there_y = known[3 * e->count];
    float xx = 0, xy = 0, yy = 0, xu = 0, yu = 0, xv = 0, yv = 0, all = 0;
#pragma omp simd reduction(+ : xx, xy, yy, xu, yu, xv, yv, all)
    for (int64_t k = 0; k < count; k++) {
        const float *neighbor = maps + e->offsets[k];
        x[k] = neighbor[0] - here_x;
        y[k] = neighbor[e->places] - here_y;
        u[k] = neighbor[2 * e->places] - there_x;
        v[k] = neighbor[3 * e->places] - there_y;
        trust[k] = neighbor[4 * e->places];
        float wx = trust[k] * x[k], wy = trust[k] * y[k];
        xx += wx * x[k], xy += wx * y[k], yy += wy * y[k];
        xu += wx * u[k], yu += wy * u[k], xv += wx * v[k], yv += wy * v[k];
        all += trust[k];
    }
    xx += e->ridge, yy += e->ridge;
    const float inverse = 1 / (xx * yy - xy * xy);
    const float a = (yy * xu - xy * yu) * inverse, b = (xx * yu - xy * xu) * inverse;
    const float c = (yy * xv - xy * yv) * inverse, d = (xx * yv - xy * xv) * inverse;
    const float sharp = -0.5f / (e->sigma * e->sigma), wide = -0.5f / (e->near * e->near);
    float agree = 0, total = 0, shift_x = 0, shift_y = 0;
#pragma omp simd reduction(+ : agree, total, shift_x, shift_y)
    for (int64_t k = 0; k < count; k++) {
        float left_x = u[k] - a * x[k] - b * y[k], left_y = v[k] - c * x[k] - d * y[k];
        float stray = left_x * left_x + left_y * left_y, weight = trust[k] * fading(stray * wide);
        agree += trust[k] * fading(stray * sharp);
        total += weight, shift_x += weight * left_x, shift_y += weight * left_y;
    }
    e->share[match] = agree / (all + e->doubt);
    float *motion = e->motion + 4 * match, *shift = e->shift + 2 * match;
    motion[0] = a, motion[1] = b, motion[2] = c, motion[3] = d;
    shift[0] = shift_x / (total + e->own), shift[1] = shift_y / (total + e->own);
}

/* Sample an image at several positions, bilinear and clamped at the border. */
INLINE void look(const float *image, int64_t height, int64_t width, int64_t count, float x, float y,
                 const float *across, const float *down, float *seen)
{
    const int32_t stride = (int32_t)width;
    const float last_x = width - 1, last_y = height - 1;
#pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        float at_x = x + across[k], at_y = y + down[k];
        at_x = at_x > 0 ? at_x < last_x ? at_x : last_x : 0;
        at_y = at_y > 0 ? at_y < last_y ? at_y : last_y : 0;
        int32_t left = (int32_t)at_x, top = (int32_t)at_y;
        left = left < stride - 2 ? left : stride - 2;
        top = top < (int32_t)height - 2 ? top : (int32_t)height - 2;
        const float share_x = at_x - left, share_y = at_y - top;
        const float *pixel = image + top * stride + left;
        const float above = pixel[0] + share_x * (pixel[1] - pixel[0]);
        const float below = pixel[stride] + share_x * (pixel[stride + 1] - pixel[stride]);
        seen[k] = above + share_y * (below - above);
    }
}

/* Sample at a point plus whole-pixel offsets, and one pixel to each side. The point must be well inside the image. All
 * samples then share the same interpolation weights. */
INLINE void look_around(const float *image, int64_t width, int64_t count, float x, float y, const float *across,
                        const float *down, float *seen, float *left, float *right, float *above, float *below)
{
    const int32_t stride = (int32_t)width, column = (int32_t)x, row = (int32_t)y;
    const float share_x = x - column, share_y = y - row;
    const float *first = image + row * stride + column;
#pragma omp simd
    for (int64_t k = 0; k < count; k++) {
        const float *p = first + (int32_t)down[k] * stride + (int32_t)across[k], *q = p + stride;
        const float p0 = p[0], p1 = p[1], q0 = q[0], q1 = q[1];
        const float upper = p0 + share_x * (p1 - p0), lower = q0 + share_x * (q1 - q0);
        seen[k] = upper + share_y * (lower - upper);
        const float upper_left = p[-1] + share_x * (p0 - p[-1]), lower_left = q[-1] + share_x * (q0 - q[-1]);
        left[k] = upper_left + share_y * (lower_left - upper_left);
        const float upper_right = p1 + share_x * (p[2] - p1), lower_right = q1 + share_x * (q[2] - q1);
        right[k] = upper_right + share_y * (lower_right - upper_right);
        const float *o = p - stride, *r = q + stride;
        const float top = o[0] + share_x * (o[1] - o[0]), bottom = r[0] + share_x * (r[1] - r[0]);
        above[k] = top + share_y * (upper - top);
        below[k] = lower + share_y * (bottom - lower);
    }
}

INLINE int inside(float x, float y, float reach_x, float reach_y, int64_t height, int64_t width)
{
    return x - reach_x >= 0 && y - reach_y >= 0 && x + reach_x <= width - 1 && y + reach_y <= height - 1;
}

static void fit_match(const Fit *f, int64_t match)
{
    const int64_t places = f->places, pair = f->pair[match];
    const float x0 = f->points0[2 * match], y0 = f->points0[2 * match + 1];
    const float x1 = f->points1[2 * match], y1 = f->points1[2 * match + 1];
    const float *motion = f->motion + 4 * match, a = motion[0], b = motion[1], c = motion[2], d = motion[3];
    float *move = f->moves + 2 * match;
    move[0] = move[1] = 0;
    const float area = a * d - b * c;
    if (!(area > 1 / f->largest && area < f->largest))
        return;
    /* Reject windows that cross the border, or could cross it while they move. */
    if (!inside(x0, y0, f->reach + 1, f->reach + 1, f->height0, f->width0) ||
        !inside(x1, y1, (fabsf(a) + fabsf(b)) * f->reach + f->farthest, (fabsf(c) + fabsf(d)) * f->reach + f->farthest,
                f->height1, f->width1))
        return;

    const float *image0 = f->light0 + pair * f->height0 * f->width0, *weights = f->weights;
    const float *image1 = f->light1 + pair * f->height1 * f->width1;
    float template[places], left[places], right[places], above[places], below[places];
    if (x0 + f->reach + 2 < f->width0 - 1 && y0 + f->reach + 2 < f->height0 - 1) {
        look_around(image0, f->width0, places, x0, y0, f->across, f->down, template, left, right, above, below);
    } else {
        look(image0, f->height0, f->width0, places, x0, y0, f->across, f->down, template);
        look(image0, f->height0, f->width0, places, x0 - 1, y0, f->across, f->down, left);
        look(image0, f->height0, f->width0, places, x0 + 1, y0, f->across, f->down, right);
        look(image0, f->height0, f->width0, places, x0, y0 - 1, f->across, f->down, above);
        look(image0, f->height0, f->width0, places, x0, y0 + 1, f->across, f->down, below);
    }

    float mean = 0, square = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t k = 0; k < places; k++)
        mean += weights[k] * template[k];
#pragma omp simd reduction(+ : square)
    for (int64_t k = 0; k < places; k++) {
        template[k] -= mean;
        square += weights[k] * template[k] * template[k];
    }
    const float scale = 1 / sqrtf(square + LITTLE);
    /* Derivatives of the normalized window. The components along gain and offset are projected out. */
    float slope_x[places], slope_y[places], mean_x = 0, mean_y = 0, same_x = 0, same_y = 0;
#pragma omp simd reduction(+ : mean_x, mean_y, same_x, same_y)
    for (int64_t k = 0; k < places; k++) {
        template[k] *= scale;
        slope_x[k] = (right[k] - left[k]) * (scale / 2);
        slope_y[k] = (below[k] - above[k]) * (scale / 2);
        mean_x += weights[k] * slope_x[k], mean_y += weights[k] * slope_y[k];
        same_x += weights[k] * slope_x[k] * template[k], same_y += weights[k] * slope_y[k] * template[k];
    }
    float xx = 0, xy = 0, yy = 0;
#pragma omp simd reduction(+ : xx, xy, yy)
    for (int64_t k = 0; k < places; k++) {
        slope_x[k] -= mean_x + same_x * template[k];
        slope_y[k] -= mean_y + same_y * template[k];
        xx += weights[k] * slope_x[k] * slope_x[k];
        xy += weights[k] * slope_x[k] * slope_y[k];
        yy += weights[k] * slope_y[k] * slope_y[k];
    }
    xx += f->damping, yy += f->damping;
    const float inverse = 1 / (xx * yy - xy * xy);

    float offset_x[places], offset_y[places], other[places];
#pragma omp simd
    for (int64_t k = 0; k < places; k++) {
        offset_x[k] = a * f->across[k] + b * f->down[k];
        offset_y[k] = c * f->across[k] + d * f->down[k];
    }
    float move_x = 0, move_y = 0, before = 0;
    for (int32_t round = 0;; round++) {
        look(image1, f->height1, f->width1, places, x1 + move_x, y1 + move_y, offset_x, offset_y, other);
        float mean1 = 0, square1 = 0, likeness = 0, x = 0, y = 0;
#pragma omp simd reduction(+ : mean1, likeness, x, y)
        for (int64_t k = 0; k < places; k++) {
            float weighed = weights[k] * other[k];
            /* Template and slopes have zero mean and are orthogonal, so this window needs no normalization here. */
            mean1 += weighed, likeness += weighed * template[k], x += weighed * slope_x[k], y += weighed * slope_y[k];
        }
#pragma omp simd reduction(+ : square1)
        for (int64_t k = 0; k < places; k++)
            square1 += weights[k] * (other[k] - mean1) * (other[k] - mean1);
        const float scale1 = 1 / sqrtf(square1 + LITTLE), alike = likeness * scale1;
        if (round == 0)
            before = alike;
        if (round == f->rounds) {
            const float moved = sqrtf(move_x * move_x + move_y * move_y);
            if (alike > before + f->gain && alike > f->least && moved < f->farthest)
                move[0] = move_x, move[1] = move_y;
            return;
        }
        x *= scale1, y *= scale1;
        float step_x = (yy * x - xy * y) * inverse, step_y = (xx * y - xy * x) * inverse;
        step_x = isfinite(step_x) ? step_x : 0, step_y = isfinite(step_y) ? step_y : 0;
        const float length = sqrtf(step_x * step_x + step_y * step_y) / f->longest;
        if (length > 1)
            step_x /= length, step_y /= length;
        move_x -= a * step_x + b * step_y, move_y -= c * step_x + d * step_y;
    }
}

#define ALL_MATCHES(name, structure)                                              \
    EXPORT int dualrc_##name(const structure *s)                                  \
    {                                                                             \
        _Pragma("omp parallel for num_threads(s->threads) schedule(static)")      \
        for (int64_t match = 0; match < s->count; match++)                        \
            name##_match(s, match);                                               \
        return 0;                                                                 \
    }

ALL_MATCHES(meet, Meet)
ALL_MATCHES(explain, Explain)
ALL_MATCHES(fit, Fit)
