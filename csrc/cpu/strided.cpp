// SPDX-License-Identifier: Apache-2.0
// Copies of strided tensors. They stand in a file apart from the protocol, which is compiled as
// one: code beside the smallest calls slows them.
#include "cpu/strided.h"

#include <algorithm>
#include <cstring>

#include "cpu/copy.h"

namespace fastcoll {

// Copies of elements, between a strided tensor and dense memory.
class StridedMove {
  struct Wide {
    uint64_t halves[2];
  };
  static constexpr size_t kLine = 64;

 public:
  explicit StridedMove(const Strided& of) : of_(of) {}

  // `dense` is written if kReads, else read.
  template <bool kReads>
  void move(std::byte* dense, size_t start, size_t numel) const {
    switch (of_.elem_bytes_) {
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

 private:
  // Plane by plane. A plane has the two innermost dimensions: rows, and the elements of a row.
  template <bool kReads, class Element>
  void move_elements(std::byte* dense, size_t start, size_t numel) const {
    const size_t row_numel = of_.dims_[0].size, plane_numel = row_numel * of_.dims_[1].size;
    while (numel != 0) {
      const size_t in_plane = start % plane_numel;
      std::byte* row =
          plane(start / plane_numel) + int64_t(in_plane / row_numel) * of_.dims_[1].stride;
      const size_t column = in_plane % row_numel;
      const size_t num_rows = column == 0 ? std::min(numel, plane_numel - in_plane) / row_numel : 0;
      size_t moved = num_rows * row_numel;
      if (num_rows != 0) {
        move_rows<kReads, Element>(dense, row, num_rows);
      } else {  // part of a row
        moved = std::min(numel, row_numel - column);
        move_row<kReads, Element>(dense, row + int64_t(column) * of_.dims_[0].stride, moved);
      }
      dense += moved * sizeof(Element);
      start += moved;
      numel -= moved;
    }
  }

  std::byte* plane(size_t number) const {
    std::byte* at = of_.ptr_;
    for (int i = 2; i < of_.num_dims_ && number != 0; ++i) {
      at += int64_t(number % of_.dims_[i].size) * of_.dims_[i].stride;
      number /= of_.dims_[i].size;
    }
    return at;
  }

  template <bool kReads, class Element>
  void move_row(std::byte* dense, std::byte* apart, size_t numel) const {
    const int64_t stride = of_.dims_[0].stride;
    if (stride == int64_t(sizeof(Element)))
      return copy<kReads>(dense, apart, numel * sizeof(Element));
    for (size_t i = 0; i < numel; ++i)
      copy<kReads>(dense + i * sizeof(Element), apart + int64_t(i) * stride, sizeof(Element));
  }

  template <bool kReads, class Element>
  void move_rows(std::byte* dense, std::byte* apart, size_t num_rows) const {
    const size_t row_numel = of_.dims_[0].size, row_bytes = row_numel * sizeof(Element);
    if (!pays_by_tiles<Element>(num_rows)) {
      for (size_t row = 0; row < num_rows; ++row)
        move_row<kReads, Element>(dense + row * row_bytes,
                                  apart + int64_t(row) * of_.dims_[1].stride, row_numel);
      return;
    }
    using Tile = TileOf<kReads, Element>;
    for (size_t row = 0; row < num_rows; row += Tile::kRows) {
      const size_t rows = std::min(Tile::kRows, num_rows - row);
      for (size_t column = 0; column < row_numel; column += Tile::kColumns) {
        std::byte* const here = dense + row * row_bytes + column * sizeof(Element);
        std::byte* const there =
            apart + row * sizeof(Element) + int64_t(column) * of_.dims_[0].stride;
        const size_t columns = std::min(Tile::kColumns, row_numel - column);
        if (rows == Tile::kRows && columns == Tile::kColumns)
          Tile::move(here, row_bytes, there, of_.dims_[0].stride, Tile::kRows, Tile::kColumns);
        else Tile::move(here, row_bytes, there, of_.dims_[0].stride, rows, columns);
      }
    }
  }

  // Transposed: neighbours in memory are of different rows. By tiles a cache line is visited once,
  // on both sides. Measured from 16 KiB to 64 MiB, 2 ranks: row by row is quicker while a row
  // touches few lines, or lines beside each other. It is quicker, too, where few rows share a line.
  template <class Element>
  bool pays_by_tiles(size_t num_rows) const {
    constexpr size_t kFewLines = 8, kFewRows = 4;
    constexpr int64_t kNear = 2 * int64_t(kLine);
    const int64_t stride = of_.dims_[0].stride;
    return of_.dims_[1].stride == int64_t(sizeof(Element)) && num_rows >= kFewRows &&
           of_.dims_[0].size > kFewLines && (stride > kNear || stride < -kNear);
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
    if (kReads) copy_bytes(dense, apart, num_bytes);
    else copy_bytes(apart, dense, num_bytes);
  }

  const Strided& of_;
};

void Strided::read(std::byte* to, size_t start, size_t numel) const {
  StridedMove(*this).move<true>(to, start, numel);
}

void Strided::write(size_t start, const std::byte* from, size_t numel) const {
  StridedMove(*this).move<false>(const_cast<std::byte*>(from), start, numel);
}

}  // namespace fastcoll
