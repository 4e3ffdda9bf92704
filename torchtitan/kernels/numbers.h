// How kernels for CPUs read and write bfloat16 and float32.

#pragma once

#include <bit>
#include <cstdint>

using Bits = uint32_t;

struct BFloat16 {
  using Storage = uint16_t;
  static float load(Storage x) { return std::bit_cast<float>(Bits(x) << 16); }
  static Storage store(float x) {  // rounds to nearest, ties to even
    const Bits bits = std::bit_cast<Bits>(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
  }
};

struct Float32 {
  using Storage = float;
  static float load(Storage x) { return x; }
  static Storage store(float x) { return x; }
};
