/* The float32 CPU kernels between the matrix products of a decoder.
 *
 * Takes: raw pointers to float32 and int64 arrays, row-major. Gives: the same arrays, filled.
 * Never: allocates anything that outlives a call, or lets the result of one row depend on
 * another row's place (each row has its own fixed order of additions).
 *
 * The key cache of one slot and head is [T / W][dh][W] (blocks of W keys, transposed), so that
 * scores of W keys are computed at once without a horizontal sum; values are [T][dh].
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Floats of a vector register, handled at once; also the length of a key block. GCC keeps wider vectors
 * in memory, which makes attention with AVX2 two to five times as slow. */
#ifdef __AVX512F__
#define W 16
#else
#define W 8
#endif
#define MAX_ROWS 8

/* Below these, waking the other threads costs more than they save (and far more on a busy machine). */
#define WORTH_ELEMENTS 32768
#define WORTH_FLOPS 2000000

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec select_vec(ivec mask, vec a, vec b) {
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }
INLINE vec min_vec(vec a, vec b) { return select_vec(a < b, a, b); }

INLINE float sum_lanes(vec x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

INLINE float max_lanes(vec x) {
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* exp by 2^n * p(r), |r| <= ln2 / 2, p the Taylor polynomial of degree 7; about 1 ulp. */
INLINE vec exp_vec(vec x) {
    x = min_vec(max_vec(x, splat(-87.0f)), splat(88.0f));
    vec shifted = x * splat(1.44269504f) + splat(12582912.0f); /* 1.5 * 2^23: rounds to nearest */
    vec n = shifted - splat(12582912.0f);
    vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec p = splat(1.9841270e-4f);
    p = p * r + splat(1.3888889e-3f);
    p = p * r + splat(8.3333333e-3f);
    p = p * r + splat(4.1666667e-2f);
    p = p * r + splat(1.6666667e-1f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    ivec e = __builtin_convertvector(n, ivec);
    return (vec)((ivec)p + (e << 23));
}

INLINE float inv_rms(const float *x, int64_t d, float eps) {
    vec acc = {0};
    int64_t i = 0;
    for (; i + W <= d; i += W) acc += load(x + i) * load(x + i);
    float s = sum_lanes(acc);
    for (; i < d; i++) s += x[i] * x[i];
    return 1.0f / sqrtf(s / (float)d + eps);
}

/* out[n] = rms_norm(x[n]) * w, after x[n] += r[n] where r is given. x, r, out: [num, d]. */
void rollart_add_rms_norm(float *x, const float *r, const float *w, float *out, int64_t num,
                          int64_t d, float eps) {
#pragma omp parallel for schedule(static) if (num * d > WORTH_ELEMENTS)
    for (int64_t n = 0; n < num; n++) {
        float *xn = x + n * d, *on = out + n * d;
        if (r)
            for (int64_t i = 0; i < d; i++) xn[i] += r[n * d + i];
        float scale = inv_rms(xn, d, eps);
        for (int64_t i = 0; i < d; i++) on[i] = w[i] * (xn[i] * scale);
    }
}

/* out[n, i] = silu(gu[n, i]) * gu[n, f + i]. gu: [num, 2 f], out: [num, f]; f % 16 == 0. */
void rollart_silu_mul(const float *gu, float *out, int64_t num, int64_t f) {
#pragma omp parallel for schedule(static) if (num * f > WORTH_ELEMENTS)
    for (int64_t n = 0; n < num; n++) {
        const float *g = gu + n * 2 * f, *u = g + f;
        for (int64_t i = 0; i < f; i += W) {
            vec x = load(g + i);
            store(out + n * f + i, x / (splat(1.0f) + exp_vec(-x)) * load(u + i));
        }
    }
}

INLINE void norm_and_turn(float *x, const float *w, const float *cos, const float *sin, int64_t dh,
                          float eps) {
    int64_t half = dh / 2;
    if (w) {
        float scale = inv_rms(x, dh, eps);
        for (int64_t i = 0; i < dh; i++) x[i] = w[i] * (x[i] * scale);
    }
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Normalise and rotate q and k of qkv [num, (hq + 2 hk) dh] in place; write k and v to the cache.
 * qw, kw: [dh] or null. cos, sin: [positions, dh / 2]. slots, pos: [num].
 * keys, values: one layer, [slots][hk][T * dh]. */
void rollart_rotate_and_store(float *qkv, const float *qw, const float *kw, const float *cos,
                              const float *sin, const int64_t *slots, const int64_t *pos,
                              float *keys, float *values, int64_t num, int64_t hq, int64_t hk,
                              int64_t dh, int64_t T, float eps) {
#pragma omp parallel for schedule(static) if (num * (hq + 2 * hk) * dh > WORTH_ELEMENTS)
    for (int64_t n = 0; n < num; n++) {
        float *row = qkv + n * (hq + 2 * hk) * dh;
        int64_t p = pos[n];
        const float *c = cos + p * (dh / 2), *s = sin + p * (dh / 2);
        for (int64_t h = 0; h < hq; h++) norm_and_turn(row + h * dh, qw, c, s, dh, eps);
        for (int64_t h = 0; h < hk; h++) {
            float *k = row + (hq + h) * dh;
            norm_and_turn(k, kw, c, s, dh, eps);
            int64_t base = (slots[n] * hk + h) * T * dh;
            float *block = keys + base + (p / W) * W * dh + p % W;
            for (int64_t i = 0; i < dh; i++) block[i * W] = k[i];
            memcpy(values + base + p * dh, row + (hq + hk + h) * dh, (size_t)dh * sizeof(float));
        }
    }
}

/* Scores of R rows with NB key blocks: s[r][W nb] = q[r] . k. */
INLINE void score_blocks(const float *q, const float *k, float *s, int64_t ld, int64_t dh,
                         const int R, const int NB) {
    vec acc[MAX_ROWS][4];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < NB; b++) acc[r][b] = (vec){0};
    for (int64_t i = 0; i < dh; i++) {
        vec kv[4];
        for (int b = 0; b < NB; b++) kv[b] = load(k + (b * dh + i) * W);
        for (int r = 0; r < R; r++)
            for (int b = 0; b < NB; b++) acc[r][b] += splat(q[r * dh + i]) * kv[b];
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < NB; b++) store(s + r * ld + b * W, acc[r][b]);
}

INLINE void score_rows(const float *q, const float *keys, float *s, int64_t ld, int64_t blocks,
                       int64_t dh, const int R, const int NB) {
    int64_t b = 0;
    for (; b + NB <= blocks; b += NB)
        score_blocks(q, keys + b * W * dh, s + b * W, ld, dh, R, NB);
    for (; b < blocks; b++) score_blocks(q, keys + b * W * dh, s + b * W, ld, dh, R, 1);
}

/* s becomes exp(s - max) over the first len entries and 0 up to W * blocks; returns the sum. */
INLINE float softmax_row(float *s, int64_t len, int64_t blocks) {
    ivec lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    vec low = splat(-INFINITY), m = low, sum = {0};
    for (int64_t b = 0; b < blocks; b++) {
        ivec valid = lanes < (ivec)((ivec){0} + (int32_t)(len - b * W));
        vec x = select_vec(valid, load(s + b * W), low);
        store(s + b * W, x);
        m = max_vec(m, x);
    }
    vec top = splat(max_lanes(m));
    for (int64_t b = 0; b < blocks; b++) {
        ivec valid = lanes < (ivec)((ivec){0} + (int32_t)(len - b * W));
        vec e = (vec)(valid & (ivec)exp_vec(load(s + b * W) - top));
        store(s + b * W, e);
        sum += e;
    }
    return sum_lanes(sum);
}

/* out[r] = sum_t p[r][t] v[t] over W * C columns, R rows at once; v has stride dh. */
INLINE void weigh_values(const float *p, int64_t ld, const float *v, int64_t dh, int64_t len,
                         float **out, const float *inv_sum, int64_t col, const int R, const int C) {
    vec acc[4][4];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = (vec){0};
    for (int64_t t = 0; t < len; t++) {
        vec vt[4];
        for (int c = 0; c < C; c++) vt[c] = load(v + t * dh + col + c * W);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] += splat(p[r * ld + t]) * vt[c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            store(out[r] + col + c * W, acc[r][c] * splat(inv_sum[r]));
}

INLINE void weigh_rows(const float *p, int64_t ld, const float *v, int64_t dh, int64_t len,
                       float **out, const float *inv_sum, const int R) {
    int64_t col = 0;
    for (; col + 4 * W <= dh; col += 4 * W)
        weigh_values(p, ld, v, dh, len, out, inv_sum, col, R, 4);
    for (; col < dh; col += W) weigh_values(p, ld, v, dh, len, out, inv_sum, col, R, 1);
}

/* Up to MAX_ROWS query rows of one kv head. lens: keys each row may see; the last is the largest. */
static void attend(const float *q, const float *keys, const float *values, float *s, int64_t ld,
                   const int64_t *lens, float **out, int rows, int64_t dh) {
    int64_t longest = lens[rows - 1], blocks = (longest + W - 1) / W;
    float inv_sum[MAX_ROWS];
    switch (rows) {
    case 1: score_rows(q, keys, s, ld, blocks, dh, 1, 4); break;
    case 2: score_rows(q, keys, s, ld, blocks, dh, 2, 4); break;
    case 3:
    case 4: score_rows(q, keys, s, ld, blocks, dh, 4, 4); break;
    default: score_rows(q, keys, s, ld, blocks, dh, 8, 2); break;
    }
    for (int r = 0; r < rows; r++) inv_sum[r] = 1.0f / softmax_row(s + r * ld, lens[r], blocks);
    int r = 0;
    for (; r + 4 <= rows; r += 4)
        weigh_rows(s + r * ld, ld, values, dh, longest, out + r, inv_sum + r, 4);
    for (; r + 2 <= rows; r += 2)
        weigh_rows(s + r * ld, ld, values, dh, longest, out + r, inv_sum + r, 2);
    for (; r < rows; r++)
        weigh_rows(s + r * ld, ld, values, dh, longest, out + r, inv_sum + r, 1);
}

/* Causal attention of tokens against their slots' caches (their own keys already stored).
 * qkv: [num, (hq + 2 hk) dh], q rotated; out: [num, hq dh]. Work items cut the segments into
 * blocks of query rows: item_first [items] is the first token row, item_rows the number of tokens,
 * item_slot the slot, item_pos the position of the first token. dh % 16 == 0. */
void rollart_attention(const float *qkv, float *out, const float *keys, const float *values,
                       const int64_t *item_first, const int64_t *item_rows,
                       const int64_t *item_slot, const int64_t *item_pos, int64_t items, int64_t hq,
                       int64_t hk, int64_t dh, int64_t T, float scale) {
    const int64_t g = hq / hk, width = (hq + 2 * hk) * dh;
    int64_t flops = 0;
    for (int64_t it = 0; it < items; it++)
        flops += 4 * item_rows[it] * (item_pos[it] + item_rows[it]) * hq * dh;
#pragma omp parallel if (flops > WORTH_FLOPS)
    {
        float *s = aligned_alloc(64, (size_t)MAX_ROWS * (size_t)T * sizeof(float));
        float *q = aligned_alloc(64, (size_t)MAX_ROWS * (size_t)dh * sizeof(float));
        memset(q, 0, (size_t)MAX_ROWS * (size_t)dh * sizeof(float));
#pragma omp for schedule(dynamic, 8)
        for (int64_t it = 0; it < items; it++) {
            for (int64_t h = 0; h < hk; h++) {
                const int64_t base = (item_slot[it] * hk + h) * T * dh, total = item_rows[it] * g;
                for (int64_t first = 0; first < total; first += MAX_ROWS) {
                    int rows = (int)(total - first < MAX_ROWS ? total - first : MAX_ROWS);
                    int64_t lens[MAX_ROWS];
                    float *outs[MAX_ROWS];
                    for (int r = 0; r < rows; r++) {
                        int64_t token = (first + r) / g, head = h * g + (first + r) % g;
                        int64_t n = item_first[it] + token;
                        const float *from = qkv + n * width + head * dh;
                        for (int64_t i = 0; i < dh; i++) q[r * dh + i] = from[i] * scale;
                        lens[r] = item_pos[it] + token + 1;
                        outs[r] = out + (n * hq + head) * dh;
                    }
                    attend(q, keys + base, values + base, s, T, lens, outs, rows, dh);
                }
            }
        }
        free(s);
        free(q);
    }
}

/* Copy the first len tokens of a slot in one layer. keys, values as above; len is rounded up to a
 * whole key block. */
void rollart_copy_slot(float *keys, float *values, int64_t from, int64_t to, int64_t len,
                       int64_t hk, int64_t dh, int64_t T) {
    int64_t count = (len + W - 1) / W * W * dh;
    for (int64_t h = 0; h < hk; h++) {
        int64_t a = (from * hk + h) * T * dh, b = (to * hk + h) * T * dh;
        memcpy(keys + b, keys + a, (size_t)count * sizeof(float));
        memcpy(values + b, values + a, (size_t)count * sizeof(float));
    }
}

/* exp((x - top) t) of up to CHUNK entries into e; returns their sum. */
#define CHUNK 256
INLINE double exp_chunk(const float *x, float *e, int64_t num, float top, float t) {
    typedef double dvec __attribute__((vector_size(4 * W), aligned(4)));
    typedef float half __attribute__((vector_size(2 * W), aligned(4), may_alias));
    dvec sum = {0};
    for (int64_t i = 0; i < num; i += W) {
        vec y = splat(-INFINITY);
        if (i + W <= num)
            y = (load(x + i) - splat(top)) * splat(t);
        else
            for (int64_t j = i; j < num; j++) y[j - i] = (x[j] - top) * t;
        y = (vec)(~(ivec)(y < splat(-87.0f)) & (ivec)exp_vec(y));
        store(e + i, y);
        sum += __builtin_convertvector(*(half *)(e + i), dvec);
        sum += __builtin_convertvector(*(half *)(e + i + W / 2), dvec);
    }
    double total = 0;
    for (int i = 0; i < W / 2; i++) total += sum[i];
    return total;
}

/* First index whose running sum passes target; sums: one per CHUNK of e. */
INLINE int64_t search(const float *e, const double *sums, double target, int64_t v) {
    int64_t c = 0, last = -1, chunks = (v + CHUNK - 1) / CHUNK;
    double cdf = 0;
    while (c < chunks - 1 && cdf + sums[c] <= target) cdf += sums[c++];
    for (int64_t i = c * CHUNK; i < v && i < (c + 1) * CHUNK; i++) {
        cdf += e[i];
        if (e[i] > 0) last = i;
        if (cdf > target) break;
    }
    return last;
}

INLINE float max_of(const float *x, int64_t v) {
    vec m = splat(-INFINITY), bad = {0};
    int64_t i = 0;
    for (; i + W <= v; i += W) m = max_vec(load(x + i), m), bad += load(x + i) * splat(0.0f);
    float top = max_lanes(m), odd = sum_lanes(bad);
    for (; i < v; i++) top = x[i] > top ? x[i] : top, odd += x[i] * 0.0f;
    return top + odd; /* NaN when any entry is not finite */
}

/* Draw one token a row by inverse CDF. logits: [num, v]; inv_temp: [num], 1 / temperature;
 * uniform: [num] in (0, 1), negative for greedy. tokens, logprobs: [num], of the scaled logits.
 * A row with an entry that is not finite gets token -1. */
void rollart_sample(const float *logits, const float *inv_temp, const double *uniform,
                    int64_t *tokens, float *logprobs, int64_t num, int64_t v) {
    const int64_t chunks = (v + CHUNK - 1) / CHUNK;
#pragma omp parallel if (num * v > WORTH_ELEMENTS)
    {
        float *e = aligned_alloc(64, (size_t)(chunks * CHUNK) * sizeof(float));
        double *sums = aligned_alloc(64, (size_t)(chunks + 7) / 8 * 8 * sizeof(double));
#pragma omp for schedule(static)
        for (int64_t n = 0; n < num; n++) {
            const float *x = logits + n * v, top = max_of(x, v), t = inv_temp[n];
            tokens[n] = -1;
            logprobs[n] = 0;
            if (!(top - top == 0)) continue;
            double total = 0;
            for (int64_t c = 0; c < chunks; c++) {
                int64_t left = v - c * CHUNK;
                sums[c] = exp_chunk(x + c * CHUNK, e + c * CHUNK, left < CHUNK ? left : CHUNK, top, t);
                total += sums[c];
            }
            int64_t best = 0;
            while (x[best] != top) best++;
            int64_t drawn = uniform[n] < 0 ? best : search(e, sums, uniform[n] * total, v);
            tokens[n] = drawn < 0 ? best : drawn;
            logprobs[n] = (x[tokens[n]] - top) * t - (float)log(total);
        }
        free(e);
        free(sums);
    }
}
