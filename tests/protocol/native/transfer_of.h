// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "cpu/transfer.h"

template <class T>
std::span<std::byte> bytes_of(std::vector<T>& elements) {
  return std::as_writable_bytes(std::span(elements));
}

// A send or a receive of these bytes, with tag 0.
inline std::shared_ptr<fastcoll::Transfer> transfer_of(bool sends, int peer, fastcoll::DType dtype,
                                                       std::span<std::byte> data,
                                                       double timeout_s = 60) {
  auto one = std::make_shared<fastcoll::Transfer>();
  one->sends = sends;
  one->peer = peer;
  one->dtype = dtype;
  one->numel = data.size() / fastcoll::dtype_size(dtype);
  one->num_bytes = data.size();
  one->data = data.data();
  one->timeout_s = timeout_s;
  return one;
}
