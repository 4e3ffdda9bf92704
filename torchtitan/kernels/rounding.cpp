// Quantizes bfloat16 or float32 matrices to 8 bits and dequantizes them, each in one pass over memory.
//
// Matrices are contiguous, (rows, columns). A scale is a pointer and two strides: per row, per column or per matrix, so
// at least one stride is 0.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "numbers.h"

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace {

struct Scale {
  const float* data;
  int64_t row_stride, column_stride;
};

// MANTISSA explicit mantissa bits and exponent bias BIAS. Values beyond LARGEST saturate; NaN stays NaN.
template <int MANTISSA, int BIAS, Bits LARGEST>
struct Float8 {
  using Storage = uint8_t;
  static constexpr int DROPPED = 23 - MANTISSA;
  static Storage round(float x) {
    const Bits bits = std::bit_cast<Bits>(x), sign = bits >> 24 & 0x80;
    Bits magnitude = bits & 0x7fffffff;
    const bool nan = magnitude > 0x7f800000;
    magnitude = magnitude < LARGEST ? magnitude : LARGEST;
    const Bits normal =
        (magnitude - (Bits(127 - BIAS) << 23) + (Bits(1) << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1)) >> DROPPED;
    // Adding SHIFT and subtracting it again rounds at the last place of a subnormal number.
    constexpr Bits SHIFT = Bits(127 - BIAS + 1 + DROPPED) << 23;
    const Bits subnormal = std::bit_cast<Bits>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(SHIFT)) - SHIFT;
    const Bits rounded = magnitude < Bits(127 - BIAS + 1) << 23 ? subnormal : normal;
    return sign | (nan ? 0x7f : rounded);
  }
  static float widen(Storage x) {
    const Bits magnitude = x & 0x7f;
    const float normal = std::bit_cast<float>((magnitude << DROPPED) + (Bits(127 - BIAS) << 23));
    const float subnormal = float(int32_t(magnitude)) * std::bit_cast<float>(Bits(127 - BIAS + 1 - MANTISSA) << 23);
    float value = magnitude < 1 << MANTISSA ? subnormal : normal;
    if constexpr (MANTISSA == 2)
      value = magnitude >= 0x7c ? std::bit_cast<float>(magnitude == 0x7c ? 0x7f800000 : 0x7fc00000) : value;
    else
      value = magnitude == 0x7f ? std::bit_cast<float>(0x7fc00000) : value;
    return std::bit_cast<float>(std::bit_cast<Bits>(value) | Bits(x & 0x80) << 24);
  }
};

using E4M3 = Float8<3, 7, 0x43e00000>;   // 448
using E5M2 = Float8<2, 15, 0x47600000>;  // 57344

struct Int8 {
  using Storage = uint8_t;
  static Storage round(float x) {
    x = std::nearbyint(x);
    x = x > 127 ? 127 : x;
    x = x < -127 ? -127 : x;
    return int8_t(int32_t(x));
  }
  static float widen(Storage x) { return int8_t(x); }
};

// The magnitude as an integer. As integers, magnitudes compare like the floats do, and NaN compares above all of them.
inline uint16_t magnitude(uint16_t bfloat16) { return bfloat16 & 0x7fff; }
inline Bits magnitude(float x) { return std::bit_cast<Bits>(x) & 0x7fffffff; }

inline Bits float32_bits(uint16_t magnitude) { return Bits(magnitude) << 16; }
inline Bits float32_bits(Bits magnitude) { return magnitude; }

template <typename Storage>
void largest(const Storage* x, int64_t rows, int64_t columns, Bits* by_row, Bits* by_column, int threads) {
  using Magnitude = decltype(magnitude(*x));
#pragma omp parallel num_threads(threads)
  {
    std::vector<Magnitude> local(by_column ? columns : 0, 0);
#pragma omp for nowait
    for (int64_t row = 0; row < rows; ++row) {
      const Storage* numbers = x + row * columns;
      Magnitude most = 0;
      for (int64_t column = 0; column < columns; ++column) most = std::max(most, magnitude(numbers[column]));
      by_row[row] = float32_bits(most);
      Magnitude* to = local.data();
      if (by_column)
        for (int64_t column = 0; column < columns; ++column)
          to[column] = std::max(to[column], magnitude(numbers[column]));
    }
    if (by_column) {
#pragma omp critical
      for (int64_t column = 0; column < columns; ++column)
        by_column[column] = std::max(by_column[column], float32_bits(local[column]));
    }
  }
}

#ifdef __AVX512BW__
inline __m512 load(const uint16_t* x, __mmask16 these) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(these, x)), 16));
}
inline __m512 load(const float* x, __mmask16 these) { return _mm512_maskz_loadu_ps(these, x); }

