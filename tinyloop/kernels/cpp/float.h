// y = x W^T (+ added) in float, for any number of rows: few are bound by how fast the weights can be read, many by the
// multipliers. A row's sums run over its inputs in order, whatever other rows there are.
//
// Weights are packed once, [out / 32][in][32], outputs with zeros up to a multiple of 32: each thread reads a straight
// line, and what a line of weights is multiplied with is one number of each row.
#pragma once

#include "common.h"
#include "linear.h"
#include "threads.h"

namespace tinyloop {

// `lanes` fills a register. As many rows at once, and as many lanes of outputs, as leave registers for the operands.
#if defined(__AVX512F__)
typedef vec lanes;
constexpr int AT_ONCE = 12, ACROSS = 2;

inline lanes add_product(lanes total, lanes a, float b) {
  return (lanes)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)total);
}
#elif defined(__AVX2__)
typedef half_vec lanes;
constexpr int AT_ONCE = 6, ACROSS = 2;

inline lanes add_product(lanes total, lanes a, float b) {
  return (lanes)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)total);
}
#else
typedef quarter_vec lanes;
constexpr int AT_ONCE = 3, ACROSS = 4;

inline lanes add_product(lanes total, lanes a, float b) { return total + a * b; }
#endif

constexpr int L = sizeof(lanes) / sizeof(float);
constexpr int LINE = SIDE * sizeof(float);  // bytes of an input's weights

inline lanes line_of(const float* from) {
  lanes v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

struct FloatProduct {
  const float *x, *packed, *added;  // added: [rows, out], or null
  float* y;
  long rows, out, in;

  void write(long row, long column, lanes v) const {
    const int count = (int)std::min<long>(L, out - column);
    const long at = row * out + column;
    if (count == L) {
      if (added) v += line_of(added + at);
      std::memcpy(y + at, &v, sizeof v);
      return;
    }
    for (int n = 0; n < count; n++) y[at + n] = added ? v[n] + added[at + n] : v[n];
  }
};

// M rows against N lanes of outputs; w: the first of their weights.
template <int M, int N>
inline void float_dots(const FloatProduct& p, const float* w, long row, long column, Ahead* ahead) {
  constexpr int THREES = (M + 2) / 3;
  lanes sums[M][N] = {};
  const float* x[THREES];  // every third row: the two behind it are reached from there
#pragma GCC unroll 4
  for (int t = 0; t < THREES; t++) x[t] = p.x + (row + 3 * t) * p.in;
  for (long i = 0; i < p.in; i++, w += SIDE) {
    if (ahead && i % (2048 / LINE) == 0) ahead->step();
#pragma GCC unroll 4
    for (int t = 0; t < THREES; t++) asm("" : "+r"(x[t]));  // else the compiler keeps an address for each row, in memory
    lanes weights[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) weights[n] = line_of(w + n * L);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[m][n] = add_product(sums[m][n], weights[n], x[m / 3][m % 3 * p.in]);
#pragma GCC unroll 4
    for (int t = 0; t < THREES; t++) x[t]++;
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) p.write(row + m, column + n * L, sums[m][n]);
}

template <int N>
inline void float_rows(const FloatProduct& p, const float* w, long column, Ahead* ahead) {
  long row = 0;
  auto next = [&](auto take, int rows) {
    take(p, w, row, column, row == 0 ? ahead : nullptr);
    row += rows;
  };
  while (row + AT_ONCE <= p.rows) next(float_dots<AT_ONCE, N>, AT_ONCE);
  if constexpr (AT_ONCE > 8)
    if (row + 8 <= p.rows) next(float_dots<8, N>, 8);
  if constexpr (AT_ONCE > 4)
    if (row + 4 <= p.rows) next(float_dots<4, N>, 4);
  if (row + 2 <= p.rows) next(float_dots<2, N>, 2);
  if (row < p.rows) next(float_dots<1, N>, 1);
}

inline void columns(const FloatProduct& p, long block) {
  const float* w = p.packed + block * p.in * SIDE;
  Ahead ahead(w, p.in * LINE);
  for (int n = 0; n < SIDE && block * SIDE + n < p.out; n += ACROSS * L)
    float_rows<ACROSS>(p, w + n, block * SIDE + n, n ? nullptr : &ahead);
}

inline void linear(const FloatProduct& p, int threads) {
  parallel(threads, rounded(p.out, SIDE) / SIDE, [&](long block) { columns(p, block); });
}

}  // namespace tinyloop
