// The segment's plain C functions, called through ctypes, which lets go of Python's lock while a
// rank waits. Operations return whether they succeeded, else tpengine_shm_failure says why. Where
// the thread records, they are noted.
#include "shared_memory.h"

#include "recording.h"

#define TPENGINE_EXPORT extern "C" __attribute__((visibility("default")))
using tpengine::cpu::Member;
using tpengine::cpu::Segment;

namespace {

// operation(segment, size); recorded, `size` follows the number of rows.
template <class F>
bool run_or_note(Member* member, int64_t size, F operation) {
  const auto call = [=](int64_t own_size) {
    return member->run([&](Segment& segment) { return operation(segment, own_size); });
  };
  auto* recording = tpengine::cpu::Recording::current();
  if (recording == nullptr) return call(size);
  recording->note_sized(size, call);
  return true;
}

}  // namespace

// Bytes of a segment whose slots hold `capacity` bytes, a multiple of 4096; 0: too many ranks.
TPENGINE_EXPORT int64_t tpengine_shm_size(int32_t world, int64_t capacity) {
  if (world < 1 || world > tpengine::cpu::kMaxRanks || capacity % tpengine::cpu::kPage) return 0;
  return tpengine::cpu::slots_offset(world) + 2 * (int64_t{world} + 1) * capacity;
}

// Maps the file and marks this rank as alive. Takes `fd` over if it succeeds. Null: see errno.
TPENGINE_EXPORT Member* tpengine_shm_attach(int32_t fd, int32_t rank, int32_t world,
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
  auto* first = static_cast<uint8_t*>(base);
  return new Member(std::make_unique<Segment>(first, size, fd, rank, world, capacity));
}

// Ends all waits and unmaps the segment; operations fail from now on.
TPENGINE_EXPORT void tpengine_shm_close(Member* member) { member->close(); }

TPENGINE_EXPORT void tpengine_shm_delete(Member* member) { delete member; }

// dtype 0: float32, 1: bfloat16, summed in float32. In place.
TPENGINE_EXPORT bool tpengine_shm_all_reduce(Member* member, void* data, int64_t count,
                                             int32_t dtype, int64_t timeout_ns) {
  using tpengine::cpu::DType;
  const DType type = dtype == 0 ? DType::kFloat32 : DType::kBFloat16;
  return run_or_note(member, count, [=](Segment& segment, int64_t own_count) {
    return segment.all_reduce(static_cast<uint8_t*>(data), own_count, type, timeout_ns);
  });
}

// x [rows, row_bytes] of each rank to out [rows, world * row_bytes] on rank `root`, or on all
// ranks if that is negative; elsewhere `out` is null.
TPENGINE_EXPORT bool tpengine_shm_gather(Member* member, void* out, const void* x, int64_t rows,
                                         int64_t row_bytes, int32_t root, int64_t timeout_ns) {
  return run_or_note(member, rows, [=](Segment& segment, int64_t own_rows) {
    return segment.gather(static_cast<uint8_t*>(out), static_cast<const uint8_t*>(x), own_rows,
                          row_bytes, root, timeout_ns);
  });
}

TPENGINE_EXPORT bool tpengine_shm_broadcast(Member* member, void* data, int64_t bytes, int32_t root,
                                            int64_t timeout_ns) {
  return run_or_note(member, bytes, [=](Segment& segment, int64_t own_bytes) {
    return segment.broadcast(static_cast<uint8_t*>(data), own_bytes, root, timeout_ns);
  });
}

// Ends all present and future waits of every rank; culprit: the failed rank, or -1.
TPENGINE_EXPORT void tpengine_shm_abandon(Member* member, int32_t culprit) {
  member->abandon(culprit);
}

// (status, rank, culprit) of this thread's last operation, which failed.
TPENGINE_EXPORT const void* tpengine_shm_failure(const Member* member) {
  return &member->failure();
}
