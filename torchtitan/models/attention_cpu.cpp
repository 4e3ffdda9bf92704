// Backward pass of causal attention in bfloat16, for CPUs with a matrix unit (AMX).
//
// FlashAttention-2 (arXiv 2307.08691, algorithm 2) a tile of keys and queries at a time, scores transposed: with keys
// down and queries across, Pᵀ and dSᵀ are what dV and dK need, a query's numbers lie along the vector registers, and
// two rows woven into one are what the product of dQ needs. Products and sums are float32.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {  // in libtorch_cpu: oneDNN's kernels for small products
void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const c10::BFloat16* a,
            const c10::BFloat16* b, float* c, bool in_pairs);
void brgemm_release(bool in_pairs);
}

namespace {

using Half = uint16_t;               // a bfloat16: the upper half of a float's bits
using Pair = uint32_t;               // two of them, as the matrix unit takes them: from rows 2 i and 2 i + 1 of a column
constexpr int64_t TILE = 128;        // keys and queries; scores are 64 KiB and stay in the cache
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

template <typename Number>
struct Matrices {  // (batch, heads, rows, columns); the columns of a row lie together
  Number* data;
  int64_t batch_stride, head_stride, row_stride;
  Number* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
};

inline float widened(Half x) { return std::bit_cast<float>(Pair(x) << 16); }

inline Pair pair(float first, float second) {  // rounded to nearest, to even
  auto rounded = [](float x) { return std::bit_cast<Pair>(x) + 0x7fff + (std::bit_cast<Pair>(x) >> 16 & 1); };
  return rounded(first) >> 16 | (rounded(second) & 0xffff0000);
}

// 2^x for x up to 127: e^y by its series for |y| <= ln(2) / 2, to 2e-7 of it, and the rest added to the exponent.
inline float power_of_2(float x) {
  const float whole = std::rint(x), y = (x - whole) * LN2;
  const float series = 1 + y * (1 + y * (1 / 2.f + y * (1 / 6.f + y * (1 / 24.f + y * (1 / 120.f + y / 720)))));
  return x < -126 ? 0 : std::bit_cast<float>(std::bit_cast<int32_t>(series) + (int32_t(whole) << 23));
}

// a: m rows of k. b: k / 2 rows of n pairs. c: m rows of n, added to or overwritten.
void multiply(int64_t m, int64_t n, int64_t k, const Half* a, int64_t a_row, const Pair* b, float* c, bool add) {
  at::native::cpublas::brgemm(m, n, k, a_row, n, n, add, reinterpret_cast<const c10::BFloat16*>(a),
                              reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

void transpose(int64_t rows, int64_t columns, const Pair* in, int64_t in_row, Pair* out, int64_t out_row) {
  constexpr int64_t SIDE = 16;  // a cache line
  for (int64_t row = 0; row < rows; row += SIDE)
    for (int64_t column = 0; column < columns; column += SIDE)
      for (int64_t c = column; c < std::min(columns, column + SIDE); ++c)
        for (int64_t r = row; r < std::min(rows, row + SIDE); ++r) out[c * out_row + r] = in[r * in_row + c];
}

// rows of dim numbers, to dim / 2 rows of pairs: xᵀ as the right operand of a product
void transpose_to_pairs(int64_t rows, int64_t dim, const Half* x, int64_t x_row, Pair* out) {
  transpose(rows, dim / 2, reinterpret_cast<const Pair*>(x), x_row / 2, out, rows);
}

// rows of dim numbers, to rows / 2 of dim pairs: x as the right operand
void weave(int64_t rows, int64_t dim, const Half* x, int64_t x_row, Pair* out) {
  for (int64_t r = 0; r < rows; r += 2, out += dim)
    for (int64_t d = 0; d < dim; ++d) out[d] = x[r * x_row + d] | Pair(x[(r + 1) * x_row + d]) << 16;
}

// dim / 2 rows of pairs, to dim rows of numbers
void unweave(int64_t rows, int64_t dim, const Pair* x, Half* out) {
  for (int64_t d = 0; d < dim; d += 2, x += rows)
    for (int64_t r = 0; r < rows; ++r) {
      out[d * rows + r] = Half(x[r]);
      out[(d + 1) * rows + r] = Half(x[r] >> 16);
    }
}

}  // namespace

// q, out, out_grad, q_grad: (batch, heads, seq, dim); k, v, k_grad, v_grad: (batch, kv_heads, seq, dim); logsumexp:
// (batch, heads, seq). seq, dim and the strides of what is read are even.
extern "C" void attention_backward(const Matrices<Half>* matrices, const Matrices<float>* logsumexp, int64_t batches,
                                   int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim) {
  const auto &[q, k, v, out, out_grad, q_grad, k_grad, v_grad] =
      *reinterpret_cast<const Matrices<Half>(*)[8]>(matrices);
  const float scale = 1 / std::sqrt(float(dim));
#pragma omp parallel
  {
    std::vector<Pair> qt(seq * dim / 2), dot(seq * dim / 2), q_pairs(seq * dim / 2), do_pairs(seq * dim / 2);
    std::vector<Pair> ds_pairs(TILE * TILE / 2), turned(TILE * dim / 2);
    std::vector<Half> kt(seq * dim), p(TILE * TILE), ds(TILE * TILE);
    std::vector<float> scores(TILE * TILE), dp(TILE * TILE), dqt(seq * dim), dk(seq * dim), dv(seq * dim);
    std::vector<float> row_sums(seq), exponents(seq);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t kv = 0; kv < kv_heads; ++kv) {
        const Half *k_ = k.of(b, kv), *v_ = v.of(b, kv);
        for (int64_t j = 0; j < seq; j += TILE) {
          const int64_t keys = std::min(TILE, seq - j);
          transpose_to_pairs(keys, dim, k_ + j * k.row_stride, k.row_stride, turned.data());
          unweave(keys, dim, turned.data(), &kt[j * dim]);
        }
        for (int64_t h = kv * heads / kv_heads; h < (kv + 1) * heads / kv_heads; ++h) {
          const Half *q_ = q.of(b, h), *o = out.of(b, h), *do_ = out_grad.of(b, h);
          for (int64_t i = 0; i < seq; i += TILE) {
            const int64_t queries = std::min(TILE, seq - i);
            transpose_to_pairs(queries, dim, q_ + i * q.row_stride, q.row_stride, &qt[i * dim / 2]);
            transpose_to_pairs(queries, dim, do_ + i * out_grad.row_stride, out_grad.row_stride, &dot[i * dim / 2]);
          }
          weave(seq, dim, q_, q.row_stride, q_pairs.data());
          weave(seq, dim, do_, out_grad.row_stride, do_pairs.data());
          for (int64_t i = 0; i < seq; ++i) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < dim; ++d)
              sum += widened(o[i * out.row_stride + d]) * widened(do_[i * out_grad.row_stride + d]);
            row_sums[i] = sum;
            exponents[i] = logsumexp->of(b, h)[i * logsumexp->row_stride] * LOG2E;
          }
          for (int64_t j = 0; j < seq; j += TILE) {
            const int64_t keys = std::min(TILE, seq - j);
            for (int64_t i = j; i < seq; i += TILE) {
              const int64_t queries = std::min(TILE, seq - i);
              multiply(keys, queries, dim, k_ + j * k.row_stride, k.row_stride, &qt[i * dim / 2], scores.data(), false);
              multiply(keys, queries, dim, v_ + j * v.row_stride, v.row_stride, &dot[i * dim / 2], dp.data(), false);
              for (int64_t r = 1; r < keys && i == j; ++r)  // keys after their query
                std::fill_n(&scores[r * queries], r, -std::numeric_limits<float>::infinity());
              for (int64_t r = 0; r < keys; r += 2) {
                const int64_t row = r * queries, next = row + queries;
#pragma omp simd
                for (int64_t c = 0; c < queries; ++c) {
                  const float p0 = power_of_2(scores[row + c] * (scale * LOG2E) - exponents[i + c]);
                  const float p1 = power_of_2(scores[next + c] * (scale * LOG2E) - exponents[i + c]);
                  const Pair ps = pair(p0, p1);
                  const Pair dss = pair(p0 * (dp[row + c] - row_sums[i + c]), p1 * (dp[next + c] - row_sums[i + c]));
                  p[row + c] = Half(ps), p[next + c] = Half(ps >> 16);
                  ds[row + c] = Half(dss), ds[next + c] = Half(dss >> 16);
                  ds_pairs[row / 2 + c] = dss;
                }
              }
              const bool begun = i > j || h > kv * heads / kv_heads;
              multiply(keys, dim, queries, p.data(), queries, &do_pairs[i * dim / 2], &dv[j * dim], begun);
              multiply(keys, dim, queries, ds.data(), queries, &q_pairs[i * dim / 2], &dk[j * dim], begun);
              multiply(dim, queries, keys, &kt[j * dim], keys, ds_pairs.data(), &dqt[i * dim], j > 0);
            }
          }
          for (int64_t i = 0; i < seq; i += TILE) {
            const int64_t queries = std::min(TILE, seq - i);
            for (int64_t d = 0; d < dim; d += 2)
              for (int64_t c = 0; c < queries; ++c) {
                const float* sum = &dqt[i * dim + d * queries + c];
                turned[d / 2 * queries + c] = pair(scale * sum[0], scale * sum[queries]);
              }
            transpose(dim / 2, queries, turned.data(), queries,
                      reinterpret_cast<Pair*>(q_grad.of(b, h) + i * q_grad.row_stride), q_grad.row_stride / 2);
          }
        }
        for (int64_t j = 0; j < seq; ++j)
          for (int64_t d = 0; d < dim; ++d) {
            k_grad.of(b, kv)[j * k_grad.row_stride + d] = Half(pair(scale * dk[j * dim + d], 0));
            v_grad.of(b, kv)[j * v_grad.row_stride + d] = Half(pair(dv[j * dim + d], 0));
          }
      }
    at::native::cpublas::brgemm_release(true);
  }
}
