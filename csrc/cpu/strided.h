// SPDX-License-Identifier: Apache-2.0
// A tensor whose elements lie apart (transposed, sliced, reversed), read and written as if they lay
// one after another, in C order. No verb knows more of it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

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
  void read(std::byte* to, size_t start, size_t numel) const { move<true>(to, start, numel); }
  void write(size_t start, const std::byte* from, size_t numel) const {
    move<false>(const_cast<std::byte*>(from), start, numel);
  }

 private:
  struct Dim {
    size_t size;
    int64_t stride;  // bytes, also below 0
    int64_t end() const { return stride * int64_t(size); }
  };
  struct Wide {
    uint64_t halves[2];
  };
  static constexpr size_t kLine = 64;

  // `dense` is written if kReads, else read.
  template <bool kReads>
  void move(std::byte* dense, size_t start, size_t numel) const {
    switch (elem_bytes_) {
      case 1:
        return move_elements<kReads, uint8_t>(dense, start, numel);
      case 2:
        return move_elements<kReads, uint16_t>(dense, start, numel);
      case 4:
        return move_elements<kReads, uint32_t>(dense, start, numel);
      case 8:
        return move_elements<kReads, uint64_t>(dense, start, numel);
      default:
        return move_elements<kReads, Wide>(dense, start, numel);
    }
  }

  // Plane by plane: of the two innermost dimensions, rows and what is in a row.
  template <bool kReads, class Element>
  void move_elements(std::byte* dense, size_t start, size_t numel) const {
    const size_t row_numel = dims_[0].size, plane_numel = row_numel * dims_[1].size;
    while (numel != 0) {
      const size_t in_plane = start % plane_numel;
      std::byte* row = plane(start / plane_numel) + int64_t(in_plane / row_numel) * dims_[1].stride;
      const size_t column = in_plane % row_numel;
      const size_t num_rows = column == 0 ? std::min(numel, plane_numel - in_plane) / row_numel : 0;
      size_t moved = num_rows * row_numel;
      if (num_rows != 0) {
        move_rows<kReads, Element>(dense, row, num_rows);
      } else {  // part of a row
        moved = std::min(numel, row_numel - column);
        move_row<kReads, Element>(dense, row + int64_t(column) * dims_[0].stride, moved);
      }
      dense += moved * sizeof(Element);
      start += moved;
      numel -= moved;
    }
  }

  std::byte* plane(size_t number) const {
    std::byte* at = ptr_;
    for (int i = 2; i < num_dims_ && number != 0; ++i) {
      at += int64_t(number % dims_[i].size) * dims_[i].stride;
      number /= dims_[i].size;
    }
    return at;
  }

  template <bool kReads, class Element>
  void move_row(std::byte* dense, std::byte* apart, size_t numel) const {
    const int64_t stride = dims_[0].stride;
    if (stride == int64_t(sizeof(Element)))
      return copy<kReads>(dense, apart, numel * sizeof(Element));
    for (size_t i = 0; i < numel; ++i)
      copy<kReads>(dense + i * sizeof(Element), apart + int64_t(i) * stride, sizeof(Element));
  }

  template <bool kReads, class Element>
  void move_rows(std::byte* dense, std::byte* apart, size_t num_rows) const {
    const size_t row_numel = dims_[0].size, row_bytes = row_numel * sizeof(Element);
    if (dims_[1].stride != int64_t(sizeof(Element)) || row_numel == 1) {
      for (size_t row = 0; row < num_rows; ++row)
        move_row<kReads, Element>(dense + row * row_bytes, apart + int64_t(row) * dims_[1].stride,
                                  row_numel);
      return;
    }
    // Transposed: neighbours in memory are of different rows. By tiles, so that a cache line is
    // visited once, on both sides.
    using Tile = TileOf<kReads, Element>;
    for (size_t row = 0; row < num_rows; row += Tile::kRows) {
      const size_t rows = std::min(Tile::kRows, num_rows - row);
      for (size_t column = 0; column < row_numel; column += Tile::kColumns) {
        std::byte* const here = dense + row * row_bytes + column * sizeof(Element);
        std::byte* const there = apart + row * sizeof(Element) + int64_t(column) * dims_[0].stride;
        const size_t columns = std::min(Tile::kColumns, row_numel - column);
        if (rows == Tile::kRows && columns == Tile::kColumns)
          Tile::move(here, row_bytes, there, dims_[0].stride, Tile::kRows, Tile::kColumns);
        else Tile::move(here, row_bytes, there, dims_[0].stride, rows, columns);
      }
    }
  }

  template <bool kReads, class Element>
  struct TileOf {
    static constexpr size_t kColumns = kLine / sizeof(Element);
    static constexpr size_t kRows = 2 * kColumns;  // caches fetch lines by pairs, too

    [[gnu::always_inline]] static void move(std::byte* dense, size_t row_bytes, std::byte* apart,
                                            int64_t stride, size_t rows, size_t columns) {
      alignas(kLine) Element tile[kRows][kColumns];
      if (!kReads)
        for (size_t i = 0; i < rows; ++i)
          std::memcpy(tile[i], dense + i * row_bytes, columns * sizeof(Element));
      for (size_t j = 0; j < columns; ++j) {
        alignas(kLine) Element column[kRows];
        std::byte* const at = apart + int64_t(j) * stride;
        for (size_t ahead = 0; ahead < 2 * kLine; ahead += kLine)  // no address is too far for it
          __builtin_prefetch(at + int64_t(kColumns) * stride + ahead, !kReads);
        if (kReads) std::memcpy(column, at, rows * sizeof(Element));
        for (size_t i = 0; i < rows; ++i) {
          if (kReads) tile[i][j] = column[i];
          else column[i] = tile[i][j];
        }
        if (!kReads) std::memcpy(at, column, rows * sizeof(Element));
      }
      if (kReads)
        for (size_t i = 0; i < rows; ++i)
          std::memcpy(dense + i * row_bytes, tile[i], columns * sizeof(Element));
    }
  };

  template <bool kReads>
  static void copy(std::byte* dense, std::byte* apart, size_t num_bytes) {
    if (kReads) std::memcpy(dense, apart, num_bytes);
    else std::memcpy(apart, dense, num_bytes);
  }

  std::byte* ptr_;
  size_t elem_bytes_;
  int num_dims_;                     // 2 at least
  std::array<Dim, kMostDims> dims_;  // the innermost first
};

// What a call reads and writes; the same, if it works in place.
struct StridedPair {
  Strided input, output;
};

}  // namespace fastcoll
