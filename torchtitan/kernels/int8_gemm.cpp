// GEMM of int8 matrices whose int32 sums are scaled and rounded while they are in the cache.
//
// oneDNN's own GEMM writes all sums to memory, four bytes each, which takes longer than multiplying where few are added.
// A thread has a tile of rows of the left operand, and the right one is packed as the matrix unit takes it: four rows
// woven together.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace at::native::cpublas {  // in libtorch_cpu: oneDNN's kernels for small products
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const signed char* a,
            const signed char* b, int32_t* c, bool packed);
void brgemm_release(bool packed);
}

namespace {

using Four = uint32_t;                             // of a column, from rows 4 i to 4 i + 3
constexpr int64_t TILE_ROWS = 64, TILE_COLUMNS = 256;  // of sums: 64 KiB
constexpr int64_t SIDE = 16;                           // a cache line of Fours

struct Scale {  // (rows, 1), (1, columns) or (1, 1)
  const float* data;
  int64_t row_stride, column_stride;
};

void store(float x, float* out) { *out = x; }

void store(float x, uint16_t* out) {  // bfloat16, to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  *out = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// By all threads of a team. b: (k, n), or its transpose.
void pack(const uint8_t* b, bool transposed, int64_t k, int64_t n, Four* packed) {
  if (!transposed) {
#pragma omp for
    for (int64_t i = 0; i < k; i += 4)
      for (int64_t j = 0; j < n; ++j) {
        const uint8_t* four = b + i * n + j;
        packed[i / 4 * n + j] = four[0] | four[n] << 8 | four[2 * n] << 16 | Four(four[3 * n]) << 24;
      }
    return;
  }
  const Four* rows = reinterpret_cast<const Four*>(b);  // (n, k / 4)
#pragma omp for
  for (int64_t i = 0; i < k / 4; i += SIDE)
    for (int64_t j = 0; j < n; j += SIDE)
      for (int64_t x = i; x < std::min(k / 4, i + SIDE); ++x)
        for (int64_t y = j; y < std::min(n, j + SIDE); ++y) packed[x * n + y] = rows[y * (k / 4) + x];
}

template <typename Out>
void gemm(const int8_t* a, const uint8_t* b, bool transposed, int64_t m, int64_t n, int64_t k, Scale rows,
          Scale columns, Out* out, Four* packed, int threads) {
  const int64_t across = (n + TILE_COLUMNS - 1) / TILE_COLUMNS, down = (m + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp parallel num_threads(threads)
  {
    pack(b, transposed, k, n, packed);
    std::vector<int32_t> sums(TILE_ROWS * TILE_COLUMNS);
#pragma omp for
    for (int64_t tile = 0; tile < down * across; ++tile) {
      const int64_t i = tile / across * TILE_ROWS, j = tile % across * TILE_COLUMNS;
      const int64_t height = std::min(TILE_ROWS, m - i), width = std::min(TILE_COLUMNS, n - j);
      at::native::cpublas::brgemm(height, width, k, k, n, width, false, a + i * k,
                                  reinterpret_cast<const signed char*>(packed + j), sums.data(), true);
      for (int64_t row = 0; row < height; ++row) {
        const float factor = rows.data[(i + row) * rows.row_stride];
        const int32_t* from = sums.data() + row * width;
        Out* to = out + (i + row) * n + j;
        if (columns.column_stride) {
          for (int64_t c = 0; c < width; ++c) store(float(from[c]) * factor * columns.data[j + c], to + c);
        } else {
          for (int64_t c = 0; c < width; ++c) store(float(from[c]) * factor * *columns.data, to + c);
        }
      }
    }
    at::native::cpublas::brgemm_release(true);
  }
}

}  // namespace

extern "C" {

// Whether libtorch multiplies so here: it refuses where the CPU, or ONEDNN_MAX_CPU_ISA, leaves no instructions for it.
bool int8_gemm_works() {
  try {
    const std::vector<signed char> a(16 * 16), b(16 * 16);
    std::vector<int32_t> sums(16 * 16);
    at::native::cpublas::brgemm(16, 16, 16, 16, 16, 16, false, a.data(), b.data(), sums.data(), true);
    at::native::cpublas::brgemm_release(true);
    return true;
  } catch (...) {
    return false;
  }
}

// a: (m, k). b: (k, n), or where `transposed` (n, k). out: (m, n). packed: k x n bytes of memory. k is a multiple of 4.
void int8_gemm(const int8_t* a, const uint8_t* b, bool transposed, int64_t m, int64_t n, int64_t k, Scale rows,
               Scale columns, void* out, bool is_float32, Four* packed, int threads) {
  if (is_float32)
    gemm(a, b, transposed, m, n, k, rows, columns, static_cast<float*>(out), packed, threads);
  else
    gemm(a, b, transposed, m, n, k, rows, columns, static_cast<uint16_t*>(out), packed, threads);
}
}
