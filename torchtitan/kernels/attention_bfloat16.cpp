// Causal attention in bfloat16 for CPUs with instructions for it (AMX, or AVX-512's).
//
// FlashAttention-2 (arXiv 2307.08691), one tile of queries and keys at a time. attention.h says what a thread computes.
// These instructions take the left operand of a GEMM row by row, and the right one with pairs of rows interleaved. Each
// pass computes the scores in the orientation that avoids transposing them: queries across in the forward pass, so that
// sums over keys run down the vector registers, and keys across in the backward pass. Products and sums are float32.
// Compile without floating-point contraction (see attention_backward); where a fused multiply-add is wanted, the code
// calls std::fma.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <immintrin.h>
#include <new>
#include <vector>

#include "attention.h"

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {  // in libtorch_cpu: oneDNN's microkernels (brgemm)
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const c10::BFloat16* a,
            const c10::BFloat16* b, float* c, bool in_pairs);
void brgemm_release(bool in_pairs);
}

namespace {

using Half = uint16_t;         // a bfloat16: the upper half of a float's bits
using Pair = uint32_t;         // two bfloat16, from rows 2 i and 2 i + 1 of one column
constexpr int64_t TILE = 128;  // queries and keys; their scores take 64 KiB and stay in the cache
constexpr int64_t LANES = 16;  // numbers in a vector register
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

// Begins at a cache line, so that no vector register is read from two.
template <typename Number>
struct Aligned {
  using value_type = Number;
  static constexpr std::align_val_t LINE{64};
  Number* allocate(std::size_t count) { return static_cast<Number*>(operator new(count * sizeof(Number), LINE)); }
  void deallocate(Number* data, std::size_t) { operator delete(data, LINE); }
  bool operator==(const Aligned&) const { return true; }
};
template <typename Number>
using Buffer = std::vector<Number, Aligned<Number>>;

inline float widened(Half x) { return std::bit_cast<float>(Pair(x) << 16); }

// rounds to nearest, ties to even
inline Pair rounded_up(float x) { return std::bit_cast<Pair>(x) + 0x7fff + (std::bit_cast<Pair>(x) >> 16 & 1); }
inline Half rounded(float x) { return Half(rounded_up(x) >> 16); }
inline Pair pair(float first, float second) { return rounded_up(first) >> 16 | (rounded_up(second) & 0xffff0000); }

// Rounds two rows to pairs, and if `first_out` is given to rows of bfloat16, too. The instruction rounds as `pair`
// does, except that it flushes denormals to zero, which the GEMMs that read them do as well.
inline void round_rows(int64_t count, const float* first, const float* second, Pair* pairs, Half* first_out = nullptr,
                       Half* second_out = nullptr) {
  alignas(64) Pair order[LANES];
  for (Pair i = 0; i < LANES; ++i) order[i] = i | (i + LANES) << 16;
  for (int64_t c = 0; c < count; c += LANES) {
    const auto some = __mmask16(_bzhi_u32(-1, std::min(LANES, count - c)));
    const __m512 low = _mm512_maskz_loadu_ps(some, first + c), high = _mm512_maskz_loadu_ps(some, second + c);
    const auto both = __m512i(_mm512_cvtne2ps_pbh(high, low));
    _mm512_mask_storeu_epi32(pairs + c, some, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
    if (!first_out) continue;
    _mm256_mask_storeu_epi16(first_out + c, some, _mm512_castsi512_si256(both));
    _mm256_mask_storeu_epi16(second_out + c, some, _mm512_extracti64x4_epi64(both, 1));
  }
}

// 2^x for x up to 127: series of e^y for |y| <= ln(2) / 2 (relative error 2e-7), integer part added to the exponent.
inline float power_of_2(float x) {
  const float whole = std::rint(x), y = (x - whole) * LN2;
  float series = std::fma(y, 1 / 720.f, 1 / 120.f);
  series = std::fma(y, std::fma(y, std::fma(y, series, 1 / 24.f), 1 / 6.f), 1 / 2.f);
  series = std::fma(y, std::fma(y, series, 1.f), 1.f);
  return x < -126 ? 0 : std::bit_cast<float>(std::bit_cast<int32_t>(series) + (int32_t(whole) << 23));
}

// In an order that no compiler chooses: the losses of a run depend on it.
inline float sum_of_products(int64_t count, const Half* a, const Half* b) {
  constexpr int64_t SUMS = 2 * LANES;
  float sums[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS <= count; i += SUMS)
    for (int64_t c = 0; c < SUMS; ++c) sums[c] += widened(a[i + c]) * widened(b[i + c]);
  for (; i < count; ++i) sums[0] += widened(a[i]) * widened(b[i]);
  for (int64_t c = 1; c < SUMS && count >= SUMS; ++c) sums[0] += sums[c];
  return sums[0];
}

// c = a b, or c += a b if `add`. a: m rows of k. b: k / 2 rows of n pairs. c: m rows of n.
void multiply(int64_t m, int64_t n, int64_t k, const Half* a, int64_t a_row, const Pair* b, float* c, bool add) {
  at::native::cpublas::brgemm(m, n, k, a_row, n, n, add, reinterpret_cast<const c10::BFloat16*>(a),
                              reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

void transpose(int64_t rows, int64_t columns, const Pair* in, int64_t in_row, Pair* out, int64_t out_row) {
  for (int64_t row = 0; row < rows; row += LANES)
    for (int64_t column = 0; column < columns; column += LANES) {
      const int64_t height = std::min(LANES, rows - row), width = std::min(LANES, columns - column);
      __m512i x[LANES], y[LANES];
      for (int64_t r = 0; r < LANES; ++r)
        x[r] = _mm512_maskz_loadu_epi32(r < height ? _bzhi_u32(-1, width) : 0, in + (row + r) * in_row + column);
      for (int64_t r = 0; r < LANES; r += 2)
        y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]), y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
      for (int64_t r = 0; r < LANES; r += 4)
        for (int64_t i = 0; i < 2; ++i) {
          x[r + 2 * i] = _mm512_unpacklo_epi64(y[r + i], y[r + i + 2]);
          x[r + 2 * i + 1] = _mm512_unpackhi_epi64(y[r + i], y[r + i + 2]);
        }
      for (int64_t i = 0; i < 4; ++i) {  // x[r + i] has columns i, i + 4, i + 8 and i + 12 of rows r to r + 3
        const auto even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        const auto even_8 = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        const auto odd_8 = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
        y[i] = _mm512_shuffle_i32x4(even, even_8, 0x88), y[i + 8] = _mm512_shuffle_i32x4(even, even_8, 0xdd);
        y[i + 4] = _mm512_shuffle_i32x4(odd, odd_8, 0x88), y[i + 12] = _mm512_shuffle_i32x4(odd, odd_8, 0xdd);
      }
      for (int64_t c = 0; c < width; ++c)
        _mm512_mask_storeu_epi32(out + (column + c) * out_row + row, _bzhi_u32(-1, height), y[c]);
    }
}

// rows of dim numbers to tiles of dim / 2 rows of pairs: xᵀ as the right operand of a GEMM
void transpose_to_pairs(int64_t rows, int64_t dim, const Half* x, int64_t x_row, Pair* out) {
  for (int64_t r = 0; r < rows; r += TILE) {
    const int64_t count = std::min(TILE, rows - r);
    transpose(count, dim / 2, reinterpret_cast<const Pair*>(x + r * x_row), x_row / 2, out + r * dim / 2, count);
  }
}

// rows of dim numbers to rows / 2 rows of dim pairs: x as the right operand
void weave(int64_t rows, int64_t dim, const Half* x, int64_t x_row, Pair* out) {
  for (int64_t r = 0; r < rows; r += 2, out += dim)
    for (int64_t d = 0; d < dim; ++d) out[d] = x[r * x_row + d] | Pair(x[(r + 1) * x_row + d]) << 16;
}

// rows of dim numbers to tiles of dim rows: xᵀ as the left operand
void transpose_to_rows(int64_t rows, int64_t dim, const Half* x, int64_t x_row, Pair* space, Half* out) {
  for (int64_t tile = 0; tile < rows; tile += TILE, x += TILE * x_row, out += TILE * dim) {
    const int64_t count = std::min(TILE, rows - tile);
    transpose_to_pairs(count, dim, x, x_row, space);
    for (int64_t d = 0; d < dim; d += 2)
      for (int64_t r = 0; r < count; ++r) {
        out[d * count + r] = Half(space[d / 2 * count + r]);
        out[(d + 1) * count + r] = Half(space[d / 2 * count + r] >> 16);
      }
  }
}

// scales each column of a tile of dim rows by its factor and writes it transposed: rows of dim numbers
void write_transposed(int64_t rows, int64_t dim, const float* x, const float* factors, Pair* space, Half* out,
                      int64_t out_row) {
  for (int64_t d = 0; d < dim; d += 2)
    for (int64_t r = 0; r < rows; ++r)
      space[d / 2 * rows + r] = pair(factors[r] * x[d * rows + r], factors[r] * x[(d + 1) * rows + r]);
  transpose(dim / 2, rows, space, rows, reinterpret_cast<Pair*>(out), out_row / 2);
}

}  // namespace

// Whether libtorch can run these GEMMs here. It throws if the CPU or ONEDNN_MAX_CPU_ISA does not allow it.
extern "C" bool attention_works() {
  try {
    const std::vector<Half> a(16 * 16);
    const std::vector<Pair> b(8 * 16);
    std::vector<float> c(16 * 16);
    multiply(16, 16, 16, a.data(), 16, b.data(), c.data(), false);
    at::native::cpublas::brgemm_release(true);
    return true;
  } catch (...) {
    return false;
  }
}

// Below, q, out, out_grad and q_grad are (batch, heads, seq, dim); k, v, k_grad and v_grad are (batch, kv_heads, seq,
// dim); logsumexp is (batch, heads, seq), natural log. seq, dim and the strides of bfloat16 matrices are even. Windows are
// attention_float32.cpp's.

// matrices: q, k, v, out
extern "C" void attention_forward(const Matrices<Half>* matrices, const Matrices<float>* logsumexp, int64_t batches,
                                  int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim, int64_t /* window */,
                                  bool /* float32 */) {
  const auto &[q, k, v, out] = *reinterpret_cast<const Matrices<Half>(*)[4]>(matrices);
  const float natural_scale = 1 / std::sqrt(float(dim)), scale = LOG2E * natural_scale;
  const int64_t tiles = (seq + TILE - 1) / TILE, group = heads / kv_heads;
  std::vector<std::atomic<int64_t>> taken(batches * kv_heads);  // tiles of queries in each group
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
    Buffer<Pair> qt(TILE * dim / 2), p_pairs(TILE * TILE / 2), space(TILE * dim / 2);
    Buffer<Half> vt(seq * dim);
    Buffer<float> scores(TILE * TILE), ot(TILE * dim), highest(TILE), higher(TILE), sums(TILE), factors(TILE);
#pragma omp for collapse(3) schedule(dynamic)
    for (int64_t thread = 0; thread < threads; ++thread)  // those with no group of their own help the others
      for (int64_t b = 0; b < batches; ++b)
        for (int64_t kv = 0; kv < kv_heads; ++kv) {
          std::atomic<int64_t>& next = taken[b * kv_heads + kv];
          if (next >= group * tiles) continue;
          const Half* k_ = k.of(b, kv);
          transpose_to_rows(seq, dim, v.of(b, kv), v.row_stride, space.data(), vt.data());
          for (int64_t tile = next++; tile < group * tiles; tile = next++) {  // last queries first: they cost most
            const int64_t h = kv * group + tile / tiles, i = (tiles - 1 - tile % tiles) * TILE;
            const int64_t queries = std::min(TILE, seq - i);
            transpose_to_pairs(queries, dim, q.of(b, h) + i * q.row_stride, q.row_stride, qt.data());
            std::fill(highest.begin(), highest.end(), -INFINITY);
            std::fill(sums.begin(), sums.end(), 0.f);
            for (int64_t j = 0; j <= i; j += TILE) {
              const int64_t keys = std::min(TILE, seq - j);
              multiply(keys, queries, dim, k_ + j * k.row_stride, k.row_stride, qt.data(), scores.data(), false);
              for (int64_t r = 1; r < keys && i == j; ++r)  // mask the keys that come after their query
                std::fill_n(&scores[r * queries], r, -INFINITY);
              higher = highest;
              for (int64_t r = 0; r < keys; ++r)
                for (int64_t c = i == j ? r / LANES * LANES : 0; c < queries; ++c)
                  higher[c] = std::max(higher[c], scores[r * queries + c]);
              for (int64_t c = 0; c < queries; ++c) {
                factors[c] = power_of_2((highest[c] - higher[c]) * scale);
                sums[c] *= factors[c];
                highest[c] = higher[c];
              }
              for (int64_t d = 0; d < dim && j > 0; ++d)
                for (int64_t c = 0; c < queries; ++c) ot[d * queries + c] *= factors[c];
              for (int64_t r = 0; r < keys; r += 2) {
                // All queries of the first vectors may come before these keys.
                const int64_t row = r * queries, next = row + queries, start = i == j ? r / LANES * LANES : 0;
                std::fill_n(&p_pairs[row / 2], start, 0);
#pragma omp simd
                for (int64_t c = start; c < queries; ++c) {
                  scores[row + c] = power_of_2((scores[row + c] - highest[c]) * scale);
                  scores[next + c] = power_of_2((scores[next + c] - highest[c]) * scale);
                  sums[c] += scores[row + c] + scores[next + c];
                }
                round_rows(queries - start, &scores[row + start], &scores[next + start], &p_pairs[row / 2 + start]);
              }
              multiply(dim, queries, keys, &vt[j * dim], keys, p_pairs.data(), ot.data(), j > 0);
            }
            for (int64_t c = 0; c < queries; ++c) {
              logsumexp->of(b, h)[(i + c) * logsumexp->row_stride] = highest[c] * natural_scale + std::log(sums[c]);
              factors[c] = 1 / sums[c];
            }
            write_transposed(queries, dim, ot.data(), factors.data(), space.data(),
                             out.of(b, h) + i * out.row_stride, out.row_stride);
          }
        }
    at::native::cpublas::brgemm_release(true);
  }
}

