// Rounds bfloat16 or float32 matrices to block-scaled formats and back, in few passes over memory: the same numbers that
// `quantize_blocks` and `dequantize` of block_formats.py find.
//
// A tensor is contiguous, (matrices, rows, columns). Its blocks have numbers of their own, (matrices, blocks of rows,
// blocks of columns); the last ones of a matrix may be short.

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace {

struct Shape {
  int64_t matrices, rows, columns, block_rows, block_columns;
  int64_t row_blocks() const { return (rows + block_rows - 1) / block_rows; }
  int64_t column_blocks() const { return (columns + block_columns - 1) / block_columns; }
};

// Numbers of an element type below 2^(e + 1) and from 2^e on are multiples of 2^e * step, and those below `smallest`
// multiples of smallest * step.
struct Element {
  float lowest, highest, smallest, step;
};

// The finalizer of MurmurHash3, as `_hash` of block_formats.py.
inline Bits hash(Bits x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// As integers, magnitudes compare like the floats do, and NaN compares above all of them.
template <typename In>
Bits survey_all(const typename In::Storage* x, Shape shape, Bits* largest, int threads) {
  Bits sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
  for (int64_t group = 0; group < shape.matrices * shape.row_blocks(); ++group) {
    const int64_t matrix = group / shape.row_blocks(), first = group % shape.row_blocks() * shape.block_rows;
    Bits* most = largest + group * shape.column_blocks();
    for (int64_t row = first; row < std::min(first + shape.block_rows, shape.rows); ++row) {
      const auto* numbers = x + (matrix * shape.rows + row) * shape.columns;
      for (int64_t block = 0; block < shape.column_blocks(); ++block) {
        const int64_t start = block * shape.block_columns, end = std::min(start + shape.block_columns, shape.columns);
        Bits found = most[block];
        for (int64_t column = start; column < end; ++column) {
          const Bits bits = std::bit_cast<Bits>(In::load(numbers[column]));
          found = std::max(found, bits & 0x7fffffff);
          sum += bits;
        }
        most[block] = found;
      }
    }
  }
  return sum;
}

template <bool STOCHASTIC, typename In, typename Out>
void round_all(const typename In::Storage* x, Shape shape, Element element, const float* factors, const float* scales,
               Bits bits, typename Out::Storage* out, int threads) {
  const Bits seed = hash(bits);
#pragma omp parallel for num_threads(threads)
  for (int64_t line = 0; line < shape.matrices * shape.rows; ++line) {
    const int64_t group = line / shape.rows * shape.row_blocks() + line % shape.rows / shape.block_rows;
    for (int64_t block = 0; block < shape.column_blocks(); ++block) {
      const float factor = factors[group * shape.column_blocks() + block];
      const float scale = scales[group * shape.column_blocks() + block];
      const int64_t start = line * shape.columns + block * shape.block_columns;
      const int64_t end = std::min(start + shape.block_columns, (line + 1) * shape.columns);
      for (int64_t i = start; i < end; ++i) {
        float exact = In::load(x[i]) * factor;
        exact = exact < element.lowest ? element.lowest : exact;  // NaN stays
        exact = exact > element.highest ? element.highest : exact;
        const float power = std::bit_cast<float>(std::bit_cast<Bits>(exact) & 0x7f800000);
        const float step = (power < element.smallest ? element.smallest : power) * element.step;
        const float steps = exact / step;
        float rounded;
        if constexpr (STOCHASTIC) {
          const float noise = float(int32_t(hash(Bits(i) * 0x9e3779b9u + seed) >> 8)) * 0x1p-24f;
          const float low = std::floor(steps);
          rounded = low + (steps - low > noise ? 1.0f : 0.0f);
        } else {
          rounded = std::nearbyint(steps);
        }
        out[i] = Out::store(rounded * step * scale);
      }
    }
  }
}

template <int STEP>
inline void butterflies(float* a) {
  float b[16];
  for (int i = 0; i < 16; ++i) b[i] = a[i ^ STEP] + (i & STEP ? -a[i] : a[i]);
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}

template <typename In>
void transform_all(const typename In::Storage* x, int64_t rows, int64_t columns, Bits signs, float* out, int threads) {
  const int64_t blocks = (columns + 15) / 16;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t block = 0; block < blocks; ++block) {
      float a[16];
      for (int i = 0; i < 16; ++i) {
        const int64_t column = 16 * block + i;
        a[i] = (column < columns ? In::load(x[row * columns + column]) : 0.0f) * (signs >> i & 1 ? -0.25f : 0.25f);
      }
      butterflies<1>(a);
      butterflies<2>(a);
      butterflies<4>(a);
      butterflies<8>(a);
      std::copy(a, a + 16, out + (row * blocks + block) * 16);
    }
}

}  // namespace

extern "C" {

// amax: the largest magnitude of each block, as bits; zero-initialized. Returns the sum of all numbers' float32 bits.
uint32_t survey(const void* x, bool is_float32, Shape shape, uint32_t* amax, int threads) {
  return is_float32 ? survey_all<Float32>(static_cast<const float*>(x), shape, amax, threads)
                    : survey_all<BFloat16>(static_cast<const uint16_t*>(x), shape, amax, threads);
}

// Products with `factors`, rounded to the element type and multiplied by `scales`, both float32 numbers of blocks. bits:
// the sum that `survey_blocks` returned, the seed of stochastic rounding.
void round_blocks(const void* x, bool is_float32, Shape shape, Element element, const float* factors,
                  const float* scales, bool stochastic, uint32_t bits, void* out, bool out_is_float32, int threads) {
  const auto run = [&]<typename In, typename Out>(In, Out) {
    const auto* numbers = static_cast<const typename In::Storage*>(x);
    auto* rounded = static_cast<typename Out::Storage*>(out);
    stochastic ? round_all<true, In, Out>(numbers, shape, element, factors, scales, bits, rounded, threads)
               : round_all<false, In, Out>(numbers, shape, element, factors, scales, bits, rounded, threads);
  };
  const auto to = [&]<typename In>(In in) { out_is_float32 ? run(in, Float32{}) : run(in, BFloat16{}); };
  is_float32 ? to(Float32{}) : to(BFloat16{});
}

// out: (rows, columns filled up with zeros to a multiple of 16), as `hadamard` of block_formats.py.
void transform(const void* x, bool is_float32, int64_t rows, int64_t columns, uint32_t signs, float* out, int threads) {
  is_float32 ? transform_all<Float32>(static_cast<const float*>(x), rows, columns, signs, out, threads)
             : transform_all<BFloat16>(static_cast<const uint16_t*>(x), rows, columns, signs, out, threads);
}
}
