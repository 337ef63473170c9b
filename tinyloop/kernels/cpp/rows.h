// The kernels that treat each row by itself: norms, the gated activation, rope with the write into the pages.
#pragma once

#include "common.h"
#include "threads.h"

namespace tinyloop {

template <class T>
float inverse_rms(const T* x, int n, float eps) {
  vec total = {};
  strips(n, [&](int i, int w) {
    vec v = load(x + i, w);
    total += v * v;
  });
  return 1.0f / std::sqrt(sum(total) / n + eps);
}

// out = norm(x) * weight, plus `added` if that is not null.
template <class T>
void rms_norm(const T* x, const T* weight, const T* added, T* out, long rows, int n, float eps, int threads) {
  parallel_rows(threads, rows, n, [=](long first, long last) {
    for (long r = first; r < last; r++) {
      const T* in = x + r * n;
      float scale = inverse_rms(in, n, eps);
      strips(n, [&](int i, int w) {
        vec normed = load(in + i, w) * scale * load(weight + i, w);
        if (added) normed += load(added + r * n + i, w);
        store(out + r * n + i, normed, w);
      });
    }
  });
}

inline vec gated(vec gate, vec up) { return gate / (1.0f + exponential(-gate)) * up; }

// out = silu(gate) * up of rows [gate | up], each n wide
template <class T>
void silu_mul(const T* gate_up, T* out, long rows, int n, int threads) {
  parallel_rows(threads, rows, 4L * n, [=](long first, long last) {  // an exponential costs
    for (long r = first; r < last; r++) {
      const T *gate = gate_up + r * 2 * n, *up = gate + n;
      strips(n, [&](int i, int w) {
        store(out + r * n + i, gated(load(gate + i, w), load(up + i, w)), w);
      });
    }
  });
}

// out = sigmoid(gate) * x of rows n wide
template <class T>
void sigmoid_mul(const T* gate, const T* x, T* out, long rows, int n, int threads) {
  parallel_rows(threads, rows, 4L * n, [=](long first, long last) {
    strips((int)((last - first) * n), [&](int i, int w) {
      long at = first * n + i;
      store(out + at, load(x + at, w) / (1.0f + exponential(-load(gate + at, w))), w);
    });
  });
}

// The largest of each row, and where it first stands. A NaN is larger than any number.
template <class T>
void most_likely(const T* logits, T* largest, int64_t* places, long rows, long n, int threads) {
  parallel(threads, rows, [=](long r) {
    const T* row = logits + r * n;
    const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec top = splat(-INFINITY);
    ivec at = lanes, broken = {};
    strips((int)n, [&](int i, int w) {
      vec v = w == W ? load(row + i) : load(row + i, w);
      if (w < W) v = lanes < w ? v : top;
      ivec more = v > top;
      at = more ? lanes + i : at;
      top = more ? v : top;
      broken |= v != v;
    });
    long best = at[0];
    for (int lane = 1; lane < W; lane++)
      if (top[lane] > value(row[best]) || (top[lane] == value(row[best]) && at[lane] < best)) best = at[lane];
    if (std::any_of(&broken[0], &broken[0] + W, [](int lane) { return lane != 0; }))
      best = std::find_if(row, row + n, [](T x) { return value(x) != value(x); }) - row;
    largest[r] = row[best];
    places[r] = best;
  });
}

// First half of a head against the second half.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int half) {
  strips(half, [&](int i, int w) {
    vec a = load(x + i, w), b = load(x + half + i, w), c = load(cos + i, w), s = load(sin + i, w);
    store(out + i, a * c - b * s, w);
    store(out + half + i, b * c + a * s, w);
  });
}

// Turned queries go to `turned`, turned keys and plain values to their slot of the pages. Rows of q, k and v lie
// `stride` elements apart, since they are parts of one product.
template <class T>
void rope_write(const T* q, const T* k, const T* v, long stride, const float* cos, const float* sin,
                const int64_t* slots, T* turned, T* keys, T* values, long rows, int heads, int kv_heads, int head_dim,
                int threads) {
  const long kept = (long)kv_heads * head_dim;
  const int half = head_dim / 2;
  parallel_rows(threads, rows, stride, [=](long first, long last) {
    for (long r = first; r < last; r++) {
      const float *c = cos + r * half, *s = sin + r * half;
      for (int i = 0; i < heads; i++)
        rotate(q + r * stride + i * head_dim, c, s, turned + (r * heads + i) * head_dim, half);
      for (int i = 0; i < kv_heads; i++)
        rotate(k + r * stride + i * head_dim, c, s, keys + slots[r] * kept + i * head_dim, half);
      std::memcpy(values + slots[r] * kept, v + r * stride, kept * sizeof(T));
    }
  });
}

}  // namespace tinyloop
