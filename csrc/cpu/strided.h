// SPDX-License-Identifier: Apache-2.0
// A tensor whose elements lie apart (transposed, sliced, reversed), read and written as if they lay
// one after another, in C order. No verb knows more of it.
//
// Such a tensor is staged from where it lies. A dense copy would cost as much as the call, for its
// fresh pages. The plan is that of a dense tensor: each rank may have its own layout, unknown to
// the others. Parts and lists have dense copies (python/dense_copies.h). Two more kinds of call
// have one made in Python. One kind reads data where it lies (symmetric tensors, single copies).
// The other passes data to a neighbour (ring, chain). A transposed matrix is copied by tiles: row
// by row, each cache line would be fetched once for each element.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fastcoll {

class Strided {
 public:
  static constexpr int kMostDims = 8;  // that don't merge with the next one

  // False if there are too many dimensions; then this means nothing. num_elements() > 0.
  bool set(std::byte* ptr, size_t elem_bytes, int ndim, const int64_t* shape,
           const int64_t* strides_bytes) {
    ptr_ = ptr;
    elem_bytes_ = elem_bytes;
    num_dims_ = 0;
    for (int i = ndim - 1; i >= 0; --i) {
      const Dim dim{size_t(shape[i]), strides_bytes[i]};
      if (dim.size == 1) continue;
      if (num_dims_ > 0 && dim.stride == dims_[num_dims_ - 1].end()) {
        dims_[num_dims_ - 1].size *= dim.size;
      } else if (num_dims_ == kMostDims) {
        return false;
      } else {
        dims_[num_dims_++] = dim;
      }
    }
    while (num_dims_ < 2) dims_[num_dims_++] = {1, int64_t(elem_bytes)};
    return true;
  }

  // Elements from `start` on, end to end.
  void read(std::byte* to, size_t start, size_t numel) const;
  void write(size_t start, const std::byte* from, size_t numel) const;

 private:
  struct Dim {
    size_t size;
    int64_t stride;  // bytes, also below 0
    int64_t end() const { return stride * int64_t(size); }
  };
  friend class StridedMove;

  std::byte* ptr_;
  size_t elem_bytes_;
  int num_dims_;                     // 2 at least
  std::array<Dim, kMostDims> dims_;  // the innermost first
};

// The tensors that a call reads and writes; equal if it works in place.
struct StridedPair {
  Strided input, output;
};

}  // namespace fastcoll
