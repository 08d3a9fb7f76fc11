// Launcher: embedding, which copies rows, or multiplies them by a factor.
#include "launch.h"

namespace tpengine::cpu {
namespace {

void embedding(const Tensor& out, const Tensor& table, const Tensor& token_ids, double scale,
               const Optional<int64_t>& first) {
  const char* op = "embedding";
  const DType dtype = element_type(op, "table", table);
  const int64_t element = bytes_of(dtype);
  check_shape(op, "table", table, {kAnySize, kAnySize}, 1);
  const int64_t num_rows = table.size(0), size = table.size(1);
  const int64_t count = token_ids.size(0);
  check_token_ids(op, token_ids, count, num_rows, first);
  check_tensor(op, "out", out, table.dtype(), {count, size}, 1);
  const int32_t* ids = token_ids.data<int32_t>();
  const int64_t start = first ? *first : 0;
  char* to = out.data<char>();
  const char* from = table.data<char>();
  const int64_t to_stride = out.stride(0) * element, from_stride = table.stride(0) * element;
  parallel_for(count, row_grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* row = to + i * to_stride;
      const int64_t id = ids[i] - start;
      const char* source = from + id * from_stride;
      if (id < 0 || id >= num_rows)
        std::memset(row, 0, static_cast<size_t>(size * element));
      else if (scale == 1.0)
        std::memcpy(row, source, static_cast<size_t>(size * element));
      else
        kernels().scale_row(dtype, row, source, size, static_cast<float>(scale));
    }
  });
}

}  // namespace

void register_embedding(TorchLibraryHandle library) { implement<&embedding>(library, "embedding"); }

}  // namespace tpengine::cpu
