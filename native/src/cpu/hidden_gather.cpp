// The states of several layers, side by side: [N, H] times K -> [T, K * H], with residuals, a norm, scaled e4m3.
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
constexpr float kE4m3Largest = 448.0f, kSmallest = 1e-12f;  // the CUDA kernel's

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

// What a task keeps from row to row.
template <class In>
struct Scratch {
  explicit Scratch(const eyas_cpu_gather& g)
      : rows(static_cast<std::size_t>(g.num_sources)), rstd(rows.size()),
        sums(g.residuals != nullptr ? rows.size() * static_cast<std::size_t>(g.width) : 0),
        values(g.row_scale != nullptr ? rows.size() * static_cast<std::size_t>(g.width) : 0) {}

  std::vector<const In*> rows;  // of each source
  std::vector<float> rstd;      // of each source, with a norm
  std::vector<In> sums;         // sources with their residuals
  std::vector<float> values;    // the whole row, before its scale is known
};

// The residual is added and rounded as an engine's own addition is.
template <class In>
void load_rows(const eyas_cpu_gather& g, int64_t from, Scratch<In>& scratch) {
  for (int64_t k = 0; k < g.num_sources; ++k) {
    const In* x = static_cast<const In*>(g.sources[k]) + from * g.source_strides[k];
    scratch.rows[k] = x;
    if (g.residuals == nullptr || g.residuals[k] == nullptr) continue;
    const In* y = static_cast<const In*>(g.residuals[k]) + from * g.residual_strides[k];
    In* sum = scratch.sums.data() + k * g.width;
    for (int64_t d = 0; d < g.width; ++d) from_float(to_float(x[d]) + to_float(y[d]), sum[d]);
    scratch.rows[k] = sum;
  }
}

template <class In>
void reciprocal_rms(const eyas_cpu_gather& g, Scratch<In>& scratch) {
  float whole = 0.0f;
  for (int64_t k = 0; k < g.num_sources; ++k) whole += scratch.rstd[k] = sum_of_squares(scratch.rows[k], g.width);
  for (float& squares : scratch.rstd) {
    if (g.norm == 2) squares = whole / static_cast<float>(g.num_sources);
    squares = 1.0f / std::sqrt(squares / static_cast<float>(g.width) + g.eps);
  }
}

// put(position, value) for every element of the row out, normalised.
template <class In, class Put>
void each_value(const eyas_cpu_gather& g, const Scratch<In>& scratch, const Put& put) {
  for (int64_t k = 0; k < g.num_sources; ++k) {
    const In* x = scratch.rows[k];
    const int64_t first = k * g.width;
    if (g.norm != 0) {
      const In* weight = static_cast<const In*>(g.weight) + first;
      const float scale = scratch.rstd[k];
      for (int64_t d = 0; d < g.width; ++d) put(first + d, to_float(x[d]) * scale * to_float(weight[d]));
    } else {
      for (int64_t d = 0; d < g.width; ++d) put(first + d, to_float(x[d]));
    }
  }
}

template <class In>
void scale_row(const eyas_cpu_gather& g, int64_t row, Scratch<In>& scratch, E4m3* out) {
  float inverse = 1.0f / g.out_scale;
  if (g.row_scale == nullptr) {
    each_value(g, scratch, [&](int64_t at, float value) { from_float(value * inverse, out[at]); });
    return;
  }
  float largest = kSmallest;
  each_value(g, scratch, [&](int64_t at, float value) {
    scratch.values[static_cast<std::size_t>(at)] = value;
    largest = std::max(largest, std::fabs(value));
  });
  g.row_scale[row] = largest / kE4m3Largest;
  inverse = 1.0f / g.row_scale[row];
  for (std::size_t at = 0; at < scratch.values.size(); ++at) from_float(scratch.values[at] * inverse, out[at]);
}

template <class In, class Out>
void gather_row(const eyas_cpu_gather& g, int64_t row, Scratch<In>& scratch) {
  load_rows(g, source_row(g, row), scratch);
  Out* out = static_cast<Out*>(g.out) + row * g.out_stride;
  if (g.norm != 0) reciprocal_rms(g, scratch);
  if constexpr (std::is_same_v<Out, E4m3>) {
    scale_row(g, row, scratch, out);
  } else {
    if (std::is_same_v<In, Out> && g.norm == 0)
      for (int64_t k = 0; k < g.num_sources; ++k)
        std::memcpy(out + k * g.width, scratch.rows[k], static_cast<std::size_t>(g.width) * sizeof(Out));
    else
      each_value(g, scratch, [&](int64_t at, float value) { from_float(value, out[at]); });
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
    if (g.out_dtype == EYAS_CPU_E4M3 && !(g.out_scale > 0.0f))
      refuse(EYAS_CPU_BAD_ARGUMENT, "out_scale", "%g|a scale above 0, with e4m3", static_cast<double>(g.out_scale));
    if (g.out_dtype != EYAS_CPU_E4M3 && g.row_scale != nullptr)
      refuse(EYAS_CPU_BAD_ARGUMENT, "row_scale", "given, with an output that is not scaled|none, or e4m3 as out");
    check_index(g);
    with_dtype(g.in_dtype, "sources", [&](auto* in) {
      with_stored_dtype(g.out_dtype, "out", [&](auto* out) {
        using In = std::remove_pointer_t<decltype(in)>;
        using Out = std::remove_pointer_t<decltype(out)>;
        const int64_t tasks = (g.rows + kRowsPerTask - 1) / kRowsPerTask;
        parallel_for(tasks, g.rows * g.width * g.num_sources, [&](int64_t task) {
          Scratch<In> scratch(g);
          for (int64_t row = task * kRowsPerTask; row < std::min(g.rows, (task + 1) * kRowsPerTask); ++row)
            gather_row<In, Out>(g, row, scratch);
        });
      });
    });
  });
}
