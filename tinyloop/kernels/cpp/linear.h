// y = x W^T (+ added) in bfloat16 with sums in float, for few rows: bound by how fast the weights can be read.
//
// Weights are packed once, [out / 32][in / 32] blocks of [2][16 pairs of inputs][16 outputs][2], so each thread reads a
// straight line, and one layout serves the matrix unit (AMX), the bf16 dot product of AVX-512 and plain vectors. A row's
// sums run over its inputs in order, whatever other rows there are. `in` must be a multiple of 32; outputs are packed with
// zeros up to one.
#pragma once

#include "common.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

namespace tinyloop {

constexpr int SIDE = 32;         // inputs and outputs of a block
constexpr int HALF = 16 * SIDE;  // elements of 16 outputs of a block: one tile of the matrix unit

inline long rounded(long n, long to) { return (n + to - 1) / to * to; }

// Asks for the weights of the next 32 outputs while those of this one are read, 2 KB at a time and from eight places at
// once: the processor's own prefetcher follows lines within a page, so one place alone leaves memory half idle. Of
// several turns over the same weights each asks for its part.
struct Ahead {
  static constexpr int PLACES = 8, STEP = 2048 / PLACES;
  const char* at;
  long apart, turns, wait = 0;

  Ahead(const void* weights, long bytes, long turn = 0, long turns = 1)
      : at((const char*)weights + bytes + bytes / 2048 * turn / turns * STEP), apart(bytes / PLACES), turns(turns) {}

  void step() {
    if (wait--) return;
    for (int place = 0; place < PLACES; place++)
      for (int line = 0; line < STEP; line += 64) __builtin_prefetch(at + place * apart + line);
    at += STEP;
    wait = turns - 1;
  }
};

struct Product {
  const bf16 *x, *packed, *added;  // added: [rows, out], or null
  bf16* y;
  long rows, out, in;

  void write(long row, long column, vec v) const {
    int count = (int)std::min<long>(W, out - column);
    if (count <= 0) return;
    long at = row * out + column;
    store(y + at, added ? v + load(added + at, count) : v, count);
  }
};

#if defined(__AMX_BF16__)

// Up to 16 rows, or up to 32, against 32 outputs; `sums`: [rows, 32]. Tiles 0 to 3 are sums of (16 rows, 16 outputs), 4
// and 5 inputs, 6 and 7 weights.
template <bool BOTH>
inline void tiles(const Product& p, const bf16* w, long row, Ahead ahead, float* sums) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bf16* x = p.x + row * p.in;
  for (long i = 0; i < p.in; i += SIDE, w += 2 * HALF) {
    ahead.step();
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
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (BOTH) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  settle();
}

// For few rows memory is what takes long, and a thread looks only so far ahead: short turns leave room for what is asked
// of memory. For more rows 32 at a time, as each load serves two products.
constexpr int FEW_ROWS = 48;

// Sums of all rows with `N` blocks of weights, some at a time: write(first row, rows, their sums [N][rows, 32]).
template <int N, class F>
inline void block_sums(const Product& p, const bf16* const (&weights)[N], Tiles& shape, F write) {
  const long height = p.rows <= FEW_ROWS ? 16 : 32, turns = (p.rows + height - 1) / height;
  alignas(64) float sums[N][32 * 32];
  for (long turn = 0, row = 0; turn < turns; turn++, row += height) {
    int rows = (int)std::min(height, p.rows - row), upper = std::min(16, rows), lower = rows - upper;
    shape.use(upper, lower);
    for (int n = 0; n < N; n++) {
      Ahead ahead(weights[n], p.in * SIDE * sizeof(bf16), turn, turns);
      lower ? tiles<true>(p, weights[n], row, ahead, sums[n]) : tiles<false>(p, weights[n], row, ahead, sums[n]);
    }
    write(row, rows, sums);
  }
}

inline void columns(const Product& p, long block, Tiles& shape) {
  block_sums<1>(p, {p.packed + block * p.in * SIDE}, shape, [&](long row, int rows, auto& sums) {
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < SIDE; n += W) p.write(row + r, block * SIDE + n, load(sums[0] + r * SIDE + n));
  });
}

inline vec narrowed(vec v) {
  bf16 part[W];
  store(part, v);
  return load(part);
}

// silu(gate) * up, where the first half of the outputs are gates and the second what they open; y: [rows, out / 2]. As
// good as one after the other to the bit.
inline void gated_columns(const Product& p, long block, Tiles& shape) {
  const long half = p.out / 2;
  const bf16* gates = p.packed + block * p.in * SIDE;
  block_sums<2>(p, {gates, gates + half * p.in}, shape, [&](long row, int rows, auto& sums) {
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < SIDE; n += W) {
        vec gate = narrowed(load(sums[0] + r * SIDE + n)), up = narrowed(load(sums[1] + r * SIDE + n));
        store(p.y + (row + r) * half + block * SIDE + n, gated(gate, up));
      }
  });
}

