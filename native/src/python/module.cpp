// The extension module: one register call per area, and the facts of this build.
#include "view.h"

namespace py = pybind11;

namespace {

std::string isa() {
  const char* name = eyas_cpu_isa();
  if (name == nullptr) eyas::python::raise_on_error(eyas_cpu_last_error()->code);
  return name;
}

py::dict build_info() {
  py::dict info;
  info["version"] = EYAS_VERSION;
  info["git"] = EYAS_GIT_SHA;
  info["compiler"] = EYAS_COMPILER;
  info["cpu_abi"] = eyas_cpu_abi();
  info["cuda_compiler"] = EYAS_CUDA_COMPILER;
  info["cuda_archs"] = EYAS_CUDA_ARCHS;
  info["cuda_reason"] = EYAS_CUDA_REASON;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  if (eyas_cpu_abi() != EYAS_CPU_ABI)
    throw py::import_error("libeyas_cpu.so and the extension _C are of different builds. Reinstall eyas-native.");
  eyas::python::register_errors(module);
  eyas::python::register_tree(module);
  eyas::python::register_attention(module);
  eyas::python::register_memory(module);
  module.def("build_info", build_info);
  module.def("isas", [] { return std::string(eyas_cpu_isas()); });
  module.def("isa", isa);
  module.def("set_isa", [](const std::string& name) { eyas::python::raise_on_error(eyas_cpu_set_isa(name.c_str())); });
  module.def("threads", eyas_cpu_threads);
  module.def("set_threads", [](int32_t n) { eyas::python::raise_on_error(eyas_cpu_set_threads(n)); });
}
