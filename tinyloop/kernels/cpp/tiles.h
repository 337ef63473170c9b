// The matrix unit (AMX): its set-up, and what puts keys and values into the order that it multiplies.
//
// A tile is 16 rows of 64 bytes. Weights of a product lie in blocks of 32 inputs x 32 outputs, [2][16 pairs of
// inputs][16 outputs][2], block after block along the inputs.
#pragma once

#include "common.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace tinyloop {

// GCC's tile instructions do not say which memory they read: what was stored must be there before they run.
inline void settle() { asm volatile("" ::: "memory"); }

// How a thread has set up its tiles. They are given back when its work ends.
class Tiles {
 public:
  ~Tiles() {
    if (set_) _tile_release();
  }

  // Tiles 0, 1 and 4 have `upper` rows, 2, 3 and 5 `lower` rows, 6 and 7 are full; rows of 64 bytes.
  void use(int upper, int lower) {
    lower = std::max(lower, 1);  // of tiles that are not used
    set({{upper, upper, lower, lower, upper, lower, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}});
  }

  // Tile 0 is sums of 16 keys for `queries`, 4 the keys and 6 the queries; 5 is sums of 16 elements for each query, 2
  // and 3 its weights of 32 tokens each, 7 the tokens' values.
  void use_for(int queries) {
    const int n = queries, across = 4 * n;
    set({{16, 1, n, n, 16, n, 16, 16}, {across, 64, 64, 64, 64, 64, across, 64}});
  }

 private:
  struct Shape {
    int rows[8], bytes[8];
  };

  void set(const Shape& shape) {
    if (set_ && !std::memcmp(&shape, &shape_, sizeof shape)) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; t++) {
      config.bytes[t] = (uint16_t)shape.bytes[t];
      config.rows[t] = (uint8_t)shape.rows[t];
    }
    asm volatile("" ::"r"(&config) : "memory");  // all of it is read, see `settle`
    _tile_loadconfig(&config);
    shape_ = shape;
    set_ = true;
  }

  Shape shape_;
  bool set_ = false;
};

// 16 * M rows against 32 columns: tiles 0 to 5 are sums, 6 rows of A, 7 a part of B.
template <int M, bool ADD>
inline void tile_columns(int depth, const bf16* a, int lda, const bf16* b, float* c, int ldc) {
  const int next = 16 * ldc;
  if (ADD) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    if (M > 1) {
      _tile_loadd(2, c + next, ldc * 4);
      _tile_loadd(3, c + next + 16, ldc * 4);
    }
    if (M > 2) {
      _tile_loadd(4, c + 2 * next, ldc * 4);
      _tile_loadd(5, c + 2 * next + 16, ldc * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int k = 0; k < depth; k += 32, b += 1024) {
    _tile_loadd(7, b, 64);
    _tile_loadd(6, a + k, lda * 2);
    _tile_dpbf16ps(0, 6, 7);
    if (M > 1) {
      _tile_loadd(6, a + 16 * lda + k, lda * 2);
      _tile_dpbf16ps(2, 6, 7);
    }
    if (M > 2) {
      _tile_loadd(6, a + 32 * lda + k, lda * 2);
      _tile_dpbf16ps(4, 6, 7);
    }
    _tile_loadd(7, b + 512, 64);
    if (M > 2) {
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(6, a + 16 * lda + k, lda * 2);
    }
    if (M > 1) {
      _tile_dpbf16ps(3, 6, 7);
      _tile_loadd(6, a + k, lda * 2);
    }
    _tile_dpbf16ps(1, 6, 7);
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  if (M > 1) {
    _tile_stored(2, c + next, ldc * 4);
    _tile_stored(3, c + next + 16, ldc * 4);
  }
  if (M > 2) {
    _tile_stored(4, c + 2 * next, ldc * 4);
    _tile_stored(5, c + 2 * next + 16, ldc * 4);
  }
}

// C[M x N] = A[M x K] B[K x N], or += where `ADD`: M a multiple of 16, K and N of 32. Tiles must be full.
template <bool ADD>
inline void tile_product(int rows, int columns, int depth, const bf16* a, int lda, const bf16* b, float* c, int ldc) {
  settle();
  for (int n = 0; n < columns; n += 32, b += 32 * depth) {
    int m = 0;
    for (; m + 48 <= rows; m += 48) tile_columns<3, ADD>(depth, a + m * lda, lda, b, c + m * ldc + n, ldc);
    if (m + 32 <= rows) tile_columns<2, ADD>(depth, a + m * lda, lda, b, c + m * ldc + n, ldc), m += 32;
    if (m < rows) tile_columns<1, ADD>(depth, a + m * lda, lda, b, c + m * ldc + n, ldc);
  }
  settle();
}

// 64 keys of `depth` elements as the right side of queries x keys: pairs of elements go down, keys go across.
inline void pack_keys(const bf16* const* keys, int depth, bf16* packed) {
  for (int n = 0; n < 64; n += 16)
    for (int k = 0; k < depth; k += 32) {
      vec lines[16];
      for (int i = 0; i < 16; i++) std::memcpy(&lines[i], keys[n + i] + k, sizeof(vec));
      transpose(lines);
      std::memcpy(packed + n / 32 * 32 * depth + k * 32 + n % 32 * 32, lines, sizeof lines);
    }
}

// 64 values of `size` elements as the right side of weights x values: pairs of tokens go down, elements go across.
inline void pack_values(const bf16* const* values, int size, bf16* packed) {
  typedef uint16_t line __attribute__((vector_size(64)));
  line low, high;  // two rows of 32 elements, one element of each in turn
  for (int i = 0; i < 32; i++) low[i] = (uint16_t)(i / 2 + i % 2 * 32), high[i] = (uint16_t)(low[i] + 16);
  for (int k = 0; k < 64; k += 2)
    for (int n = 0; n < size; n += 32) {
      line first, second;
      std::memcpy(&first, values[k] + n, sizeof first);
      std::memcpy(&second, values[k + 1] + n, sizeof second);
      line halves[] = {__builtin_shuffle(first, second, low), __builtin_shuffle(first, second, high)};
      bf16* to = packed + n * 64 + k / 32 * 1024 + k % 32 * 16;
      std::memcpy(to, halves, sizeof(line));
      std::memcpy(to + 512, halves + 1, sizeof(line));
    }
}

}  // namespace tinyloop
#else

namespace tinyloop {
struct Tiles {};  // nothing to set up
}  // namespace tinyloop
#endif
