// SPDX-License-Identifier: Apache-2.0
// The part of XLA's C interface for foreign functions that a handler needs. The layout is that of
// xla/ffi/api/c_api.h (OpenXLA), which jaxlib installs; it is declared here, so that a build of
// fastcoll needs no JAX.
//
// XLA promises a stable binary interface. Each struct begins with its size and grows at its end
// only, so code for an old version reads a new one. A handler names its version when it is
// registered, and XLA refuses one that is too old for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastcoll::xla {

inline constexpr int kMajor = 0, kMinor = 1;  // all that stands here is in that version

struct Error;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int kMetadata = 1;

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct ErrorArgs {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};
// Of absl's status codes.
enum Code {
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal;
  Error* (*create_error)(ErrorArgs* args);  // it goes to XLA with the return
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
inline constexpr int kToken = 17;  // the dtype of a token, which has no elements

struct Buffers {  // arguments or results
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  void** items;
};
inline constexpr int kIsBuffer = 1;  // of Buffers::types

struct Array {
  int dtype;
  size_t size;
  void* data;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  void** names;
  void** items;
};
inline constexpr int kIsArray = 1;  // of Attributes::types
inline constexpr int kInt64 = 5;    // of Array::dtype

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};
inline constexpr int kExecute = 3;  // of CallFrame::stage

using Handler = Error*(CallFrame* frame);

}  // namespace fastcoll::xla
