// Attention over a KV pool: cuts a call into units, runs them on all threads, joins the chunks in order.
#include "attention.h"

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "threads.h"

namespace eyas::cpu {
namespace {

constexpr int64_t kPackingRows = 4;  // what bringing a key into place costs, in rows of arithmetic

struct Plan {
  std::vector<Unit> units;
  std::vector<int64_t> first_piece;  // of each unit, when chunks are spread over threads; one entry more than units
  int64_t rows = 0;                  // of the largest unit
  int64_t work = 0;                  // multiply-adds
};

int64_t keys_of_rows(const Request& request, const eyas_cpu_attention& a, int64_t last_row) {
  if (a.extend_lens == nullptr) return request.prefix;
  const bool all = !request.causal || request.tree_mask != nullptr;
  return request.prefix + (all ? request.tree : last_row / (a.num_q_heads / a.num_kv_heads) + 1);
}

Plan plan_with(const eyas_cpu_attention& a, const std::vector<Request>& requests, int64_t unit_rows) {
  Plan plan;
  plan.first_piece.push_back(0);
  for (const Request& request : requests) {
    const int64_t rows = request.length * (a.num_q_heads / a.num_kv_heads);
    for (int64_t first = 0; first < rows; first += unit_rows)
      for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        const int64_t count = std::min(unit_rows, rows - first);
        const int64_t keys = keys_of_rows(request, a, first + count - 1), chunks = (keys + kChunk - 1) / kChunk;
        plan.units.push_back({&request, head, first, count, chunks});
        plan.rows = std::max(plan.rows, count);
        plan.work += (count + kPackingRows) * keys * (a.head_dim + a.v_head_dim);
        plan.first_piece.push_back(plan.first_piece.back() + chunks);
      }
  }
  return plan;
}

// Large units bring keys into place less often, small ones spread better. Results are the same for any cut.
Plan make_plan(const eyas_cpu_attention& a, const std::vector<Request>& requests, int64_t threads) {
  int64_t unit_rows = kMaxRows;
  Plan plan = plan_with(a, requests, unit_rows);
  while (threads > 1 && plan.work > kWorkPerThread && plan.first_piece.back() < 4 * threads &&
         unit_rows / 2 >= kMinRows) {
    unit_rows /= 2;
    plan = plan_with(a, requests, unit_rows);
  }
  return plan;
}

class Workspace {
 public:
  Partial take(int64_t rows, int64_t padded) { return {room(states_, rows), room(out_, rows * padded)}; }

 private:
  std::vector<RowState> states_;
  std::vector<float> out_;
};

void join_rows(const Kernels& kernels, const Partial& total, const Partial& part, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r)
    kernels.join(total.states + r, total.out + r * padded, part.states + r, part.out + r * padded, padded);
}

void store(const eyas_cpu_attention& a, const Kernels& kernels, const Unit& unit, const Partial& total) {
  const int64_t group = a.num_q_heads / a.num_kv_heads, padded = padded_width(a.v_head_dim);
  for (int64_t r = 0; r < unit.rows; ++r) {
    const int64_t token = unit.request->first_query + (unit.first_row + r) / group;
    const int64_t head = unit.kv_head * group + (unit.first_row + r) % group;
    const RowState& state = total.states[r];
    const bool empty = state.sum == 0.0f;  // no key at all: zeros
    uint8_t* out = static_cast<uint8_t*>(a.out) +
                   dtype_bytes(a.q_dtype) * (token * a.out_stride_token + head * a.out_stride_head);
    kernels.store_row(a.q_dtype, total.out + r * padded, empty ? 1.0f : state.sum, a.v_head_dim, out);
    if (a.lse != nullptr) a.lse[token * a.num_q_heads + head] = empty ? -INFINITY : state.max + std::log(state.sum);
  }
}

// Enough units to keep all threads busy: each runs all its chunks.
void run_whole(const eyas_cpu_attention& a, const Kernels& kernels, const Plan& plan) {
  const int64_t padded = padded_width(a.v_head_dim);
  parallel_for(static_cast<int64_t>(plan.units.size()), plan.work, [&](int64_t i) {
    thread_local Workspace totals, parts;
    const Unit& unit = plan.units[static_cast<std::size_t>(i)];
    const Partial total = totals.take(plan.rows, padded), part = parts.take(plan.rows, padded);
    clear(total, unit.rows, padded);
    for (int64_t chunk = 0; chunk < unit.chunks; ++chunk) {
      clear(part, unit.rows, padded);
      attend_chunk(a, kernels, unit, chunk, part);
      join_rows(kernels, total, part, unit.rows, padded);
    }
    store(a, kernels, unit, total);
  });
}

// Few units with many keys (decode of few requests): chunks run apart and are joined afterwards, in the same order.
void run_split(const eyas_cpu_attention& a, const Kernels& kernels, const Plan& plan) {
  thread_local Workspace workspace;
  const int64_t padded = padded_width(a.v_head_dim), pieces = plan.first_piece.back();
  const Partial all = workspace.take(pieces * plan.rows, padded);
  const auto piece_at = [&](int64_t piece) {
    return Partial{all.states + piece * plan.rows, all.out + piece * plan.rows * padded};
  };
  parallel_for(pieces, plan.work, [&](int64_t piece) {
    const auto after = std::upper_bound(plan.first_piece.begin(), plan.first_piece.end(), piece);
    const auto i = static_cast<std::size_t>(after - plan.first_piece.begin() - 1);
    clear(piece_at(piece), plan.units[i].rows, padded);
    attend_chunk(a, kernels, plan.units[i], piece - plan.first_piece[i], piece_at(piece));
  });
  thread_local Workspace totals;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const Unit& unit = plan.units[i];
    const Partial total = totals.take(plan.rows, padded);
    clear(total, unit.rows, padded);
    for (int64_t piece = plan.first_piece[i]; piece < plan.first_piece[i + 1]; ++piece)
      join_rows(kernels, total, piece_at(piece), unit.rows, padded);
    store(a, kernels, unit, total);
  }
}

}  // namespace
}  // namespace eyas::cpu

extern "C" int32_t eyas_cpu_attention_run(const eyas_cpu_attention* attention) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(attention, "attention");
    const Kernels& chosen = kernels();
    const std::vector<Request> requests = read_requests(*attention);
    const int64_t threads = num_threads();
    const Plan plan = make_plan(*attention, requests, threads);
    const int64_t units = static_cast<int64_t>(plan.units.size());
    if (threads > 1 && units < 4 * threads && plan.first_piece.back() > units && plan.work > kWorkPerThread)
      run_split(*attention, chosen, plan);
    else
      run_whole(*attention, chosen, plan);
  });
}
