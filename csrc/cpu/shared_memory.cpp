// The segment's plain C functions, called through ctypes, which lets go of Python's lock while a
// rank waits.
#include "shared_memory.h"

#include <new>

#define TPENGINE_EXPORT extern "C" __attribute__((visibility("default")))
using tpengine::cpu::Segment;

// Bytes of a segment whose slots hold `capacity` bytes, a multiple of 4096; 0: too many ranks.
TPENGINE_EXPORT int64_t tpengine_shm_size(int32_t world, int64_t capacity) {
  if (world < 1 || world > tpengine::cpu::kMaxRanks || capacity % tpengine::cpu::kPage) return 0;
  return tpengine::cpu::slots_offset(world) + 2 * (int64_t{world} + 1) * capacity;
}

// Maps the file and marks this rank as alive. Takes `fd` over if it succeeds. Null: see errno.
TPENGINE_EXPORT Segment* tpengine_shm_attach(int32_t fd, int32_t rank, int32_t world,
                                             int64_t capacity) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(fd, F_OFD_SETLK, &lock) != 0) return nullptr;
  const int64_t size = tpengine_shm_size(world, capacity);
  const int flags = MAP_SHARED | MAP_POPULATE;
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) return nullptr;
  return new (std::nothrow) Segment(static_cast<uint8_t*>(base), size, fd, rank, world, capacity);
}

TPENGINE_EXPORT void tpengine_shm_detach(Segment* segment) { delete segment; }

// dtype 0: float32, 1: bfloat16, summed in float32. In place. Returns 0, or the status of the
// failure, which tpengine_shm_failure describes; then the segment is of no use any more.
TPENGINE_EXPORT int32_t tpengine_shm_all_reduce(Segment* segment, void* data, int64_t count,
                                                int32_t dtype, int64_t timeout_ns) {
  using tpengine::cpu::DType;
  if (segment == nullptr) return tpengine::cpu::kClosed;
  return segment->all_reduce(static_cast<uint8_t*>(data), count,
                             dtype == 0 ? DType::kFloat32 : DType::kBFloat16, timeout_ns);
}

// x [rows, row_bytes] of each rank to out [rows, world * row_bytes] on rank `root`, or on all
// ranks if that is negative; elsewhere `out` is null.
TPENGINE_EXPORT int32_t tpengine_shm_gather(Segment* segment, void* out, const void* x,
                                            int64_t rows, int64_t row_bytes, int32_t root,
                                            int64_t timeout_ns) {
  if (segment == nullptr) return tpengine::cpu::kClosed;
  return segment->gather(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(x), rows,
                         row_bytes, root, timeout_ns);
}

TPENGINE_EXPORT int32_t tpengine_shm_broadcast(Segment* segment, void* data, int64_t bytes,
                                               int32_t root, int64_t timeout_ns) {
  if (segment == nullptr) return tpengine::cpu::kClosed;
  return segment->broadcast(static_cast<uint8_t*>(data), bytes, root, timeout_ns);
}

// Ends all present and future waits of every rank; culprit: the failed rank, or -1.
TPENGINE_EXPORT void tpengine_shm_abandon(Segment* segment, int32_t culprit) {
  if (segment != nullptr) segment->abandon(culprit);
}

// (status, rank, culprit, what the peer contributed): 24 bytes, the last eight aligned.
TPENGINE_EXPORT const void* tpengine_shm_failure(const Segment* segment) {
  return &segment->failure();
}