inline __m512 factors(const float* scale, int64_t stride, int64_t i, __mmask16 these) {
  return stride ? load(scale + i, these) : _mm512_set1_ps(*scale);
}

inline void store_int8(__m512 x, uint8_t* out, __mmask16 these) {
  const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(127), _mm512_max_ps(_mm512_set1_ps(-127), x));  // keeps NaN
  _mm_mask_storeu_epi8(out, these, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(bounded)));
}

// A third of the time of the compiler's code for `Int8::round`.
template <typename Storage>
void round_row_to_int8(const Storage* x, int64_t columns, uint8_t* out, const float* scale, int64_t stride,
                       uint8_t* out_2, const float* scale_2, int64_t stride_2) {
  const auto sixteen = [=](int64_t i, __mmask16 these) __attribute__((always_inline)) {
    const __m512 numbers = load(x + i, these);
    store_int8(_mm512_mul_ps(numbers, factors(scale, stride, i, these)), out + i, these);
    if (out_2) store_int8(_mm512_mul_ps(numbers, factors(scale_2, stride_2, i, these)), out_2 + i, these);
  };
  int64_t i = 0;
  for (; i + 16 <= columns; i += 16) sixteen(i, 0xffff);
  if (i < columns) sixteen(i, (1u << (columns - i)) - 1);
}
#endif

template <typename In, typename Out>
inline void round_row(const typename In::Storage* x, typename Out::Storage* out, int64_t columns, const float* scale,
                      int64_t stride) {
  if (stride == 0) {
    const float factor = *scale;
    for (int64_t column = 0; column < columns; ++column) out[column] = Out::round(In::load(x[column]) * factor);
  } else {
    for (int64_t column = 0; column < columns; ++column) out[column] = Out::round(In::load(x[column]) * scale[column]);
  }
}

// Rounds x once, or twice with different scales; the second pass over a row finds it in the cache.
template <typename In, typename Out>
void round_all(const typename In::Storage* x, int64_t rows, int64_t columns, uint8_t* out, Scale scale, uint8_t* out_2,
               Scale scale_2, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const auto* numbers = x + row * columns;
    uint8_t *to = out + row * columns, *to_2 = out_2 ? out_2 + row * columns : nullptr;
    const float *factor = scale.data + row * scale.row_stride, *factor_2 = scale_2.data + row * scale_2.row_stride;
#ifdef __AVX512BW__
    if constexpr (std::is_same_v<Out, Int8>) {
      round_row_to_int8(numbers, columns, to, factor, scale.column_stride, to_2, factor_2, scale_2.column_stride);
      continue;
    }
#endif
    round_row<In, Out>(numbers, to, columns, factor, scale.column_stride);
    if (to_2) round_row<In, Out>(numbers, to_2, columns, factor_2, scale_2.column_stride);
  }
}

template <typename In, typename Out>
void widen_row(const uint8_t* x, typename Out::Storage* out, int64_t columns, const float* scale, int64_t stride) {
  if (stride == 0) {
    const float factor = *scale;
    for (int64_t column = 0; column < columns; ++column) out[column] = Out::store(In::widen(x[column]) * factor);
  } else {
    for (int64_t column = 0; column < columns; ++column) out[column] = Out::store(In::widen(x[column]) * scale[column]);
  }
}

#ifdef __AVX512BW__
// Float8 to bfloat16 through a lookup table of all magnitudes, several times as fast as computing them. Scale factors
// are powers of two, so the products are exact in bfloat16 and truncation to 16 bits loses nothing.
template <typename In>
struct Table {
  __m512i parts[4];
  Table(float factor) {
    alignas(64) uint16_t numbers[128];
    for (int i = 0; i < 128; ++i) numbers[i] = BFloat16::store(In::widen(i) * factor);
    for (int i = 0; i < 4; ++i) parts[i] = _mm512_load_si512(numbers + 32 * i);
  }
  __m512i of(const uint8_t* x, __mmask32 these) const {  // 32 numbers
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(these, x));
    const __m512i small = _mm512_permutex2var_epi16(parts[0], codes, parts[1]);
    const __m512i large = _mm512_permutex2var_epi16(parts[2], codes, parts[3]);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    return _mm512_or_si512(_mm512_mask_mov_epi16(small, is_large, large), sign);
  }
};

inline __m256i times(__m256i bfloat16, __m512 factors) {
  const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(wide, factors)), 16));
}

