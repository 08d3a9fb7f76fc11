// Hands the CUDA ops to torch's dispatcher. A schema is the signature of the op's reference
// in tpengine/ops; ops without a kernel here run as their plain-torch reference. None of this has
// run on a GPU yet.
#include "launch.h"

namespace tpengine::cuda {
namespace {

struct Registration {
  Registration() {
    TorchLibraryHandle library = nullptr;  // lives as long as the process
    TPENGINE_SHIM(
        aoti_torch_library_init_impl("tpengine", "CUDA", "bindings.cu", __LINE__, &library));
    register_attention(library);
    register_cache(library);
    register_fused(library);
    register_lora(library);
    register_quantized(library);
    register_sampling(library);
  }
} registration;

}  // namespace
}  // namespace tpengine::cuda
