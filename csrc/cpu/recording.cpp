// Plain C functions over recordings, for Python's ctypes: the interpreter's lock is free while one
// runs.
#include "recording.h"

#include <cstdio>

using tpengine::cpu::Recording;

#define TPENGINE_EXPORT extern "C" __attribute__((visibility("default")))

TPENGINE_EXPORT Recording* tpengine_recording_new(int64_t num_rows) {
  return new Recording(num_rows);
}

TPENGINE_EXPORT void tpengine_recording_delete(Recording* recording) { delete recording; }

TPENGINE_EXPORT void tpengine_recording_declare_rows(Recording* recording, const void* begin,
                                                     int64_t num_bytes) {
  recording->declare_rows(begin, num_bytes);
}

// From here on this thread's calls are noted there; null: they are run.
TPENGINE_EXPORT void tpengine_recording_select(Recording* recording) {
  Recording::current() = recording;
}

TPENGINE_EXPORT int64_t tpengine_recording_num_calls(const Recording* recording) {
  return recording->num_calls();
}

// -1: all calls have run; -2: an op refused its arguments, as `error` says; else the number of the
// call that failed.
TPENGINE_EXPORT int64_t tpengine_recording_run(const Recording* recording, int64_t num_rows,
                                               char* error, int64_t error_size) {
  try {
    return recording->run(num_rows);
  } catch (const std::exception& exception) {
    std::snprintf(error, static_cast<size_t>(error_size), "%s", exception.what());
    return -2;
  }
}
