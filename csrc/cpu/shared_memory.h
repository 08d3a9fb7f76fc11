// Collectives between the CPU ranks of one host, over a segment of shared memory.
//
// The caller has created the file, has allocated all of it, and makes sure that every rank attaches
// before the first operation. All ranks call the same operations in the same order; each rank uses
// a segment from one thread.
//
// Each operation (each chunk of a long one) has a number. A rank that posts number s states: my
// contribution to s is in my slot, and I have read all of s - 1. There are two slots per rank, used
// by the parity of s. A rank writes for s only after all ranks have posted s - 1, so all have
// finished s - 2, which used the same slot. A rank never waits longer than that for readers, so a
// broadcast or a gather costs its sender no round trip.
//
// A wait spins for a short time, then sleeps on the peer's counter (futex). At intervals it checks
// whether a rank has abandoned the group, whether the peer's process lives, and whether the time is
// over. For the second check every rank holds a lock on its byte of the file, which the kernel
// releases when the process dies; unlike a process id, it means the same in all namespaces.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>

#include "kernels.h"

namespace tpengine::cpu {

constexpr int64_t kPage = 4096;
constexpr int32_t kMaxRanks = 64;
// About as long as it takes to wake a thread. A wait never yields: where other programs want the
// core too, that gives it away for milliseconds; a thread that has slept gets it back at once.
constexpr int64_t kSpinNs = 20'000;
constexpr int64_t kFirstLookNs = 5'000'000;
constexpr int64_t kLookNs = 50'000'000;
// From here on each rank sums its part of the elements and all copy the parts together: more
// synchronisation, less reading. With two ranks that never pays.
constexpr int64_t kDividedSumBytes = 32768;

enum Status : int32_t { kOk, kTimeout, kDead, kAbandoned, kMismatch, kClosed };
enum Operation : uint64_t { kAllReduce = 1, kGather, kAllGather, kBroadcast };

struct Counter {
  std::atomic<uint64_t> value;  // its low half is the futex
  std::atomic<uint32_t> sleepers;
};

struct alignas(128) Line {  // one rank's; a pair of cache lines, which are prefetched together
  Counter posted;
  Counter reduced;
  uint64_t contribution[2];  // operation and bytes, by parity
};

struct Header {
  char token[64];                   // the caller's, to recognise the file
  std::atomic<uint32_t> abandoned;  // 0, or 1 + leaver + 256 x (1 + culprit, or 0)
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex is the low half");

// What Python gets to know of a failure, after which the segment is of no use any more.
struct Failure {
  int32_t status;
  int32_t rank;     // timeout, dead, mismatch: the peer; abandoned: the rank that left
  int32_t culprit;  // abandoned: the rank because of which it left, or -1
};

inline int64_t round_up(int64_t size) { return (size + kPage - 1) / kPage * kPage; }

inline int64_t slots_offset(int32_t world) {
  return round_up(int64_t{128} + int64_t{sizeof(Line)} * world);
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

inline uint32_t* futex_word(Counter& counter) {
  return reinterpret_cast<uint32_t*>(&counter.value);
}

inline void wake(Counter& counter) {
  syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Segment {
 public:
  Segment(uint8_t* base, int64_t size, int fd, int32_t rank, int32_t world, int64_t capacity)
      : base_(base), size_(size), fd_(fd), rank_(rank), world_(world), capacity_(capacity) {}
  ~Segment() {
    munmap(base_, size_);
    close(fd_);
  }

  bool all_reduce(uint8_t* data, int64_t count, DType dtype, int64_t timeout_ns) {
    const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
    const int64_t step = capacity_ / size;
    for (int64_t first = 0; first < count; first += step) {
      const int64_t part = count - first < step ? count - first : step;
      if (!sum_chunk(data + first * size, part, size, dtype, timeout_ns)) return false;
    }
    return true;
  }

  // `out` null: this rank gets no result. `root` < 0: every rank gets all parts.
  bool gather(uint8_t* out, const uint8_t* x, int64_t rows, int64_t row_bytes, int32_t root,
              int64_t timeout_ns) {
    const int64_t total = rows * row_bytes;
    const Operation operation = root < 0 ? kAllGather : kGather;
    for (int64_t first = 0; first < total; first += capacity_) {
      const int64_t bytes = total - first < capacity_ ? total - first : capacity_;
      if (!begin(timeout_ns)) return false;
      if (root != rank_) std::memcpy(slot(rank_), x + first, bytes);
      post(operation, bytes);
      if (out == nullptr) continue;
      for (int32_t r = 0; r < world_; ++r) {
        if (r != rank_ && !arrived(r)) return false;
        const uint8_t* from = r == rank_ ? x + first : slot(r);
        for (int64_t at = first; at < first + bytes;) {
          const int64_t row = at / row_bytes, column = at % row_bytes;
          const int64_t left = first + bytes - at;
          const int64_t n = row_bytes - column < left ? row_bytes - column : left;
          std::memcpy(out + (row * world_ + r) * row_bytes + column, from + (at - first), n);
          at += n;
        }
      }
    }
    return true;
  }

  bool broadcast(uint8_t* data, int64_t total, int32_t root, int64_t timeout_ns) {
    for (int64_t first = 0; first < total; first += capacity_) {
      const int64_t bytes = total - first < capacity_ ? total - first : capacity_;
      if (!begin(timeout_ns)) return false;
      if (root == rank_) std::memcpy(slot(rank_), data + first, bytes);
      post(kBroadcast, bytes);
      if (root == rank_) continue;
      if (!arrived(root)) return false;
      std::memcpy(data + first, slot(root), bytes);
    }
    return true;
  }

  void abandon(int32_t culprit) {
    uint32_t nobody = 0;
    const uint32_t word =
        1 + static_cast<uint32_t>(rank_) + 256 * static_cast<uint32_t>(culprit + 1);
    if (!header().abandoned.compare_exchange_strong(nobody, word)) return;
    for (int32_t r = 0; r < world_; ++r) {
      wake(line(r).posted);
      wake(line(r).reduced);
    }
  }

  const Failure& failure() const { return failure_; }

 private:
  bool sum_chunk(uint8_t* data, int64_t count, int64_t size, DType dtype, int64_t timeout_ns) {
    if (!begin(timeout_ns)) return false;
    std::memcpy(slot(rank_), data, count * size);
    post(kAllReduce, count * size);
    const void* parts[kMaxRanks];
    for (int32_t r = 0; r < world_; ++r) {
      if (r != rank_ && !arrived(r)) return false;
      parts[r] = slot(r);
    }
    SumArgs args = {dtype, data, parts, world_};
    if (world_ == 2 || count * size < kDividedSumBytes) {
      kernels().sum_parts(args, 0, count);
      return true;
    }
    const int64_t share = ((count + world_ - 1) / world_ + 63) / 64 * 64;
    const int64_t first = share * rank_ < count ? share * rank_ : count;
    const int64_t last = first + share < count ? first + share : count;
    args.out = slot(world_);
    kernels().sum_parts(args, first, last);
    set(line(rank_).reduced, number_);
    for (int32_t r = 0; r < world_; ++r) {
      if (r != rank_ && !wait(line(r).reduced, number_, r)) return false;
    }
    std::memcpy(data, slot(world_), count * size);
    return true;
  }

  // Takes the next number and waits until its slots are free.
  bool begin(int64_t timeout_ns) {
    if (failure_.status != kOk) return false;  // the numbers no longer agree
    timeout_ns_ = timeout_ns;
    deadline_ns_ = 0;
    ++number_;
    for (int32_t r = 0; r < world_; ++r) {
      if (r != rank_ && !wait(line(r).posted, number_ - 1, r)) return false;
    }
    return true;
  }

  void post(Operation operation, int64_t bytes) {
    contribution_ = operation << 56 | static_cast<uint64_t>(bytes);
    line(rank_).contribution[number_ & 1] = contribution_;
    set(line(rank_).posted, number_);
  }

  // Waits for a peer's contribution to the current number.
  bool arrived(int32_t peer) {
    if (!wait(line(peer).posted, number_, peer)) return false;
    const uint64_t theirs = line(peer).contribution[number_ & 1];
    return theirs == contribution_ || fail(kMismatch, peer);
  }

  // Abandons the group, so that the other ranks do not wait for their own timeouts.
  bool fail(Status status, int32_t peer) {
    failure_ = {status, peer, -1};
    abandon(peer);
    return false;
  }

  void set(Counter& counter, uint64_t value) {
    counter.value.store(value);  // sequentially consistent: before the look at the sleepers
    if (counter.sleepers.load() != 0) wake(counter);
  }

  bool wait(Counter& counter, uint64_t target, int32_t peer) {
    const auto is_there = [&] { return counter.value.load(std::memory_order_acquire) >= target; };
    if (is_there()) return true;
    const int64_t start = now_ns();
    if (deadline_ns_ == 0) deadline_ns_ = start + timeout_ns_;  // of the whole operation
    while (now_ns() - start < kSpinNs) {
      for (int i = 0; i < 64; ++i) {
        if (is_there()) return true;
        relax();
      }
    }
    for (int64_t look_ns = kFirstLookNs;; look_ns = kLookNs) {
      const int64_t left = deadline_ns_ - now_ns();
      sleep(counter, target, left < look_ns ? left : look_ns);
      if (is_there()) return true;
      if (fail_if_abandoned()) return false;
      if (!is_alive(peer)) return is_there() || fail(kDead, peer);  // it may have died after that
      if (now_ns() >= deadline_ns_) return fail(kTimeout, peer);
    }
  }

  void sleep(Counter& counter, uint64_t target, int64_t ns) {
    if (ns <= 0) return;
    const timespec duration = {ns / 1'000'000'000, ns % 1'000'000'000};
    counter.sleepers.fetch_add(1);
    const uint64_t seen = counter.value.load();
    if (seen < target && header().abandoned.load() == 0) {
      syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &duration,
              nullptr, 0);
    }
    counter.sleepers.fetch_sub(1);
  }

  bool fail_if_abandoned() {
    const uint32_t word = header().abandoned.load();
    if (word == 0) return false;
    failure_ = {kAbandoned, static_cast<int32_t>(word % 256) - 1,
                static_cast<int32_t>(word / 256) - 1};
    return true;
  }

  bool is_alive(int32_t peer) const {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = peer;
    lock.l_len = 1;
    return fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Line& line(int32_t r) const { return reinterpret_cast<Line*>(base_ + 128)[r]; }
  // The current number's slot of rank r; r = world: the common result.
  uint8_t* slot(int32_t r) const {
    const int64_t index = static_cast<int64_t>(number_ & 1) * (world_ + 1) + r;
    return base_ + slots_offset(world_) + index * capacity_;
  }

  uint8_t* base_;
  int64_t size_;
  int fd_;
  int32_t rank_, world_;
  int64_t capacity_;
  uint64_t number_ = 0;
  uint64_t contribution_ = 0;
  int64_t timeout_ns_ = 0, deadline_ns_ = 0;
  Failure failure_ = {kOk, -1, -1};
};

static_assert(sizeof(Header) <= 128);

// A rank's segment, which any thread may close while another uses it. It outlives the mapping:
// what a recording still calls then fails with kClosed.
class Member {
 public:
  explicit Member(std::unique_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // operation(segment), which returns whether it succeeded.
  template <class F>
  bool run(F operation) {
    const std::lock_guard<std::mutex> in_use(in_use_);
    if (segment_ && operation(*segment_)) return true;
    failure_ = segment_ ? segment_->failure() : Failure{kClosed, -1, -1};
    return false;
  }

  void abandon(int32_t culprit) {
    const std::lock_guard<std::mutex> mapped(unmapping_);
    if (segment_) segment_->abandon(culprit);
  }

  void close() {
    abandon(-1);
    const std::scoped_lock unused(in_use_, unmapping_);
    segment_.reset();
  }

  // Of the last call of `run` that failed; for the thread that made it.
  const Failure& failure() const { return failure_; }

 private:
  std::unique_ptr<Segment> segment_;
  Failure failure_ = {kOk, -1, -1};
  // Either lock keeps the segment mapped. There are two, because `abandon` must not wait for the
  // operation that it ends.
  std::mutex in_use_, unmapping_;
};

}  // namespace tpengine::cpu
