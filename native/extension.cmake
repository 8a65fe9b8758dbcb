# The Python extension: a thin shim over the C ABI. Only built as part of a wheel.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

set(eyas_git_sha "unknown")
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty --abbrev=12
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE eyas_git_sha ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE eyas_git_failed)
  if(eyas_git_failed)
    set(eyas_git_sha "unknown")
  endif()
endif()
set(eyas_built_archs "")
if(TARGET eyas_cuda)
  list(JOIN EYAS_CUDA_ARCHS " " eyas_built_archs) # a semicolon would cut the definition below in pieces
endif()

pybind11_add_module(_C MODULE
  src/python/attention.cpp src/python/memory.cpp src/python/module.cpp src/python/tree.cpp
  src/python/view.cpp)
target_link_libraries(_C PRIVATE eyas_cpu)
target_compile_options(_C PRIVATE -Wall -Wextra $<$<BOOL:${EYAS_WERROR}>:-Werror>)
target_compile_definitions(_C PRIVATE
  EYAS_VERSION="${SKBUILD_PROJECT_VERSION_FULL}" EYAS_GIT_SHA="${eyas_git_sha}"
  EYAS_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  EYAS_CUDA_COMPILER="${CMAKE_CUDA_COMPILER_VERSION}" EYAS_CUDA_ARCHS="${eyas_built_archs}"
  EYAS_CUDA_REASON="${EYAS_CUDA_REASON}")
set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN")
install(TARGETS _C LIBRARY DESTINATION eyas_native)
