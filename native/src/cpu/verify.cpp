// Greedy verification: the walk from the root along the tokens that the target itself would have produced.
#include "error.h"

namespace eyas::cpu {
namespace {

int64_t checked(int64_t value, int64_t low, int64_t high, const char* argument, int b, int64_t node) {
  if (value < low || value >= high)
    refuse(EYAS_CPU_OUT_OF_RANGE, argument, "%lld (request %d, node %lld)|%lld to %lld", static_cast<long long>(value),
           b, static_cast<long long>(node), static_cast<long long>(low), static_cast<long long>(high - 1));
  return value;
}

// The child of `node` that carries `token`, or -1.
int64_t matching_child(const eyas_cpu_verify& v, int b, int64_t node, int64_t token) {
  const int64_t n = v.nodes, base = b * n;
  int64_t child = checked(v.retrive_next_token[base + node], -1, n, "retrive_next_token", b, node);
  for (int64_t steps = 0; child != -1; ++steps) {
    if (steps == n)
      refuse(EYAS_CPU_BAD_TREE, "retrive_next_sibling", "a cycle among the children of node %lld of request %d|a list",
             static_cast<long long>(node), b);
    if (v.candidates[base + child] == token) return child;
    child = checked(v.retrive_next_sibling[base + child], -1, n, "retrive_next_sibling", b, child);
  }
  return -1;
}

void verify_request(const eyas_cpu_verify& v, int b) {
  const int64_t n = v.nodes, base = b * n, total = static_cast<int64_t>(v.batch) * n;
  int32_t* accepted = v.accept_index + static_cast<int64_t>(b) * v.accept_columns;
  for (int i = 0; i < v.accept_columns; ++i) accepted[i] = -1;
  int64_t node = 0;
  int32_t count = 0;
  for (;;) {
    const int64_t global = checked(v.retrive_index[base + node], 0, total, "retrive_index", b, node);
    const int64_t token = v.target_predict[global];
    accepted[count] = static_cast<int32_t>(global);
    v.predicts[global] = static_cast<int32_t>(token);
    if (count + 1 == v.accept_columns) break;
    node = matching_child(v, b, node, token);
    if (node < 0) break;
    ++count;
  }
  v.accept_token_num[b] = count;
}

}  // namespace
}  // namespace eyas::cpu

extern "C" int32_t eyas_cpu_verify_greedy(const eyas_cpu_verify* verify) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(verify, "verify");
    if (verify->nodes < 1) refuse(EYAS_CPU_BAD_TREE, "candidates", "a tree of %d nodes|1 or more", verify->nodes);
    if (verify->accept_columns < 1)
      refuse(EYAS_CPU_BAD_ARGUMENT, "accept_index", "%d columns|depth + 1", verify->accept_columns);
    for (int b = 0; b < verify->batch; ++b) verify_request(*verify, b);
  });
}
