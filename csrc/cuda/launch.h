// Launching on a device that need not be the current one.
#pragma once

#include <cuda_runtime.h>

namespace fc {

// Calls launch() -> cudaError_t with `device` current. Returns null, or the CUDA runtime's words for what went wrong.
template <class Launch>
const char* on_device(int device, const Launch& launch) {
  int current = 0;
  cudaError_t status = cudaGetDevice(&current);
  if (status == cudaSuccess && current != device) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = launch();
  if (current != device) cudaSetDevice(current);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace fc
