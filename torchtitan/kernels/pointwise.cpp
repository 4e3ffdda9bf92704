// What lies between the GEMMs of a block, in bfloat16, each in one pass over memory and rounded exactly as torch's
// operations, which take several. Compile without floating-point contraction.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <immintrin.h>

#include "numbers.h"

// torch's own exponential, in libtorch_cpu.
#ifdef __AVX512F__
using Vector = __m512;
extern "C" Vector Sleef_expf16_u10(Vector);
inline void exponential(float* x) { _mm512_storeu_ps(x, Sleef_expf16_u10(_mm512_loadu_ps(x))); }
#else
using Vector = __m256;
extern "C" Vector Sleef_expf8_u10(Vector);
inline void exponential(float* x) { _mm256_storeu_ps(x, Sleef_expf8_u10(_mm256_loadu_ps(x))); }
#endif

namespace {

using Number = BFloat16::Storage;
constexpr int64_t WIDTH = sizeof(Vector) / sizeof(float), BLOCK = 256;  // numbers

inline float load(Number x) { return BFloat16::load(x); }
inline Number store(float x) { return BFloat16::store(x); }
inline float rounded(float x) { return load(store(x)); }

// 1 + e^-x of `count` numbers, a multiple of WIDTH
inline void denominators(int64_t count, const Number* x, float* out) {
  for (int64_t c = 0; c < count; ++c) out[c] = -load(x[c]);
  for (int64_t c = 0; c < count; c += WIDTH) exponential(out + c);
  for (int64_t c = 0; c < count; ++c) out[c] += 1;
}

}  // namespace

extern "C" {

// `size` numbers, a multiple of WIDTH
void swiglu(int64_t size, const Number* gates, const Number* ups, Number* outs, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < size; i += BLOCK) {
    const int64_t count = std::min(BLOCK, size - i);
    const Number *gate = gates + i, *up = ups + i;
    Number* out = outs + i;
    float below[BLOCK];
    denominators(count, gate, below);
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) out[c] = store(rounded(load(gate[c]) / below[c]) * load(up[c]));
  }
}

void swiglu_gradients(int64_t size, const Number* grads, const Number* gates, const Number* ups, Number* gate_grads,
                      Number* up_grads, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < size; i += BLOCK) {
    const int64_t count = std::min(BLOCK, size - i);
    const Number *grad = grads + i, *gate = gates + i, *up = ups + i;
    Number *gate_grad = gate_grads + i, *up_grad = up_grads + i;
    float below[BLOCK];
    denominators(count, gate, below);
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      const float x = load(gate[c]), g = load(grad[c]), sigmoid = 1 / below[c];
      up_grad[c] = store(g * rounded(x / below[c]));
      gate_grad[c] = store(rounded(g * load(up[c])) * sigmoid * (1 + x * (1 - sigmoid)));
    }
  }
}

// x / rms * weight
void norm(int64_t rows, int64_t columns, const Number* x, const float* inverse, const Number* weight, Number* out,
          int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = r * columns, c = 0; c < columns; ++c, ++i)
      out[i] = store(load(x[i]) * inverse[r] * load(weight[c]));
}

// grad * x / rms
void norm_products(int64_t rows, int64_t columns, const Number* grad, const Number* x, const float* inverse,
                   float* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = r * columns; i < (r + 1) * columns; ++i) out[i] = load(grad[i]) * (load(x[i]) * inverse[r]);
}

// (grad * weight - x / rms * mean) / rms
void norm_gradient(int64_t rows, int64_t columns, const Number* grad, const Number* x, const float* inverse,
                   const Number* weight, const float* mean, Number* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = r * columns, c = 0; c < columns; ++c, ++i) {
      const float normal = load(x[i]) * inverse[r];
      out[i] = store(std::fma(-normal, mean[r], load(grad[i]) * load(weight[c])) * inverse[r]);
    }
}

// Rotates pairs of adjacent columns; x is (batch, seq, heads, 2 * pairs), the table (seq, pairs, 2): cos and sin, which
// is multiplied by `sign`.
void rotate(int64_t batch, int64_t seq, int64_t heads, int64_t pairs, const Bits* x, const float* table, float sign,
            Bits* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < batch * seq; ++row)
    for (int64_t h = 0; h < heads; ++h) {
      const float* angles = table + row % seq * pairs * 2;
#pragma omp simd
      for (int64_t p = 0; p < pairs; ++p) {
        const Bits both = x[(row * heads + h) * pairs + p];
        const float even = load(both), odd = load(both >> 16), cosine = angles[2 * p], sine = sign * angles[2 * p + 1];
        out[(row * heads + h) * pairs + p] =
            store(even * cosine - odd * sine) | Bits(store(even * sine + odd * cosine)) << 16;
      }
    }
}
}
