// y = x W^T (+ added) with weights of 8 bits: one scale for each output, half the bytes of bfloat16 to read.
//
// Inputs are brought to 8 bits too, by row and group of 64 inputs, so that a group's sum is a whole number: exact in any
// order. Groups are added in float in order. Weights are stored plus 128, as the dot products want one side unsigned;
// what that adds to a group's sum is known from the row and taken off again. Rows and columns beyond the end are zero:
// packed weights are [out / 32][in / 64] blocks of [2][16 fours of inputs][16 outputs][4], sizes rounded up.
#pragma once

#include "common.h"
#include "linear.h"
#include "threads.h"
#include "tiles.h"

namespace tinyloop {

constexpr int GROUP = 64;
constexpr int TILE_BYTES = 16 * GROUP;  // of 16 outputs of a block

// Rows in 8 bits: `x` [rows, groups * 64], what a step is worth and what storing weights plus 128 adds, [rows, groups].
struct Narrow {
  long groups;
  std::vector<int8_t> x;
  std::vector<float> scales;
  std::vector<int32_t> excess;

  void fit(long rows, long in) {
    groups = rounded(in, GROUP) / GROUP;
    x.assign(rounded(rows, 16) * groups * GROUP, 0);
    scales.resize(rounded(rows, 16) * groups);
    excess.resize(rounded(rows, 16) * groups);
  }

  template <class T>
  void take(const T* from, long row, long in) {
    for (long g = 0; g < groups; g++) {
      const T* part = from + row * in + g * GROUP;
      int8_t* to = x.data() + (row * groups + g) * GROUP;
      int count = (int)std::min<long>(GROUP, in - g * GROUP);
      vec most = {}, none = {};
      strips(count, [&](int i, int w) {
        vec v = load(part + i, w);
        none += v * 0.0f;  // a NaN if there is one, which `most` would pass over
        v = v < -v ? -v : v;
        most = v > most ? v : most;
      });
      float top = std::max(largest(most), 1e-30f) + sum(none);
      int32_t total = 0;
      strips(count, [&](int i, int w) { total += narrow(load(part + i, w) * (127 / top), to + i, w); });
      scales[row * groups + g] = top / 127;
      excess[row * groups + g] = 128 * total;
    }
  }

 private:
  // To the nearest whole numbers; returns their sum.
  static int32_t narrow(vec v, int8_t* to, int count) {
    typedef int8_t bytes __attribute__((vector_size(16)));
    const vec magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds
    asm("" : "+m"(v));                     // the product that v is must not become one with the sum
    ivec whole = __builtin_convertvector((v + magic) - magic, ivec);
    bytes small = __builtin_convertvector(whole, bytes);
    std::memcpy(to, &small, count);
    int32_t total = 0;
    for (int i = 0; i < count; i++) total += whole[i];
    return total;
  }
};

template <class T>
struct NarrowProduct {
  const Narrow& left;
  const uint8_t* packed;
  const float* scales;
  const T* added;  // [rows, out], or null
  T* y;
  long rows, out;

  const int8_t* x(long row, long group) const { return left.x.data() + (row * left.groups + group) * GROUP; }
  float scale(long row, long group) const { return left.scales[row * left.groups + group]; }
  int32_t excess(long row, long group) const { return left.excess[row * left.groups + group]; }

  // The sums of a group, as whole numbers, onto those of the groups before it.
  vec add_group(vec total, ivec sums, long row, long group) const {
    return total + __builtin_convertvector(sums - excess(row, group), vec) * scale(row, group);
  }

