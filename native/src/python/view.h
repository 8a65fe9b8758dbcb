// Arrays as they arrive from Python, and the check of their shapes and types against one another.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "eyas/cpu_api.h"

namespace eyas::python {

namespace py = pybind11;

// eyas_native/arrays.py has the same list; the first three are the ABI's EYAS_CPU_FP32, BF16, FP16.
enum Dtype : uint32_t { kFp32, kBf16, kFp16, kI32, kI64, kU8, kBool, kI16, kU16, kU32, kU64, kE4m3, kNumDtypes };
constexpr uint32_t of(Dtype dtype) { return 1u << dtype; }
constexpr uint32_t kFloat = of(kFp32) | of(kBf16) | of(kFp16);
constexpr uint32_t kInt = of(kI32) | of(kI64);
constexpr uint32_t kFlags = of(kBool) | of(kU8);

// One array: (address, dtype, shape, strides in elements), as eyas_native.arrays.view() makes it.
struct View {
  static constexpr int kMaxDims = 4;

  View() = default;
  explicit View(const py::handle& described);

  int64_t elements() const;
  int64_t bytes() const;
  template <class T = void>
  T* data() const { return reinterpret_cast<T*>(address); }
  bool present() const { return dtype < kNumDtypes; }

  uint64_t address = 0;
  uint32_t dtype = kNumDtypes;
  int dims = 0;
  int64_t shape[kMaxDims] = {}, stride[kMaxDims] = {};
};

// A refused argument; becomes eyas_native.errors.ArgumentError.
struct ArgumentError : std::runtime_error {
  ArgumentError(std::string where, std::string found, std::string wanted)
      : std::runtime_error(where + ": " + found), where(std::move(where)), found(std::move(found)),
        wanted(std::move(wanted)) {}
  std::string where, found, wanted;
};

void register_errors(py::module_& module);
// Throws what the library said, for any code but EYAS_CPU_OK.
void raise_on_error(int32_t code);

enum class Layout { kDense, kRows };  // all axes contiguous, or only the last one

// Shapes are written once, one letter an axis ("THD"); a letter means the same size wherever it appears. All mismatches
// are collected, then thrown together by done(). Names must outlive it.
class Shapes {
 public:
  void fix(char letter, int64_t size, const char* by);
  void match(const View& view, const char* name, const char* letters, uint32_t dtypes, Layout layout = Layout::kDense);
  void same_dtype(const View& a, const char* a_name, const View& b, const char* b_name);
  void require(bool holds, const char* name, std::string found, std::string wanted);
  int64_t operator[](char letter) const;
  void done() const;

 private:
  struct Size {
    int64_t value = -1;
    const char* by = "";
  };
  struct Problem {
    std::string where, found, wanted;
  };
  Size& size_of(char letter) { return sizes_[letter - 'A']; }

  Size sizes_['z' - 'A' + 1];
  std::vector<Problem> problems_;
};

void register_tree(py::module_& module);
void register_attention(py::module_& module);
void register_memory(py::module_& module);

}  // namespace eyas::python
