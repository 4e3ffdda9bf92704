// What the attention kernels share.

#pragma once

#include <cstdint>

template <typename Number>
struct Matrices {  // (batch, heads, rows, columns); columns are contiguous
  Number* data;
  int64_t batch_stride, head_stride, row_stride;
  Number* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
};
