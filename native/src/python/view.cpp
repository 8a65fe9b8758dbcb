#include "view.h"

namespace eyas::python {
namespace {

const char* const kDtypeNames[kNumDtypes] = {"float32", "bfloat16", "float16", "int32",  "int64", "uint8",
                                             "bool",    "int16",    "uint16",  "uint32", "uint64", "float8_e4m3fn"};
constexpr int64_t kDtypeBytes[kNumDtypes] = {4, 2, 2, 4, 8, 1, 1, 2, 2, 4, 8, 1};

std::string shape_text(const View& view) {
  std::string text = "[";
  for (int i = 0; i < view.dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(view.shape[i]);
  return text + "]";
}

std::string dtypes_text(uint32_t dtypes) {
  std::string text;
  for (uint32_t i = 0; i < kNumDtypes; ++i)
    if ((dtypes >> i & 1u) != 0) text += (text.empty() ? "" : " or ") + std::string(kDtypeNames[i]);
  return text;
}

bool contiguous(const View& view, Layout layout) {
  if (view.elements() == 0) return true;
  int64_t expected = 1;
  for (int i = view.dims - 1; i >= 0; --i) {
    if (view.shape[i] > 1 && view.stride[i] != expected) return false;
    if (layout == Layout::kRows) return true;
    expected *= view.shape[i];
  }
  return true;
}

}  // namespace

View::View(const py::handle& described) {
  if (described.is_none()) return;
  // The plain C API: this runs for every argument of every call.
  const auto item = [](PyObject* tuple, Py_ssize_t i) { return PyTuple_GET_ITEM(tuple, i); };
  PyObject* const fields = described.ptr();
  PyObject *const shapes = item(fields, 2), *const strides = item(fields, 3);
  address = PyLong_AsUnsignedLongLong(item(fields, 0));
  dtype = static_cast<uint32_t>(PyLong_AsLong(item(fields, 1)));
  dims = static_cast<int>(PyTuple_GET_SIZE(shapes));
  for (int i = 0; i < dims && i < kMaxDims; ++i) {
    shape[i] = PyLong_AsLongLong(item(shapes, i));
    stride[i] = PyLong_AsLongLong(item(strides, i));
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

int64_t View::elements() const {
  int64_t count = 1;
  for (int i = 0; i < dims; ++i) count *= shape[i];
  return count;
}

int64_t View::bytes() const { return elements() * kDtypeBytes[dtype]; }

void Shapes::fix(char letter, int64_t size, const char* by) { size_of(letter) = {size, by}; }

void Shapes::match(const View& view, const char* name, const char* letters, uint32_t dtypes, Layout layout) {
  if ((dtypes >> view.dtype & 1u) == 0)
    problems_.push_back({name, std::string("dtype ") + kDtypeNames[view.dtype], dtypes_text(dtypes)});
  const int wanted_dims = static_cast<int>(std::char_traits<char>::length(letters));
  if (view.dims != wanted_dims) {
    problems_.push_back({name, std::to_string(view.dims) + " axes", std::to_string(wanted_dims) + " axes"});
    return;
  }
  for (int i = 0; i < wanted_dims; ++i) {
    Size& size = size_of(letters[i]);
    if (size.value < 0)
      size = {view.shape[i], name};
    else if (size.value != view.shape[i])
      problems_.push_back({name, "shape " + shape_text(view),
                           std::to_string(size.value) + " on axis " + std::to_string(i) + ", by " + size.by});
  }
  if (!contiguous(view, layout))
    problems_.push_back({name, "strided memory", layout == Layout::kDense ? "a contiguous array" : "a contiguous last axis"});
}

void Shapes::same_dtype(const View& a, const char* a_name, const View& b, const char* b_name) {
  require(a.dtype == b.dtype, b_name, std::string("dtype ") + kDtypeNames[b.dtype],
          std::string(kDtypeNames[a.dtype]) + " as " + a_name);
}

void Shapes::require(bool holds, const char* name, std::string found, std::string wanted) {
  if (!holds) problems_.push_back({name, std::move(found), std::move(wanted)});
}

int64_t Shapes::operator[](char letter) const { return sizes_[letter - 'A'].value; }

void Shapes::done() const {
  if (problems_.empty()) return;
  if (problems_.size() == 1) throw ArgumentError(problems_[0].where, problems_[0].found, problems_[0].wanted);
  std::string where, found, wanted;
  for (const Problem& problem : problems_) {
    if (where.find(problem.where) == std::string::npos) where += (where.empty() ? "" : ", ") + problem.where;
    found += (found.empty() ? "" : "; ") + problem.where + " has " + problem.found;
    wanted += (wanted.empty() ? "" : "; ") + problem.where + ": " + problem.wanted;
  }
  throw ArgumentError(where, found, wanted);
}

void register_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const ArgumentError& error) {
      const py::object type = py::module_::import("eyas_native.errors").attr("ArgumentError");
      const py::object value = type(error.where, error.found, error.wanted);
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  });
}

void raise_on_error(int32_t code) {
  if (code == EYAS_CPU_OK) return;
  const eyas_cpu_error& error = *eyas_cpu_last_error();
  if (code == EYAS_CPU_NO_MEMORY) throw std::bad_alloc();
  throw ArgumentError(error.argument, error.found, error.wanted);
}

}  // namespace eyas::python
