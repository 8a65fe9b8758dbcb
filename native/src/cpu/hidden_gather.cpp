// The states of several layers, side by side: [N, H] times K -> [T, K * H], optionally normalised.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "convert.h"
#include "threads.h"

namespace eyas::cpu {
namespace {

constexpr int64_t kRowsPerTask = 16;

int64_t source_row(const eyas_cpu_gather& g, int64_t row) {
  if (g.index == nullptr) return row;
  return g.index_i64 != 0 ? static_cast<const int64_t*>(g.index)[row] : static_cast<const int32_t*>(g.index)[row];
}

void check_index(const eyas_cpu_gather& g) {
  for (int64_t row = 0; row < g.rows; ++row) {
    const int64_t from = source_row(g, row);
    if (from < 0 || from >= g.source_rows)
      refuse(EYAS_CPU_OUT_OF_RANGE, "index", "%lld at %lld|0 to %lld, the rows of the sources",
             static_cast<long long>(from), static_cast<long long>(row), static_cast<long long>(g.source_rows - 1));
  }
}

// Sum in eight fixed lanes: vectorised, yet the same on every machine and for every number of threads.
template <class In>
float sum_of_squares(const In* x, int64_t width) {
  float lanes[8] = {};
  for (int64_t d = 0; d < width; ++d) {
    const float value = to_float(x[d]);
    lanes[d % 8] += value * value;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class In, class Out>
void gather_row(const eyas_cpu_gather& g, int64_t row, float* squares) {
  const int64_t from = source_row(g, row);
  const auto source = [&](int64_t k) { return static_cast<const In*>(g.sources[k]) + from * g.source_strides[k]; };
  Out* out = static_cast<Out*>(g.out) + row * g.out_stride;
  if (g.norm != 0) {
    float whole = 0.0f;
    for (int64_t k = 0; k < g.num_sources; ++k) whole += squares[k] = sum_of_squares(source(k), g.width);
    if (g.norm == 2) std::fill(squares, squares + g.num_sources, whole / static_cast<float>(g.num_sources));
  }
  for (int64_t k = 0; k < g.num_sources; ++k, out += g.width) {
    const In* x = source(k);
    if (g.norm != 0) {
      const float scale = 1.0f / std::sqrt(squares[k] / static_cast<float>(g.width) + g.eps);
      const In* weight = static_cast<const In*>(g.weight) + k * g.width;
      for (int64_t d = 0; d < g.width; ++d) from_float(to_float(x[d]) * scale * to_float(weight[d]), out[d]);
    } else if constexpr (std::is_same_v<In, Out>) {
      std::memcpy(out, x, static_cast<std::size_t>(g.width) * sizeof(Out));
    } else {
      for (int64_t d = 0; d < g.width; ++d) from_float(to_float(x[d]), out[d]);
    }
  }
}

}  // namespace
}  // namespace eyas::cpu

extern "C" int32_t eyas_cpu_hidden_gather(const eyas_cpu_gather* gather) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(gather, "gather");
    const eyas_cpu_gather& g = *gather;
    if (g.norm < 0 || g.norm > 2) refuse(EYAS_CPU_BAD_ARGUMENT, "norm", "%d|0 none, 1 per source or 2 whole", g.norm);
    if (g.norm != 0 && g.weight == nullptr) refuse(EYAS_CPU_BAD_ARGUMENT, "weight", "null|a weight, with a norm");
    check_index(g);
    with_dtype(g.in_dtype, "sources", [&](auto* in) {
      with_dtype(g.out_dtype, "out", [&](auto* out) {
        using In = std::remove_pointer_t<decltype(in)>;
        using Out = std::remove_pointer_t<decltype(out)>;
        const int64_t tasks = (g.rows + kRowsPerTask - 1) / kRowsPerTask;
        parallel_for(tasks, g.rows * g.width * g.num_sources, [&](int64_t task) {
          std::vector<float> squares(static_cast<std::size_t>(g.num_sources));
          for (int64_t row = task * kRowsPerTask; row < std::min(g.rows, (task + 1) * kRowsPerTask); ++row)
            gather_row<In, Out>(g, row, squares.data());
        });
      });
    });
  });
}
