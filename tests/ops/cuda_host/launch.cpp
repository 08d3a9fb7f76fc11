// What the launchers say of CUDA's errors, for ctypes.
#define TPENGINE_CUDA_HOST
#include "launch.h"

// The message after a launch which leaves `error`; empty: none.
extern "C" const char* message_of(int error) {
  static std::string message;
  message.clear();
  cuda_host::last_error = static_cast<cudaError_t>(error);
  try {
    tpengine::cuda::check_launch("argmax");
  } catch (const std::exception& thrown) {
    message = thrown.what();
  }
  return message.c_str();
}