template <typename In>
void widen_by_table(const uint8_t* x, uint16_t* out, int64_t rows, int64_t columns, Scale scale, int threads) {
  if (scale.row_stride == 0 && scale.column_stride == 0) {  // one scale: ignore rows, longer runs are faster
    columns *= rows;
    rows = (columns + (1 << 16) - 1) >> 16;
    const Table<In> table(*scale.data);
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = row << 16; i < std::min((row + 1) << 16, columns); i += 32) {
        const __mmask32 these = columns - i < 32 ? (1u << (columns - i)) - 1 : ~0u;
        _mm512_mask_storeu_epi16(out + i, these, table.of(x + i, these));
      }
    return;
  }
  const Table<In> table(1);
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float* factors = scale.data + row * scale.row_stride;
    for (int64_t i = 0; i < columns; i += 32) {
      const __mmask32 these = columns - i < 32 ? (1u << (columns - i)) - 1 : ~0u;
      const __m512i value = table.of(x + row * columns + i, these);
      __m512 low = _mm512_set1_ps(*factors), high = low;
      if (scale.column_stride) {
        low = _mm512_maskz_loadu_ps(these, factors + i);
        high = _mm512_maskz_loadu_ps(these >> 16, factors + i + 16);
      }
      const __m256i first = times(_mm512_castsi512_si256(value), low);
      const __m256i second = times(_mm512_extracti64x4_epi64(value, 1), high);
      _mm512_mask_storeu_epi16(out + row * columns + i, these,
                               _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
    }
  }
}
#endif

template <typename In, typename Out>
void widen_all(const uint8_t* x, int64_t rows, int64_t columns, Scale scale, typename Out::Storage* out, int threads) {
#ifdef __AVX512BW__
  if constexpr (std::is_same_v<Out, BFloat16> && !std::is_same_v<In, Int8>)
    return widen_by_table<In>(x, out, rows, columns, scale, threads);
#endif
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = row * columns;
    widen_row<In, Out>(x + start, out + start, columns, scale.data + row * scale.row_stride, scale.column_stride);
  }
}

template <typename Out>
void scale_all(const int32_t* x, int64_t rows, int64_t columns, Scale by_row, Scale by_column,
               typename Out::Storage* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = by_row.data[row * by_row.row_stride];
    const int64_t start = row * columns;
    if (by_column.column_stride == 0) {
      const float second = *by_column.data;
      for (int64_t i = start; i < start + columns; ++i) out[i] = Out::store(float(x[i]) * factor * second);
    } else {
      for (int64_t column = 0; column < columns; ++column)
        out[start + column] = Out::store(float(x[start + column]) * factor * by_column.data[column]);
    }
  }
}

enum Format { INT8, E4M3_FORMAT, E5M2_FORMAT };

}  // namespace

extern "C" {

// by_row: (rows,). by_column: (columns,), zero-initialized, or null. Both receive float32 magnitudes as bits.
void amaxes(const void* x, bool is_float32, int64_t rows, int64_t columns, uint32_t* by_row, uint32_t* by_column,
            int threads) {
  if (is_float32)
    largest(static_cast<const float*>(x), rows, columns, by_row, by_column, threads);
  else
    largest(static_cast<const uint16_t*>(x), rows, columns, by_row, by_column, threads);
}

void round_scaled(const void* x, bool is_float32, int64_t rows, int64_t columns, int64_t format, uint8_t* out, Scale scale,
                  uint8_t* out_2, Scale scale_2, int threads) {
  const auto run = [&]<typename In>(In) {
    const auto* numbers = static_cast<const typename In::Storage*>(x);
    const auto to = [&]<typename Out>(Out) {
      round_all<In, Out>(numbers, rows, columns, out, scale, out_2, scale_2, threads);
    };
    format == INT8 ? to(Int8{}) : format == E4M3_FORMAT ? to(E4M3{}) : to(E5M2{});
  };
  is_float32 ? run(Float32{}) : run(BFloat16{});
}

void widen_scaled(const uint8_t* x, int64_t rows, int64_t columns, int64_t format, Scale scale, void* out, bool is_float32,
                  int threads) {
  const auto run = [&]<typename Out>(Out) {
    auto* numbers = static_cast<typename Out::Storage*>(out);
    const auto from = [&]<typename In>(In) { widen_all<In, Out>(x, rows, columns, scale, numbers, threads); };
    format == INT8 ? from(Int8{}) : format == E4M3_FORMAT ? from(E4M3{}) : from(E5M2{});
  };
  is_float32 ? run(Float32{}) : run(BFloat16{});
}

void scale_sums(const int32_t* x, int64_t rows, int64_t columns, Scale by_row, Scale by_column, void* out,
                bool is_float32, int threads) {
  if (is_float32)
    scale_all<Float32>(x, rows, columns, by_row, by_column, static_cast<float*>(out), threads);
  else
    scale_all<BFloat16>(x, rows, columns, by_row, by_column, static_cast<uint16_t*>(out), threads);
}
}
