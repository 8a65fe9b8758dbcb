#include "error.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace eyas::cpu {
namespace {

thread_local eyas_cpu_error last_error{};

void copy_text(char* to, std::size_t size, const char* from) {
  const std::size_t length = std::min(std::strlen(from), size - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

}  // namespace

void set_last_error(const eyas_cpu_error& error) { last_error = error; }

void set_last_error(int32_t code, const char* argument, const char* found, const char* wanted) {
  last_error.code = code;
  copy_text(last_error.argument, sizeof last_error.argument, argument);
  copy_text(last_error.found, sizeof last_error.found, found);
  copy_text(last_error.wanted, sizeof last_error.wanted, wanted);
}

void refuse(int32_t code, const char* argument, const char* text, ...) {
  char both[sizeof(eyas_cpu_error::found) + sizeof(eyas_cpu_error::wanted)];
  va_list values;
  va_start(values, text);
  std::vsnprintf(both, sizeof both, text, values);
  va_end(values);
  char* bar = std::strchr(both, '|');
  if (bar != nullptr) *bar = '\0';
  Refusal refusal;
  refusal.error.code = code;
  copy_text(refusal.error.argument, sizeof refusal.error.argument, argument);
  copy_text(refusal.error.found, sizeof refusal.error.found, both);
  copy_text(refusal.error.wanted, sizeof refusal.error.wanted, bar == nullptr ? "" : bar + 1);
  throw refusal;
}

}  // namespace eyas::cpu

extern "C" {

int32_t eyas_cpu_abi(void) { return EYAS_CPU_ABI; }

const eyas_cpu_error* eyas_cpu_last_error(void) { return &eyas::cpu::last_error; }
}
