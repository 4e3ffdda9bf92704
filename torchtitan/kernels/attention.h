// What the attention kernels share.
//
// A thread takes all heads of a key-value group, whose keys and values it lays out once. Threads for which there is no
// group help: in the forward pass with tiles of queries, in the backward pass each computes the gradients of some tiles
// of queries and of some tiles of keys. Scores of queries and keys of two threads are then computed twice, but every
// number is summed by one thread, in the same order for any number of threads.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

template <typename Number>
struct Matrices {  // (batch, heads, rows, columns); columns are contiguous
  Number* data;
  int64_t batch_stride, head_stride, row_stride;
  Number* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
};

// The parts into which the backward pass divides a group: no more in all than there are threads.
inline int64_t parts_of_group(int64_t groups) {
  return std::max<int64_t>(1, omp_get_num_threads() / std::max<int64_t>(1, groups));
}

// Whether a part computes a tile's gradient. Every other round goes backwards (0 1 2 2 1 0 0 1 ...), because tiles take
// longer, or shorter, from one to the next.
inline bool is_mine(int64_t tile, int64_t part, int64_t parts) {
  const int64_t turn = tile % (2 * parts);
  return part == std::min(turn, 2 * parts - 1 - turn);
}
