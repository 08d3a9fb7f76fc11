// Stands in for the virtual memory of CUDA's driver: an allocation is a memfd, and device addresses
// are the host's. Like the driver it refuses what was not made, mapped or made accessible before.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>

namespace {

constexpr int kInvalid = 1, kNoMemory = 2, kRegistered = 712, kNotRegistered = 713;
constexpr size_t kUnit = 2 << 20, kAll = size_t{1} << 36;
constexpr uint64_t kFirstHandle = uint64_t{1} << 40;  // more than fits into an int

std::map<uint64_t, size_t> reserved, registered;
int num_handles = 0;

struct Properties {
  int type, handle_types, location_type, location;
  void* windows;
  unsigned char flags[8];
};

struct Access {
  int location_type, location, flags;
};

bool is_usual(const Properties* wanted) {
  return wanted->type == 1 && wanted->handle_types == 1 && wanted->location_type == 1 &&
         wanted->location == 0 && wanted->windows == nullptr && wanted->flags[0] == 0;
}

int descriptor_of(uint64_t handle) { return static_cast<int>(handle - kFirstHandle); }

int mapped(uint64_t address, size_t size, int protection, int flags, int file) {
  void* place = reinterpret_cast<void*>(address);
  return mmap(place, size, protection, flags | MAP_FIXED, file, 0) == MAP_FAILED ? kInvalid : 0;
}

}  // namespace

extern "C" {

// Handles, reserved addresses and registered memory that were not given back.
int num_left() { return num_handles + static_cast<int>(reserved.size() + registered.size()); }

int cuMemGetAllocationGranularity(size_t* unit, const Properties* wanted, int option) {
  *unit = kUnit;
  return is_usual(wanted) && option == 0 ? 0 : kInvalid;
}

int cuMemCreate(uint64_t* handle, size_t size, const Properties* wanted, uint64_t flags) {
  if (!is_usual(wanted) || flags != 0 || size == 0 || size % kUnit != 0) return kInvalid;
  if (size > kAll) return kNoMemory;
  const int file = memfd_create("device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return kNoMemory;
  *handle = kFirstHandle + static_cast<uint64_t>(file);
  ++num_handles;
  return 0;
}

int cuMemExportToShareableHandle(int* file, uint64_t handle, int kind, uint64_t flags) {
  if (kind != 1 || flags != 0) return kInvalid;
  *file = fcntl(descriptor_of(handle), F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? kInvalid : 0;
}

int cuMemImportFromShareableHandle(uint64_t* handle, void* file, int kind) {
  const int own = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(file)), F_DUPFD_CLOEXEC, 0);
  if (kind != 1 || own < 0) return kInvalid;
  *handle = kFirstHandle + static_cast<uint64_t>(own);
  ++num_handles;
  return 0;
}

int cuMemRelease(uint64_t handle) {
  --num_handles;
  return close(descriptor_of(handle)) == 0 ? 0 : kInvalid;
}

int cuMemAddressReserve(uint64_t* address, size_t size, size_t, uint64_t, uint64_t) {
  void* place = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kNoMemory;
  *address = reinterpret_cast<uint64_t>(place);
  reserved[*address] = size;
  return 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  struct stat held;
  if (fstat(descriptor_of(handle), &held) != 0 || static_cast<size_t>(held.st_size) != size ||
      offset != 0 || flags != 0 || reserved.count(address) == 0) {
    return kInvalid;
  }
  return mapped(address, size, PROT_NONE, MAP_SHARED, descriptor_of(handle));
}

int cuMemSetAccess(uint64_t address, size_t size, const Access* access, size_t count) {
  if (count != 1 || access->location_type != 1 || access->location != 0 || access->flags != 3) {
    return kInvalid;
  }
  void* place = reinterpret_cast<void*>(address);
  return mprotect(place, size, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalid;
}

int cuMemUnmap(uint64_t address, size_t size) {
  if (reserved.count(address) == 0 || reserved[address] != size) return kInvalid;
  return mapped(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}

int cuMemAddressFree(uint64_t address, size_t size) {
  if (reserved.erase(address) == 0) return kInvalid;
  return munmap(reinterpret_cast<void*>(address), size) == 0 ? 0 : kInvalid;
}

int cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
  const bool is_new = registered.emplace(reinterpret_cast<uint64_t>(memory), size).second;
  return flags != 0 ? kInvalid : is_new ? 0 : kRegistered;
}

int cuMemHostUnregister(void* memory) {
  return registered.erase(reinterpret_cast<uint64_t>(memory)) ? 0 : kNotRegistered;
}

}  // extern "C"