// matrices: q, k, v, out, out_grad, q_grad, k_grad, v_grad
extern "C" void attention_backward(const Matrices<Half>* matrices, const Matrices<float>* logsumexp, int64_t batches,
                                   int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim, int64_t /* window */,
                                   bool /* float32 */) {
  const auto &[q, k, v, out, out_grad, q_grad, k_grad, v_grad] =
      *reinterpret_cast<const Matrices<Half>(*)[8]>(matrices);
  const float scale = 1 / std::sqrt(float(dim));
  const int64_t tiles = (seq + TILE - 1) / TILE, group = heads / kv_heads;
#pragma omp parallel
  {
    const int64_t parts = parts_of_group(batches * kv_heads);
    Buffer<Pair> kt_pairs(seq * dim / 2), vt_pairs(seq * dim / 2), k_pairs(seq * dim / 2);
    Buffer<Pair> p_pairs(TILE * TILE / 2), ds_pairs(TILE * TILE / 2), space(TILE * dim / 2);
    Buffer<Half> qt(TILE * dim), dot(TILE * dim), ds(TILE * TILE);
    Buffer<float> scores(TILE * TILE), dp(TILE * TILE), dq(TILE * dim), dkt(seq * dim), dvt(seq * dim);
    Buffer<float> row_sums(TILE), exponents(TILE), scales(TILE, scale), ones(TILE, 1);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t job = 0; job < kv_heads * parts; ++job) {
        const int64_t kv = job / parts, part = job % parts;
        transpose_to_pairs(seq, dim, k.of(b, kv), k.row_stride, kt_pairs.data());
        transpose_to_pairs(seq, dim, v.of(b, kv), v.row_stride, vt_pairs.data());
        weave(seq, dim, k.of(b, kv), k.row_stride, k_pairs.data());
        const int64_t first = kv * group;
        for (int64_t h = first; h < first + group; ++h)
          for (int64_t i = (seq - 1) / TILE * TILE; i >= 0; i -= TILE) {  // last queries first: they see all keys
            const bool my_queries = is_mine((h - first) * tiles + i / TILE, part, parts);
            if (!my_queries && i < part * TILE) continue;  // nor any of the keys before them
            const bool begun = h > first || i + TILE < seq;
            const int64_t queries = std::min(TILE, seq - i);
            const Half *q_ = q.of(b, h) + i * q.row_stride, *do_ = out_grad.of(b, h) + i * out_grad.row_stride;
            transpose_to_rows(queries, dim, q_, q.row_stride, space.data(), qt.data());
            transpose_to_rows(queries, dim, do_, out_grad.row_stride, space.data(), dot.data());
            for (int64_t r = 0; r < queries; ++r) {
              const Half* o = out.of(b, h) + (i + r) * out.row_stride;
              row_sums[r] = sum_of_products(dim, o, do_ + r * out_grad.row_stride);
              exponents[r] = logsumexp->of(b, h)[(i + r) * logsumexp->row_stride];
            }
            for (int64_t j = 0; j <= i; j += TILE) {
              const bool my_keys = is_mine(j / TILE, part, parts);
              if (!my_queries && !my_keys) continue;
              const int64_t keys = std::min(TILE, seq - j);
              multiply(queries, keys, dim, q_, q.row_stride, &kt_pairs[j * dim / 2], scores.data(), false);
              multiply(queries, keys, dim, do_, out_grad.row_stride, &vt_pairs[j * dim / 2], dp.data(), false);
              for (int64_t r = 0; r < queries; r += 2) {
                const int64_t row = r * keys, next = row + keys;
                const int64_t end = i == j ? std::min(keys, r / LANES * LANES + LANES) : keys;
                if (i == j) {  // mask the keys that come after their query
                  std::fill(&scores[row + r + 1], &scores[row + end], -INFINITY);
                  std::fill(scores.data() + next + r + 2, scores.data() + next + end, -INFINITY);
                  for (auto* pairs : {&p_pairs, &ds_pairs}) std::fill_n(pairs->data() + row / 2 + end, keys - end, 0);
                  for (int64_t first : {row, next}) std::fill_n(ds.data() + first + end, keys - end, 0);
                }
#pragma omp simd
                for (int64_t c = 0; c < end; ++c) {
                  // Rounded exactly as in logsumexp, so that the rounding errors of large scores cancel.
                  scores[row + c] = power_of_2(LOG2E * (scale * scores[row + c] - exponents[r]));
                  scores[next + c] = power_of_2(LOG2E * (scale * scores[next + c] - exponents[r + 1]));
                  dp[row + c] = scores[row + c] * (dp[row + c] - row_sums[r]);
                  dp[next + c] = scores[next + c] * (dp[next + c] - row_sums[r + 1]);
                }
                round_rows(end, &scores[row], &scores[next], &p_pairs[row / 2]);
                round_rows(end, &dp[row], &dp[next], &ds_pairs[row / 2], &ds[row], &ds[next]);
              }
              if (my_keys) {
                multiply(dim, keys, queries, dot.data(), queries, p_pairs.data(), &dvt[j * dim], begun);
                multiply(dim, keys, queries, qt.data(), queries, ds_pairs.data(), &dkt[j * dim], begun);
              }
              if (my_queries)
                multiply(queries, dim, keys, ds.data(), keys, &k_pairs[j / 2 * dim], dq.data(), j > 0);
            }
            for (int64_t r = 0; r < queries && my_queries; ++r) {
              Half* row = q_grad.of(b, h) + (i + r) * q_grad.row_stride;
              for (int64_t d = 0; d < dim; ++d) row[d] = rounded(scale * dq[r * dim + d]);
            }
          }
        for (int64_t j = 0; j < seq; j += TILE) {
          if (!is_mine(j / TILE, part, parts)) continue;
          const int64_t keys = std::min(TILE, seq - j);
          write_transposed(keys, dim, &dkt[j * dim], scales.data(), space.data(),
                           k_grad.of(b, kv) + j * k_grad.row_stride, k_grad.row_stride);
          write_transposed(keys, dim, &dvt[j * dim], ones.data(), space.data(),
                           v_grad.of(b, kv) + j * v_grad.row_stride, v_grad.row_stride);
        }
      }
    at::native::cpublas::brgemm_release(true);
  }
}
