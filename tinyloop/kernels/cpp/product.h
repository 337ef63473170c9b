// A small product in float, for the tiles of attention. Sums stay in registers; every sum runs over its depth in order.
#pragma once

#include "common.h"

namespace tinyloop {

#if defined(__AVX512F__)
constexpr int MR = 6, NV = 4;  // rows and vectors of the product that fit the registers
#elif defined(__AVX2__)
constexpr int MR = 4, NV = 1;
#else
constexpr int MR = 2, NV = 1;
#endif

// C[M x N] (+)= A[M x K] B[K x N], B given by its rows, N a multiple of W. Every sum runs over K in order.
template <int M, int N, class B>
inline void product_block(int depth, const float* a, int lda, const B* const* b, int column, float* c, int ldc,
                          bool add) {
  vec sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = add ? load(c + m * ldc + n * W) : vec{};
  for (int k = 0; k < depth; k++) {
    vec row[N];
    for (int n = 0; n < N; n++) row[n] = load(b[k] + column + n * W);
    for (int m = 0; m < M; m++) {
      vec x = splat(a[m * lda + k]);
      for (int n = 0; n < N; n++) sums[m][n] += x * row[n];
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) store(c + m * ldc + n * W, sums[m][n]);
}

template <int N, class B>
inline void product_columns(int rows, int depth, const float* a, int lda, const B* const* b, int column, float* c,
                            int ldc, bool add) {
  int m = 0;
  for (; m + MR <= rows; m += MR)
    product_block<MR, N>(depth, a + m * lda, lda, b, column, c + column + m * ldc, ldc, add);
  for (; m + 3 <= rows; m += 3)
    product_block<3, N>(depth, a + m * lda, lda, b, column, c + column + m * ldc, ldc, add);
  if (m + 2 <= rows) product_block<2, N>(depth, a + m * lda, lda, b, column, c + column + m * ldc, ldc, add), m += 2;
  if (m < rows) product_block<1, N>(depth, a + m * lda, lda, b, column, c + column + m * ldc, ldc, add);
}

template <class B>
void product(int rows, int columns, int depth, const float* a, int lda, const B* const* b, float* c, int ldc,
             bool add) {
  int n = 0;
  for (; n + NV * W <= columns; n += NV * W) product_columns<NV>(rows, depth, a, lda, b, n, c, ldc, add);
  for (; n < columns; n += W) product_columns<1>(rows, depth, a, lda, b, n, c, ldc, add);
}

}  // namespace tinyloop
