// Causal attention, also within windows, with float32 arithmetic, for any CPU; tensors are float32 or bfloat16.
//
// FlashAttention-2 (arXiv 2307.08691), one tile of queries and keys at a time, with GEMMs of our own: the heads of small
// models are too narrow for a library's. attention.h says what a thread computes. Tensors are copied into float32 tiles
// padded with zeros, so no loop has a remainder. The forward pass has queries across, so that sums over keys run down
// the vector registers; the backward pass has keys across.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "numbers.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, ROWS = 8;  // numbers in a vector register; rows of a GEMM's result in registers
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, ROWS = 4;
#else
constexpr int64_t WIDTH = 4, ROWS = 4;
#endif
constexpr int64_t TILE = 64;    // queries and keys; their scores take 16 KiB and stay in the first-level cache
constexpr int64_t ALIGN = 16;   // head dimensions are padded to a multiple of it

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));

// e^x for x <= 0: 2^n e^y, x = n ln(2) + y, with ln(2) in two parts and the series of e^y for |y| <= ln(2) / 2; relative
// error 1e-7.
inline float exponential(float x) {
  const float n = std::rint(x * 1.44269504f);
  const float y = std::fma(n, 1.90465430e-9f, std::fma(n, -0.693147182f, x));
  float series = std::fma(y, std::fma(y, 1 / 5040.f, 1 / 720.f), 1 / 120.f);
  series = std::fma(y, std::fma(y, std::fma(y, series, 1 / 24.f), 1 / 6.f), 1 / 2.f);
  series = std::fma(y, std::fma(y, series, 1.f), 1.f);
  return x < -87 ? 0 : std::bit_cast<float>(std::bit_cast<int32_t>(series) + (int32_t(n) << 23));
}

int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// ROWS x (COLUMNS * WIDTH) numbers of c
template <int64_t COLUMNS>
inline void multiply_block(int64_t k, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                           int64_t c_row, bool add) {
  Vector sums[ROWS][COLUMNS];
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t j = 0; j < COLUMNS; ++j)
      sums[r][j] = add ? *reinterpret_cast<const Vector*>(c + r * c_row + j * WIDTH) : Vector{};
  for (int64_t i = 0; i < k; ++i)
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t j = 0; j < COLUMNS; ++j)
        sums[r][j] += a[r * a_row + i] * *reinterpret_cast<const Vector*>(b + i * b_row + j * WIDTH);
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t j = 0; j < COLUMNS; ++j) *reinterpret_cast<Vector*>(c + r * c_row + j * WIDTH) = sums[r][j];
}

// c = a b, or c += a b if `add`. a: (m, k), b: (k, n), c: (m, n), m a multiple of ROWS, n of WIDTH.
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
              int64_t c_row, bool add) {
  int64_t j = 0;
  for (; j + 2 * WIDTH <= n; j += 2 * WIDTH)
    for (int64_t r = 0; r < m; r += ROWS)
      multiply_block<2>(k, a + r * a_row, a_row, b + j, b_row, c + r * c_row + j, c_row, add);
  for (; j < n; j += WIDTH)
    for (int64_t r = 0; r < m; r += ROWS)
      multiply_block<1>(k, a + r * a_row, a_row, b + j, b_row, c + r * c_row + j, c_row, add);
}

// Copies (rows, dim) numbers, multiplied by a factor.
template <typename Format>
void read(int64_t rows, int64_t dim, const typename Format::Storage* x, int64_t x_row, float factor, float* out,
          int64_t out_row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < dim; ++d) out[r * out_row + d] = factor * Format::load(x[r * x_row + d]);
}

// The same, transposed: dim rows.
template <typename Format>
void read_transposed(int64_t rows, int64_t dim, const typename Format::Storage* x, int64_t x_row, float factor,
                     float* out) {
  for (int64_t row = 0; row < rows; row += ALIGN)
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t r = row; r < std::min(rows, row + ALIGN); ++r)
        out[d * TILE + r] = factor * Format::load(x[r * x_row + d]);
}

