// The error of this thread, and the wall that keeps exceptions inside the library.
#pragma once

#include <cstdarg>
#include <exception>
#include <new>

#include "eyas/cpu_api.h"

namespace eyas::cpu {

// Thrown inside the library only; `guarded` turns it into a code and the thread's error text.
struct Refusal : std::exception {
  eyas_cpu_error error{};
};

// `text` is "found|wanted" in printf form: what is there, then what should be and who wants it.
[[noreturn]] void refuse(int32_t code, const char* argument, const char* text, ...) __attribute__((format(printf, 3, 4)));

void set_last_error(const eyas_cpu_error& error);
void set_last_error(int32_t code, const char* argument, const char* found, const char* wanted);

template <class Args>
void check_struct(const Args* args, const char* name) {
  if (args == nullptr || args->struct_size != sizeof(Args))
    refuse(EYAS_CPU_BAD_ARGUMENT, name, "struct_size %u|%zu, the size this library was built with",
           args == nullptr ? 0u : args->struct_size, sizeof(Args));
}

template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return EYAS_CPU_OK;
  } catch (const Refusal& refusal) {
    set_last_error(refusal.error);
    return refusal.error.code;
  } catch (const std::bad_alloc&) {
    set_last_error(EYAS_CPU_NO_MEMORY, "workspace", "the allocation failed", "memory for the call's scratch");
    return EYAS_CPU_NO_MEMORY;
  } catch (const std::exception& other) {
    set_last_error(EYAS_CPU_INTERNAL, "library", other.what(), "no failure; please report this");
    return EYAS_CPU_INTERNAL;
  }
}

}  // namespace eyas::cpu
