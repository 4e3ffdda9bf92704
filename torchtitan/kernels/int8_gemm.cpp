// int8 GEMM that scales and rounds the int32 sums while they are in the cache.
//
// oneDNN's own GEMM writes all sums to memory, four bytes each, which takes longer than the multiplication when K is
// small. Here each thread computes tiles of the output. The right operand is packed for the matrix unit: groups of four
// rows are interleaved.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace at::native::cpublas {  // in libtorch_cpu: oneDNN's microkernels (brgemm)
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const signed char* a,
            const signed char* b, int32_t* c, bool packed);
void brgemm_release(bool packed);
}

namespace {

using Four = uint32_t;                             // rows 4 i to 4 i + 3 of one column
constexpr int64_t TILE_ROWS = 64, TILE_COLUMNS = 256;  // tile of sums: 64 KiB
constexpr int64_t SIDE = 16;                           // Fours in a cache line

struct Scale {  // (rows, 1), (1, columns) or (1, 1)
  const float* data;
  int64_t row_stride, column_stride;
};

void store(float x, float* out) { *out = x; }

void store(float x, uint16_t* out) {  // to bfloat16, nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  *out = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Runs on all threads of a team. b: (k, n), or (n, k) if transposed.
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

// Whether libtorch can run this GEMM here. It throws if the CPU or ONEDNN_MAX_CPU_ISA does not allow the instructions.
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

// a: (m, k). b: (k, n), or (n, k) if `transposed`. out: (m, n). packed: scratch of k x n bytes. k is a multiple of 4.
void int8_gemm(const int8_t* a, const uint8_t* b, bool transposed, int64_t m, int64_t n, int64_t k, Scale rows,
               Scale columns, void* out, bool is_float32, Four* packed, int threads) {
  if (is_float32)
    gemm(a, b, transposed, m, n, k, rows, columns, static_cast<float*>(out), packed, threads);
  else
    gemm(a, b, transposed, m, n, k, rows, columns, static_cast<uint16_t*>(out), packed, threads);
}
}