// `read_transposed` of all keys or values, one tile after another.
template <typename Format>
void read_tiles(int64_t rows, int64_t dim, const typename Format::Storage* x, int64_t x_row, float* out,
                int64_t depth) {
  for (int64_t j = 0; j < rows; j += TILE)
    read_transposed<Format>(std::min(TILE, rows - j), dim, x + j * x_row, x_row, 1, out + j * depth);
}

// The first key of the first tile that the queries of the tile at i see.
int64_t first_tile(int64_t i, int64_t window) { return std::max<int64_t>(0, i - window + 1) / TILE * TILE; }

// Writes (rows, dim) numbers that are stored transposed, each column multiplied by its factor.
template <typename Format>
void write_transposed(int64_t rows, int64_t dim, const float* x, const float* factors,
                      typename Format::Storage* out, int64_t out_row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < dim; ++d) out[r * out_row + d] = Format::store(factors[r] * x[d * TILE + r]);
}

template <typename Format, typename Storage = typename Format::Storage>
void forward(const Matrices<Storage>* matrices, const Matrices<float>& logsumexp, int64_t batches, int64_t heads,
             int64_t kv_heads, int64_t seq, int64_t dim, int64_t window) {
  const auto &q = matrices[0], &k = matrices[1], &v = matrices[2], &out = matrices[3];
  const int64_t keys = padded(seq, TILE), depth = padded(dim, ALIGN);
  const float scale = 1 / std::sqrt(float(dim));
  const int64_t tiles = (seq + TILE - 1) / TILE, group = heads / kv_heads;
  std::vector<std::atomic<int64_t>> taken(batches * kv_heads);  // tiles of queries in each group
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
    std::vector<float> k_(keys * depth), vt(depth * keys), qt(depth * TILE), ot(depth * TILE), p(TILE * TILE);
    std::vector<float> highest(TILE), higher(TILE), sums(TILE), factors(TILE);
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t thread = 0; thread < threads; ++thread)  // those with no group of their own help the others
      for (int64_t b = 0; b < batches; ++b)
        for (int64_t kv = 0; kv < kv_heads; ++kv) {
          std::atomic<int64_t>& next = taken[b * kv_heads + kv];
          if (next >= group * tiles) continue;
          read<Format>(seq, dim, k.of(b, kv), k.row_stride, 1, k_.data(), depth);
          read_tiles<Format>(seq, dim, v.of(b, kv), v.row_stride, vt.data(), depth);
          for (int64_t tile = next++; tile < group * tiles; tile = next++) {  // last queries first: they cost most
            const int64_t h = kv * group + tile / tiles, i = (tiles - 1 - tile % tiles) * TILE;
            const int64_t queries = std::min(TILE, seq - i);
            read_transposed<Format>(queries, dim, q.of(b, h) + i * q.row_stride, q.row_stride, scale, qt.data());
            const int64_t first = first_tile(i, window);
            // Finite, since a query may see none of the first keys: its maximum of these and later ones is compared.
            std::fill(highest.begin(), highest.end(), std::numeric_limits<float>::lowest());
            std::fill(sums.begin(), sums.end(), 0.f);
            for (int64_t j = first; j <= i; j += TILE) {
              multiply(TILE, TILE, depth, &k_[j * depth], depth, qt.data(), TILE, p.data(), TILE, false);
              for (int64_t r = 1; r < TILE && i == j; ++r)  // mask the keys that come after their query
                std::fill_n(&p[r * TILE], r, -INFINITY);
              for (int64_t r = 0; r < TILE && i + TILE - 1 - j >= window; ++r) {  // and those before its window
                const int64_t inside = std::clamp<int64_t>(window + j + r - i, 0, TILE);
                std::fill_n(&p[r * TILE + inside], TILE - inside, -INFINITY);
              }
              higher = highest;
              for (int64_t r = 0; r < TILE; ++r)
                for (int64_t c = 0; c < TILE; ++c) higher[c] = std::max(higher[c], p[r * TILE + c]);
              for (int64_t c = 0; c < TILE; ++c) {
                factors[c] = exponential(highest[c] - higher[c]);
                sums[c] *= factors[c];
                highest[c] = higher[c];
              }
              for (int64_t d = 0; d < depth && j > first; ++d)
                for (int64_t c = 0; c < TILE; ++c) ot[d * TILE + c] *= factors[c];
              for (int64_t r = 0; r < TILE; ++r) {
                float* row = &p[r * TILE];
#pragma omp simd
                for (int64_t c = 0; c < TILE; ++c) {
                  row[c] = exponential(row[c] - highest[c]);
                  sums[c] += row[c];
                }
              }
              multiply(depth, TILE, TILE, &vt[j * depth], TILE, p.data(), TILE, ot.data(), TILE, j > first);
            }
            for (int64_t c = 0; c < queries; ++c) {
              logsumexp.of(b, h)[(i + c) * logsumexp.row_stride] = highest[c] + std::log(sums[c]);
              factors[c] = 1 / sums[c];
            }
            write_transposed<Format>(queries, dim, ot.data(), factors.data(), out.of(b, h) + i * out.row_stride,
                                     out.row_stride);
          }
        }
  }
}

