// Which level of instruction set this processor has, and whether the system lets us use it.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tinyloop {

// The matrix unit's registers are large; Linux wants to be asked before a process uses them.
inline bool may_use_amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, INT8 = 1u << 25;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILES) || !(d & INT8)) return false;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

inline const char* best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "plain";
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!wide) return "avx2";
  unsigned a, b, c, d;
  if (!__builtin_cpu_supports("avx512vnni")) return "avx512";
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return "avx512";
  return may_use_amx() ? "amx" : "bf16";
#else
  return "plain";
#endif
}

}  // namespace tinyloop
