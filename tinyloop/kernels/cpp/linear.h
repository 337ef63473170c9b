// y = x W^T (+ added) in bfloat16 with sums in float, for few rows: bound by how fast the weights can be read.
//
// Weights are packed once, [out / 32][in / 32] blocks of [2][16 pairs of inputs][16 outputs][2], so each thread reads a
// straight line, and one layout serves both the matrix unit (AMX) and the bf16 dot product of AVX-512. A row's sums
// run over its inputs in order, whatever other rows there are. `in` and `out` must be multiples of 32.
#pragma once

#include "common.h"
#include "threads.h"
#include "tiles.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#define TINYLOOP_LINEAR 1

namespace tinyloop {

constexpr int SIDE = 32;                // inputs and outputs of a block
constexpr int HALF = 16 * SIDE;         // elements of 16 outputs of a block: one tile of the matrix unit
constexpr long AHEAD = 8 * 2 * HALF;    // elements to prefetch ahead of the sums

inline void pack(const bf16* weight, bf16* packed, long out, long in) {
  for (long o = 0; o < out; o++)
    for (long i = 0; i < in; i++) {
      long block = (o / SIDE * (in / SIDE) + i / SIDE) * 2 + o % SIDE / 16;
      packed[block * HALF + i % SIDE / 2 * 32 + o % 16 * 2 + i % 2] = weight[o * in + i];
    }
}

struct Product {
  const bf16 *x, *packed, *added;  // added: [rows, out], or null
  bf16* y;
  long rows, out, in;

  void write(long row, long column, vec v) const {
    long at = row * out + column;
    store(y + at, added ? v + load(added + at) : v);
  }
};

#if defined(__AMX_BF16__)

// Tiles 0 to 3 are sums of (16 rows, 16 outputs) blocks, 4 and 5 inputs, 6 and 7 weights.
inline void write_sums(const Product& p, const float* sums, long row, long column, int rows) {
  for (int r = 0; r < rows; r++) {
    p.write(row + r, column, load(sums + r * 32));
    p.write(row + r, column + 16, load(sums + r * 32 + 16));
  }
}

// Up to 32 rows against 32 outputs.
template <bool BOTH>
inline void tiles(const Product& p, const bf16* w, long row, long column, int upper, int lower) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bf16* x = p.x + row * p.in;
  const bool fresh = row == 0;
  for (long i = 0; i < p.in; i += SIDE, w += 2 * HALF) {
    if (fresh)
      for (int line = 0; line < 2 * HALF; line += 32) _mm_prefetch((const char*)(w + AHEAD + line), _MM_HINT_T0);
    _tile_loadd(4, x + i, p.in * 2);
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + HALF, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) {
      _tile_loadd(5, x + 16 * p.in + i, p.in * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[32 * 32];
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (BOTH) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  write_sums(p, sums, row, column, upper + lower);
}

inline void column_block(const Product& p, long block) {
  const bf16* w = p.packed + block * p.in * SIDE;
  int shape = 0;
  for (long row = 0; row < p.rows; row += 32) {
    int rows = (int)std::min<long>(32, p.rows - row), upper = std::min(16, rows), lower = rows - upper;
    if (rows != shape) use_tiles(upper, lower);
    shape = rows;
    lower ? tiles<true>(p, w, row, block * SIDE, upper, lower) : tiles<false>(p, w, row, block * SIDE, upper, 0);
  }
}

#else

template <int M>
inline void dots(const Product& p, const bf16* w, long row, long column) {
  __m512 sums[M][2];
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm512_setzero_ps();
  for (long i = 0; i < p.in; i += SIDE, w += 2 * HALF)
    for (int pair = 0; pair < 16; pair++) {
      __m512bh left = (__m512bh)_mm512_loadu_si512(w + pair * 32);
      __m512bh right = (__m512bh)_mm512_loadu_si512(w + HALF + pair * 32);
      _mm_prefetch((const char*)(w + AHEAD + pair * 32), _MM_HINT_T0);
      _mm_prefetch((const char*)(w + AHEAD + HALF + pair * 32), _MM_HINT_T0);
      for (int m = 0; m < M; m++) {
        int32_t two;
        std::memcpy(&two, p.x + (row + m) * p.in + i + 2 * pair, sizeof two);
        __m512bh x = (__m512bh)_mm512_set1_epi32(two);
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], x, left);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], x, right);
      }
    }
  for (int m = 0; m < M; m++) {
    p.write(row + m, column, (vec)sums[m][0]);
    p.write(row + m, column + 16, (vec)sums[m][1]);
  }
}

inline void column_block(const Product& p, long block) {
  const bf16* w = p.packed + block * p.in * SIDE;
  long row = 0, column = block * SIDE;
  for (; row + 12 <= p.rows; row += 12) dots<12>(p, w, row, column);
  for (; row + 4 <= p.rows; row += 4) dots<4>(p, w, row, column);
  if (row + 2 <= p.rows) dots<2>(p, w, row, column), row += 2;
  if (row < p.rows) dots<1>(p, w, row, column);
}

#endif

// Blocks of 32 outputs are handed out in runs of about 64 KB of weights.
inline void linear(const Product& p, int threads) {
  long blocks = p.out / SIDE, run = std::max<long>(1, 32768 / (p.in * SIDE));
  parallel(threads, (blocks + run - 1) / run, [&](long i) {
    for (long block = i * run; block < std::min(blocks, (i + 1) * run); block++) column_block(p, block);
#if defined(__AMX_BF16__)
    _tile_release();
#endif
  });
}

}  // namespace tinyloop
#endif