template <typename Format, typename Storage = typename Format::Storage>
void backward(const Matrices<Storage>* matrices, const Matrices<float>& logsumexp, int64_t batches, int64_t heads,
              int64_t kv_heads, int64_t seq, int64_t dim, int64_t window) {
  const auto &q = matrices[0], &k = matrices[1], &v = matrices[2], &out = matrices[3], &out_grad = matrices[4];
  const auto &q_grad = matrices[5], &k_grad = matrices[6], &v_grad = matrices[7];
  const int64_t keys = padded(seq, TILE), depth = padded(dim, ALIGN);
  const float scale = 1 / std::sqrt(float(dim));
  const int64_t tiles = (seq + TILE - 1) / TILE, group = heads / kv_heads;
#pragma omp parallel
  {
    const int64_t parts = parts_of_group(batches * kv_heads);
    std::vector<float> k_(keys * depth), kt(depth * keys), vt(depth * keys), dkt(depth * keys), dvt(depth * keys);
    std::vector<float> q_(TILE * depth), qt(depth * TILE), do_(TILE * depth), dot(depth * TILE), dq(TILE * depth);
    std::vector<float> p(TILE * TILE), ds(TILE * TILE), row_sums(TILE), exponents(TILE), ones(TILE, 1);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t job = 0; job < kv_heads * parts; ++job) {
        const int64_t kv = job / parts, part = job % parts;
        read<Format>(seq, dim, k.of(b, kv), k.row_stride, 1, k_.data(), depth);
        read_tiles<Format>(seq, dim, k.of(b, kv), k.row_stride, kt.data(), depth);
        read_tiles<Format>(seq, dim, v.of(b, kv), v.row_stride, vt.data(), depth);
        std::fill(dkt.begin(), dkt.end(), 0.f);
        std::fill(dvt.begin(), dvt.end(), 0.f);
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
          for (int64_t i = 0; i < seq; i += TILE) {
            const bool my_queries = is_mine((h - kv * group) * tiles + i / TILE, part, parts);
            if (!my_queries && i < part * TILE) continue;  // nor any of the keys before them
            const int64_t queries = std::min(TILE, seq - i);
            if (queries < TILE) {  // what an earlier tile left; out_grad's zeros keep the rest out of every sum
              std::fill(do_.begin(), do_.end(), 0.f);
              std::fill(dot.begin(), dot.end(), 0.f);
              std::fill(q_.begin(), q_.end(), 0.f);
              std::fill(qt.begin(), qt.end(), 0.f);
            }
            const Storage *q_rows = q.of(b, h) + i * q.row_stride, *do_rows = out_grad.of(b, h) + i * out_grad.row_stride;
            read<Format>(queries, dim, q_rows, q.row_stride, scale, q_.data(), depth);
            read_transposed<Format>(queries, dim, q_rows, q.row_stride, scale, qt.data());
            read<Format>(queries, dim, do_rows, out_grad.row_stride, 1, do_.data(), depth);
            read_transposed<Format>(queries, dim, do_rows, out_grad.row_stride, 1, dot.data());
            for (int64_t r = 0; r < TILE; ++r) {
              float sum = 0;
              const Storage* o = out.of(b, h) + (i + r) * out.row_stride;
              for (int64_t d = 0; d < dim && r < queries; ++d) sum += Format::load(o[d]) * do_[r * depth + d];
              row_sums[r] = sum;
              exponents[r] = r < queries ? logsumexp.of(b, h)[(i + r) * logsumexp.row_stride] : INFINITY;
            }
            const int64_t first = first_tile(i, window);
            for (int64_t j = first; j <= i; j += TILE) {
              const bool my_keys = is_mine(j / TILE, part, parts);
              if (!my_queries && !my_keys) continue;
              multiply(TILE, TILE, depth, q_.data(), depth, &kt[j * depth], TILE, p.data(), TILE, false);
              multiply(TILE, TILE, depth, do_.data(), depth, &vt[j * depth], TILE, ds.data(), TILE, false);
              for (int64_t r = 0; r < TILE; ++r) {
                float *row = &p[r * TILE], *grad = &ds[r * TILE];
                if (i == j) std::fill_n(row + r + 1, TILE - r - 1, -INFINITY);  // keys that come after their query
                std::fill_n(row, std::clamp<int64_t>(i + r - j - window + 1, 0, TILE), -INFINITY);  // before its window
#pragma omp simd
                for (int64_t c = 0; c < TILE; ++c) {
                  row[c] = exponential(row[c] - exponents[r]);
                  grad[c] = row[c] * (grad[c] - row_sums[r]);
                }
              }
              if (my_keys) {
                multiply(depth, TILE, TILE, dot.data(), TILE, p.data(), TILE, &dvt[j * depth], TILE, true);
                multiply(depth, TILE, TILE, qt.data(), TILE, ds.data(), TILE, &dkt[j * depth], TILE, true);
              }
              if (my_queries)
                multiply(TILE, depth, TILE, ds.data(), TILE, &k_[j * depth], depth, dq.data(), depth, j > first);
            }
            for (int64_t r = 0; r < queries && my_queries; ++r) {
              Storage* row = q_grad.of(b, h) + (i + r) * q_grad.row_stride;
              for (int64_t d = 0; d < dim; ++d) row[d] = Format::store(scale * dq[r * depth + d]);
            }
          }
        for (int64_t j = 0; j < seq; j += TILE) {
          if (!is_mine(j / TILE, part, parts)) continue;
          const int64_t count = std::min(TILE, seq - j);
          write_transposed<Format>(count, dim, &dkt[j * depth], ones.data(), k_grad.of(b, kv) + j * k_grad.row_stride,
                                   k_grad.row_stride);
          write_transposed<Format>(count, dim, &dvt[j * depth], ones.data(), v_grad.of(b, kv) + j * v_grad.row_stride,
                                   v_grad.row_stride);
        }
      }
  }
}

}  // namespace