#else

#if defined(__AVX512BF16__)
constexpr int MANY = 12;  // rows whose sums fit the registers

// Two inputs of 16 outputs, and the same two of a row, which lie at x.
inline vec dot_pair(vec total, const bf16* w, const bf16* x) {
  int32_t two;
  std::memcpy(&two, x, sizeof two);
  return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(two), (__m512bh)_mm512_loadu_si512(w));
}
#else
#if defined(__AVX512F__)
constexpr int MANY = 12;
#else
constexpr int MANY = 2;
#endif

inline vec dot_pair(vec total, const bf16* w, const bf16* x) {
  uvec two;
  std::memcpy(&two, w, sizeof two);
  uint32_t first = (uint32_t)x[0] << 16, second = (uint32_t)x[1] << 16;
  total += (vec)(two << 16) * (vec)(uvec{} + first);
  return total + (vec)(two & 0xffff0000u) * (vec)(uvec{} + second);
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// In halves of a vec: the compiler keeps a whole one in memory, as there is no register for it.
template <int M>
inline void dots(const Product& p, const bf16* w, long row, long column) {
  __m256 sums[M][4];
  for (int m = 0; m < M; m++)
    for (int part = 0; part < 4; part++) sums[m][part] = _mm256_setzero_ps();
  Ahead ahead(w, p.in * SIDE * sizeof(bf16));
  for (long i = 0; i < p.in; i += SIDE, w += 2 * HALF) {
    if (row == 0) ahead.step();
    for (int pair = 0; pair < 16; pair++)
#pragma GCC unroll 4
      for (int part = 0; part < 4; part++) {
        __m256i two = _mm256_loadu_si256((const __m256i*)(w + part / 2 * HALF + pair * 32 + part % 2 * 16));
        __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16));
        __m256 second = _mm256_castsi256_ps(_mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000)));
#pragma GCC unroll 2
        for (int m = 0; m < M; m++) {
          const bf16* x = p.x + (row + m) * p.in + i + 2 * pair;
          sums[m][part] = _mm256_fmadd_ps(first, _mm256_set1_ps(value(x[0])), sums[m][part]);
          sums[m][part] = _mm256_fmadd_ps(second, _mm256_set1_ps(value(x[1])), sums[m][part]);
        }
      }
  }
  for (int m = 0; m < M; m++) {
    vec both[2];
    std::memcpy(both, sums[m], sizeof both);
    p.write(row + m, column, both[0]);
    p.write(row + m, column + 16, both[1]);
  }
}
#else
template <int M>
inline void dots(const Product& p, const bf16* w, long row, long column) {
  vec sums[M][2] = {};
  Ahead ahead(w, p.in * SIDE * sizeof(bf16));
  for (long i = 0; i < p.in; i += SIDE, w += 2 * HALF) {
    if (row == 0) ahead.step();
    for (int pair = 0; pair < 16; pair++)
      for (int m = 0; m < M; m++) {
        const bf16* x = p.x + (row + m) * p.in + i + 2 * pair;
        sums[m][0] = dot_pair(sums[m][0], w + pair * 32, x);
        sums[m][1] = dot_pair(sums[m][1], w + HALF + pair * 32, x);
      }
  }
  for (int m = 0; m < M; m++) {
    p.write(row + m, column, sums[m][0]);
    p.write(row + m, column + 16, sums[m][1]);
  }
}
#endif

inline void columns(const Product& p, long block, Tiles&) {
  const bf16* w = p.packed + block * p.in * SIDE;
  long row = 0, column = block * SIDE;
  for (; row + MANY <= p.rows; row += MANY) dots<MANY>(p, w, row, column);
  if constexpr (MANY > 4)
    for (; row + 4 <= p.rows; row += 4) dots<4>(p, w, row, column);
  for (; row + 2 <= p.rows; row += 2) dots<2>(p, w, row, column);
  if (row < p.rows) dots<1>(p, w, row, column);
}

#endif

inline void linear(const Product& p, int threads) {
  parallel_workers(threads, rounded(p.out, SIDE) / SIDE, [&] {
    return [&, tiles = Tiles()](long block) mutable { columns(p, block, tiles); };
  });
}

#if defined(__AMX_BF16__)
// Outputs must be a multiple of 64.
inline void gated_linear(const Product& p, int threads) {
  parallel_workers(threads, p.out / 2 / SIDE, [&] {
    return [&, tiles = Tiles()](long block) mutable { gated_columns(p, block, tiles); };
  });
}
#endif

}  // namespace tinyloop
