// Which instruction set is used: the best that runs here, unless the environment names one.
#include "kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "error.h"

namespace eyas::cpu {
namespace {

const Kernels* const all_kernels[] = {
#ifdef EYAS_X86
    &amx_bf16_kernels, &avx512_bf16_kernels, &avx512_kernels, &avx2_kernels,
#endif
    &scalar_kernels,
};

const std::string& runnable() {
  static const std::string names = [] {
    std::string list;
    for (const Kernels* set : all_kernels)
      if (set->runs_here()) list += (list.empty() ? "" : ",") + std::string(set->name);
    return list;
  }();
  return names;
}

const Kernels* find(const char* name) {
  for (const Kernels* set : all_kernels)
    if (set->runs_here() && (name == nullptr || *name == '\0' || std::strcmp(name, set->name) == 0)) return set;
  return nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels* choose(const char* name, const char* argument) {
  const Kernels* set = find(name);
  if (set == nullptr)
    refuse(EYAS_CPU_BAD_ARGUMENT, argument, "%s|one of %s, which this machine runs", name, runnable().c_str());
  return set;
}

}  // namespace

const Kernels& kernels() {
  const Kernels* set = chosen.load(std::memory_order_acquire);
  if (set == nullptr) {
    set = choose(std::getenv("EYAS_NATIVE_ISA"), "EYAS_NATIVE_ISA");
    chosen.store(set, std::memory_order_release);
  }
  return *set;
}

}  // namespace eyas::cpu

extern "C" {

const char* eyas_cpu_isas(void) { return eyas::cpu::runnable().c_str(); }

const char* eyas_cpu_isa(void) {
  const char* name = nullptr;
  eyas::cpu::guarded([&] { name = eyas::cpu::kernels().name; });
  return name;
}

int32_t eyas_cpu_set_isa(const char* name) {
  return eyas::cpu::guarded([&] {
    const bool named = name != nullptr && *name != '\0';
    eyas::cpu::chosen.store(named ? eyas::cpu::choose(name, "isa") : nullptr, std::memory_order_release);
  });
}
}