extern "C" {

// q and out are (batch, heads, seq, dim); k and v are (batch, kv_heads, seq, dim); logsumexp is (batch, heads, seq),
// natural log. A query sees itself and the window - 1 positions before it. matrices: q, k, v, out.
void attention_forward(const void* matrices, const Matrices<float>* logsumexp, int64_t batches, int64_t heads,
                       int64_t kv_heads, int64_t seq, int64_t dim, int64_t window, bool is_float32) {
  if (is_float32)
    forward<Float32>(static_cast<const Matrices<float>*>(matrices), *logsumexp, batches, heads, kv_heads, seq, dim,
                     window);
  else
    forward<BFloat16>(static_cast<const Matrices<uint16_t>*>(matrices), *logsumexp, batches, heads, kv_heads, seq, dim,
                      window);
}

// matrices: q, k, v, out, out_grad, q_grad, k_grad, v_grad; gradients have the shapes of what they are of.
void attention_backward(const void* matrices, const Matrices<float>* logsumexp, int64_t batches, int64_t heads,
                        int64_t kv_heads, int64_t seq, int64_t dim, int64_t window, bool is_float32) {
  if (is_float32)
    backward<Float32>(static_cast<const Matrices<float>*>(matrices), *logsumexp, batches, heads, kv_heads, seq, dim,
                      window);
  else
    backward<BFloat16>(static_cast<const Matrices<uint16_t>*>(matrices), *logsumexp, batches, heads, kv_heads, seq, dim,
                       window);
}
}