  void write(long row, long column, vec v) const {
    int count = (int)std::min<long>(W, out - column);
    if (count <= 0) return;
    long at = row * out + column;
    v *= load(scales + column, count);
    store(y + at, added ? v + load(added + at, count) : v, count);
  }
};

#if defined(__AMX_INT8__)

// R rows against 16 outputs, `rows` of them are there. Tile 0 is sums, 1 inputs, 6 weights.
template <int R, class T>
inline void group_sums(const NarrowProduct<T>& p, const uint8_t* w, long row, int rows, long column, Ahead* ahead) {
  alignas(64) int32_t sums[16 * 16];
  vec totals[R] = {};
  for (long g = 0; g < p.left.groups; g++, w += 2 * TILE_BYTES) {
    if (ahead) ahead->step();
    settle();
    _tile_zero(0);
    _tile_loadd(1, p.x(row, g), p.left.groups * GROUP);
    _tile_loadd(6, w, 64);
    _tile_dpbsud(0, 1, 6);
    _tile_stored(0, sums, 64);
    settle();
    for (int r = 0; r < R; r++) {
      ivec line;
      std::memcpy(&line, sums + r * 16, sizeof line);
      totals[r] = p.add_group(totals[r], line, row + r, g);
    }
  }
  for (int r = 0; r < rows; r++) p.write(row + r, column, totals[r]);
}

template <class T>
inline void columns(const NarrowProduct<T>& p, long block, Tiles& tiles) {
  const uint8_t* w = p.packed + block * p.left.groups * 2 * TILE_BYTES;
  Ahead ahead(w, p.left.groups * 2 * TILE_BYTES);
  for (int half = 0; half < 2; half++, w += TILE_BYTES)
    for (long row = 0; row < p.rows; row += 16) {
      int rows = (int)std::min<long>(16, p.rows - row);
      auto sums = rows == 1   ? group_sums<1, T>
                  : rows <= 4 ? group_sums<4, T>
                  : rows <= 8 ? group_sums<8, T>
                              : group_sums<16, T>;
      tiles.use(rows, 0);
      sums(p, w, row, rows, block * SIDE + half * 16, row == 0 && half == 0 ? &ahead : nullptr);
    }
}

#else

#if defined(__AVX512VNNI__)
constexpr int MOST = 6;  // rows whose sums fit the registers

// Four inputs of 16 outputs, and the same four of a row.
inline ivec dot_four(ivec total, const uint8_t* w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return (ivec)_mm512_dpbusd_epi32((__m512i)total, _mm512_loadu_si512(w), _mm512_set1_epi32(four));
}
#else
constexpr int MOST = 2;

inline ivec dot_four(ivec total, const uint8_t* w, const int8_t* x) {
  uvec four;
  std::memcpy(&four, w, sizeof four);
  for (int i = 0; i < 4; i++) total += (ivec)((four >> (8 * i)) & 255u) * (int32_t)x[i];
  return total;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The sums of a group for M rows and 32 outputs. Bytes 0 and 2, then 1 and 3, of each output meet those of the row.
template <int M, class T>
inline void group_sums(const NarrowProduct<T>& p, const uint8_t* w, long row, long group, ivec (*sums)[2]) {
  __m256i parts[M][4] = {};
  for (int four = 0; four < 16; four++)
#pragma GCC unroll 4
    for (int part = 0; part < 4; part++) {
      const uint8_t* at = w + part / 2 * TILE_BYTES + four * 64 + part % 2 * 32;
      __m256i bytes = _mm256_loadu_si256((const __m256i*)at);
      __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(bytes, 8);
#pragma GCC unroll 2
      for (int m = 0; m < M; m++) {
        const int8_t* x = p.x(row + m, group) + 4 * four;
        auto two = [](int low, int high) { return _mm256_set1_epi32((low & 0xffff) | (int)((uint32_t)high << 16)); };
        parts[m][part] = _mm256_add_epi32(parts[m][part], _mm256_madd_epi16(even, two(x[0], x[2])));
        parts[m][part] = _mm256_add_epi32(parts[m][part], _mm256_madd_epi16(odd, two(x[1], x[3])));
      }
    }
  std::memcpy(sums, parts, sizeof parts);
}
#else
template <int M, class T>
inline void group_sums(const NarrowProduct<T>& p, const uint8_t* w, long row, long group, ivec (*sums)[2]) {
  for (int four = 0; four < 16; four++)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++)
        sums[m][half] = dot_four(sums[m][half], w + half * TILE_BYTES + four * 64, p.x(row + m, group) + 4 * four);
}
#endif

template <int M, class T>
inline void dots(const NarrowProduct<T>& p, const uint8_t* w, long row, long column) {
  vec totals[M][2] = {};
  Ahead ahead(w, p.left.groups * 2 * TILE_BYTES);
  for (long g = 0; g < p.left.groups; g++, w += 2 * TILE_BYTES) {
    if (row == 0) ahead.step();
    ivec sums[M][2] = {};
    group_sums<M>(p, w, row, g, sums);
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) totals[m][half] = p.add_group(totals[m][half], sums[m][half], row + m, g);
  }
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) p.write(row + m, column + half * 16, totals[m][half]);
}

template <class T>
inline void columns(const NarrowProduct<T>& p, long block, Tiles&) {
  const uint8_t* w = p.packed + block * p.left.groups * 2 * TILE_BYTES;
  long row = 0, column = block * SIDE;
  for (; row + MOST <= p.rows; row += MOST) dots<MOST>(p, w, row, column);
  for (; row + 2 <= p.rows; row += 2) dots<2>(p, w, row, column);
  if (row < p.rows) dots<1>(p, w, row, column);
}

#endif

// x: [rows, in], y and added: [rows, out].
template <class T>
void linear_int8(const T* x, const uint8_t* packed, const float* scales, const T* added, T* y, long rows, long out,
                 long in, int threads) {
  static thread_local Narrow narrow;
  Narrow& left = narrow;  // of this thread, though others read it
  left.fit(rows, in);
  parallel_rows(threads, rows, 4 * in, [&](long first, long last) {
    for (long row = first; row < last; row++) left.take(x, row, in);
  });
  NarrowProduct<T> p{left, packed, scales, added, y, rows, out};
  parallel_workers(threads, rounded(out, SIDE) / SIDE, [&] {
    return [&, tiles = Tiles()](long block) mutable { columns(p, block, tiles); };
  });
}

}  // namespace tinyloop
