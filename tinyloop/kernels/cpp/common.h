// What all kernels share: storage types, vectors of 16 floats and what is done with them. Knows no kernel.
//
// Vectors are the compiler's own (vector_size), so one text serves every instruction set it is compiled for. What a
// processor lacks is split up by the compiler: slower, never wrong.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace tinyloop {

typedef uint16_t bf16;  // the upper half of a float
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
constexpr int W = 16;  // lanes of a vec

// Refuses places that lie outside of the pages: a wrong one must not be written to.
inline void check_within(const int64_t* places, long count, long end, const char* what) {
  for (long i = 0; i < count; i++)
    if (places[i] < 0 || places[i] >= end)
      throw std::out_of_range(std::string(what) + " " + std::to_string(places[i]) + " of " + std::to_string(end));
}

inline vec splat(float x) { return vec{} + x; }

inline vec load(const float* p) {
  vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline vec load(const bf16* p) {
#if defined(__AVX512F__)  // the compiler would do it in two halves
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  hvec h;
  std::memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
#endif
}

inline float value(float x) { return x; }

inline float value(bf16 x) {
  uint32_t word = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &word, sizeof f);
  return f;
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(bf16* p, vec v) {  // to the nearest, ties to even; a NaN stays one
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  uvec u = (uvec)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  u = (v == v) ? u : (uvec{} + 0x7fc0);
  hvec h = __builtin_convertvector(u, hvec);
#endif
  std::memcpy(p, &h, sizeof h);
}

// The first n <= W elements; the other lanes are zero.
template <class T>
inline vec load(const T* p, int n) {
  if (n == W) return load(p);
  T part[W] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}

template <class T>
inline void store(T* p, vec v, int n) {
  if (n == W) return store(p, v);
  T part[W];
  store(part, v);
  std::memcpy(p, part, n * sizeof(T));
}

// f(index, lanes) over n elements, W at a time.
template <class F>
inline void strips(int n, F f) {
  int i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, n - i);
}

typedef float half_vec __attribute__((vector_size(32)));
typedef float quarter_vec __attribute__((vector_size(16)));

// All lanes by twos, always in this order.
template <class F>
inline float reduce(vec v, F f) {
  half_vec h = f(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  quarter_vec q = f(__builtin_shufflevector(h, h, 0, 1, 2, 3), __builtin_shufflevector(h, h, 4, 5, 6, 7));
  q = f(q, __builtin_shufflevector(q, q, 2, 3, 0, 1));
  return f(q, __builtin_shufflevector(q, q, 1, 0, 3, 2))[0];
}

inline float sum(vec v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}

// f of each lane of a and the lane S apart in the lanes without S, the same of b in those with it.
template <int S, class F>
inline vec fold(vec a, vec b, F f) {
  constexpr auto from = [](int i, int lane) { return (i & S ? W : 0) + lane; };
#define LANES(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#define LOW(i) from(i, i & ~S)
#define HIGH(i) from(i, i | S)
  const ivec low = LANES(LOW), high = LANES(HIGH);
#undef LANES
#undef LOW
#undef HIGH
  return f(__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, high));
}

template <int S, class F>
inline void fold_all(vec* v, F f) {
#pragma GCC unroll 8
  for (int i = 0; i < S; i++) v[i] = fold<S>(v[i], v[i + S], f);
}

// f over all lanes of each of 16 vectors, always in the same order.
template <class F>
inline vec fold_lines(vec* v, F f) {
  fold_all<8>(v, f);
  fold_all<4>(v, f);
  fold_all<2>(v, f);
  fold_all<1>(v, f);
  return v[0];
}

inline vec sums(vec* v) {
  return fold_lines(v, [](vec a, vec b) { return a + b; });
}

inline vec larger(vec a, vec b) { return a > b ? a : b; }

inline vec largest(vec* v) { return fold_lines(v, larger); }

inline float largest(vec v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

constexpr float LOG2_E = 1.44269504f;

// e^x to about 2 ulp, infinite above 89; exactly 0 below -87, so a masked score weighs nothing (and nothing is denormal,
// which is slow).
#if defined(__AVX512F__)
inline vec exponential(vec x) {
  __m512 bounded = _mm512_min_ps(_mm512_set1_ps(128.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(LOG2_E)), 0);
  vec r = (vec)bounded - (vec)n * 0.693359375f + (vec)n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
}

// 2^x within 1e-4 of it, for what is rounded to bfloat16 anyway; x <= 0, and exactly 0 below -126.
inline vec rough_power(vec x) {
  __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);
  __m512 n = _mm512_roundscale_ps(bounded, 0);
  vec f = (vec)bounded - (vec)n, p = splat(0.05517165f);
  for (float c : {0.24261138f, 0.69326101f, 0.99992806f}) p = p * f + c;
  __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vec)_mm512_maskz_scalef_ps(seen, (__m512)p, n);
}
#else
inline vec exponential(vec x) {
  vec bounded = x < -87.0f ? splat(-87.0f) : x;
  bounded = bounded > 88.0f ? splat(88.0f) : bounded;
  const vec magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
  vec n = (bounded * LOG2_E + magic) - magic;
  vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
  return x < -87.0f ? splat(0.0f) : p * power;
}

inline vec rough_power(vec x) { return exponential(x / LOG2_E); }
#endif

#if defined(__AVX512F__)
// 16 x 16 words: blocks of 1, 2, 4 and 8 change places across the diagonal.
inline void transpose(vec* lines) {
  for (int step = 1; step < W; step *= 2) {
    ivec low, high;  // which lanes of a pair of lines stay or come
    for (int i = 0; i < W; i++) {
      low[i] = i & step ? W + i - step : i;
      high[i] = i & step ? W + i : i + step;
    }
    for (int i = 0; i < W; i++) {
      if (i & step) continue;
      vec a = lines[i], b = lines[i + step];
      lines[i] = __builtin_shuffle(a, b, low);
      lines[i + step] = __builtin_shuffle(a, b, high);
    }
  }
}
#endif

}  // namespace tinyloop
