// SPDX-License-Identifier: Apache-2.0
// Events and streams of the made-up CUDA (fake_cuda.cpp): nothing runs there, but all is noted.
#pragma once

#include <cuda_runtime_api.h>

cudaError_t use_context();  // of fake_cuda.cpp: this thread's, which is made if there is none
void note_launch(cudaStream_t stream);
