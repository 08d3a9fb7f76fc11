/* Whether this process may use AMX's tiles: Linux (5.16 and later) gives their registers only to a
   process that asks, and a hypervisor may hide them. Plain C: the build's probe includes it too. */
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

static inline int may_use_tiles(void) {
#if defined(SYS_arch_prctl)
  enum { kAskForState = 0x1023, kTileData = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return 0;
#endif
}
