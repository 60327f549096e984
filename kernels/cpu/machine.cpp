// Properties of this machine.
#include "variant.h"

#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

// Returns the name of the best variant that this machine can run.
TK_API const char* tk_variant() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Not every compiler has a name for conversions of fp16 (F16C).
  unsigned a, b, c = 0, d;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && __builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
  if (vnni) return "avx512_vnni";
  if (avx2) return "avx2";
#endif
  return "portable";
}

// Asks for huge pages in [address, address + size). Weights are read from end to end, and reading a
// page of 4 KiB takes half a microsecond.
TK_API void tk_use_huge_pages(void* address, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(address) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + size) / kPage * kPage;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#endif
}
