// Greedy verification: the walk from the root along the tokens that the target itself would have produced.
#include "verify.h"

namespace eyas::cpu {
namespace {

// The child of `node` that carries `token`, or -1.
int64_t matching_child(const eyas_cpu_verify& v, int b, int64_t node, int64_t token) {
  const int64_t base = static_cast<int64_t>(b) * v.nodes;
  for (Children child(v, b, node); child.node != -1; child.next())
    if (v.candidates[base + child.node] == token) return child.node;
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
    check_verify(verify);
    for (int b = 0; b < verify->batch; ++b) verify_request(*verify, b);
  });
}
