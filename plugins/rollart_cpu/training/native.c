/* The float32 CPU functions of the training forward and backward that are not matrix products.
 *
 * Takes: raw pointers to row-major float32 arrays. Gives: the output arrays, filled. Never:
 * allocates, or lets the number a row gets depend on other rows; sums over rows (weight
 * gradients) are one partial sum a thread, over a fixed range of rows.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Floats of a vector register; GCC keeps wider vectors in memory. */
#ifdef __AVX512F__
#define W 16
#else
#define W 8
#endif
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec clamp(vec x, float low, float high) {
    ivec below = x < splat(low), above = x > splat(high);
    x = (vec)((below & (ivec)splat(low)) | (~below & (ivec)x));
    return (vec)((above & (ivec)splat(high)) | (~above & (ivec)x));
}

INLINE float total(vec x) {
    float s = 0;
    for (int i = 0; i < W; i++) s += x[i];
    return s;
}

INLINE float dot(const float *a, const float *b, int64_t d) {
    vec acc = {0};
    int64_t i = 0;
    for (; i + W <= d; i += W) acc += load(a + i) * load(b + i);
    float s = total(acc);
    for (; i < d; i++) s += a[i] * b[i];
    return s;
}

/* exp(x) = 2^n p(r) with r = x - n ln 2, |r| <= ln(2) / 2, p the Taylor polynomial to r^6. */
INLINE vec exponential(vec x) {
    x = clamp(x, -87.0f, 88.0f);
    const vec magic = splat(12582912.0f); /* 1.5 2^23: adding it rounds to an integer */
    vec n = (x * splat(1.44269504f) + magic) - magic;
    vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec p = splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    return (vec)((ivec)p + (__builtin_convertvector(n, ivec) << 23));
}

INLINE vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

INLINE void swiglu_at(const float *g, const float *u, float *h) {
    vec x = load(g);
    store(h, x * sigmoid(x) * load(u));
}

INLINE void swiglu_back_at(const float *dh, const float *g, const float *u, float *dg, float *du) {
    vec x = load(g), s = sigmoid(x), grad = load(dh);
    store(du, grad * x * s);
    store(dg, grad * load(u) * s * (splat(1.0f) + x * (splat(1.0f) - s)));
}

/* h = silu(g) u, n numbers. */
void swiglu(const float *g, const float *u, float *h, int64_t n, int threads) {
    int64_t whole = n / W * W;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i += W) swiglu_at(g + i, u + i, h + i);
    if (whole < n) {
        float a[W] = {0}, b[W] = {0}, c[W];
        memcpy(a, g + whole, (n - whole) * sizeof(float));
        memcpy(b, u + whole, (n - whole) * sizeof(float));
        swiglu_at(a, b, c);
        memcpy(h + whole, c, (n - whole) * sizeof(float));
    }
}

void swiglu_back(const float *dh, const float *g, const float *u, float *dg, float *du, int64_t n,
                 int threads) {
    int64_t whole = n / W * W;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i += W) swiglu_back_at(dh + i, g + i, u + i, dg + i, du + i);
    if (whole < n) {
        float a[W] = {0}, b[W] = {0}, c[W] = {0}, x[W], y[W];
        size_t rest = (n - whole) * sizeof(float);
        memcpy(a, dh + whole, rest);
        memcpy(b, g + whole, rest);
        memcpy(c, u + whole, rest);
        swiglu_back_at(a, b, c, x, y);
        memcpy(dg + whole, x, rest);
        memcpy(du + whole, y, rest);
    }
}

INLINE float normalise(const float *x, const float *w, float *y, int64_t d, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, d) / (float)d + eps);
    int64_t i = 0;
    for (; i + W <= d; i += W) store(y + i, load(x + i) * splat(scale) * load(w + i));
    for (; i < d; i++) y[i] = x[i] * scale * w[i];
    return scale;
}

/* dx of y = w x scale, and dw +=; g: the gradient of y; dx may be g. */
INLINE void normalise_back(const float *g, const float *x, const float *w, float scale, float *dx,
                           float *dw, int64_t d) {
    vec acc = {0};
    int64_t i = 0;
    for (; i + W <= d; i += W) acc += load(g + i) * load(w + i) * load(x + i);
    float s = total(acc);
    for (; i < d; i++) s += g[i] * w[i] * x[i];
    float c = s * scale * scale / (float)d;
    for (i = 0; i + W <= d; i += W) {
        vec gi = load(g + i), xi = load(x + i);
        store(dw + i, load(dw + i) + gi * xi * splat(scale));
        store(dx + i, splat(scale) * (gi * load(w + i) - xi * splat(c)));
    }
    for (; i < d; i++) {
        dw[i] += g[i] * x[i] * scale;
        dx[i] = scale * (g[i] * w[i] - x[i] * c);
    }
}

/* y = w x / rms(x), by row; x, y: [n, d]; scale: [n]. */
void rms_norm(const float *x, const float *w, float *y, float *scale, int64_t n, int64_t d,
              float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < n; r++) scale[r] = normalise(x + r * d, w, y + r * d, d, eps);
}

/* dw: [threads, d], zeroed by the caller, one partial sum a range of rows. */
void rms_norm_back(const float *g, const float *x, const float *w, const float *scale, float *dx,
                   float *dw, int64_t n, int64_t d, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++)
        for (int64_t r = n * t / threads; r < n * (t + 1) / threads; r++)
            normalise_back(g + r * d, x + r * d, w, scale[r], dx + r * d, dw + t * d, d);
}

/* Rotate one head by the angle, or (sign -1) back; out may be in. */
INLINE void turn(const float *in, const float *c, const float *s, float *out, int64_t half,
                 float sign) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vec a = load(in + i), b = load(in + i + half);
        vec ci = load(c + i), si = load(s + i) * splat(sign);
        store(out + i, a * ci - b * si);
        store(out + i + half, b * ci + a * si);
    }
    for (; i < half; i++) {
        float a = in[i], b = in[i + half], si = s[i] * sign;
        out[i] = a * c[i] - b * si;
        out[i + half] = b * c[i] + a * si;
    }
}

/* Heads: normalise (where w is given), then rotate. x, y: [n, heads, d]; cos, sin: [n, d / 2]. */
void turn_heads(const float *x, const float *w, const float *cos, const float *sin, float *y,
                float *scale, int64_t n, int64_t heads, int64_t d, float eps, int threads) {
    int64_t half = d / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < n; r++) {
        const float *c = cos + r * half, *s = sin + r * half;
        for (int64_t h = r * heads; h < (r + 1) * heads; h++) {
            float *out = y + h * d;
            if (w) scale[h] = normalise(x + h * d, w, out, d, eps);
            turn(w ? out : x + h * d, c, s, out, half, 1.0f);
        }
    }
}

void turn_heads_back(const float *g, const float *x, const float *w, const float *cos,
                     const float *sin, const float *scale, float *dx, float *dw, int64_t n,
                     int64_t heads, int64_t d, int threads) {
    int64_t half = d / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int t = 0; t < threads; t++)
        for (int64_t r = n * t / threads; r < n * (t + 1) / threads; r++) {
            const float *c = cos + r * half, *s = sin + r * half;
            for (int64_t h = r * heads; h < (r + 1) * heads; h++) {
                float *out = dx + h * d;
                turn(g + h * d, c, s, out, half, -1.0f);
                if (w) normalise_back(out, x + h * d, w, scale[h], out, dw + t * d, d);
            }
        }
}
