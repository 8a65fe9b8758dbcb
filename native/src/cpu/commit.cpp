// What a verify leads to: the accepted tokens, the KV slots to move, the rows to gather.
#include "verify.h"

namespace eyas::cpu {
namespace {

void check_commit(const eyas_cpu_commit& c) {
  if (c.nodes < 1) refuse(EYAS_CPU_BAD_TREE, "predicts", "a tree of %d nodes|1 or more", c.nodes);
  const int64_t total = static_cast<int64_t>(c.batch) * c.nodes;
  for (int b = 0; b < c.batch; ++b) {
    const int32_t count = c.accept_token_num[b];
    if (count < 0 || count >= c.accept_columns || count >= c.nodes)
      refuse(EYAS_CPU_OUT_OF_RANGE, "accept_token_num", "%d of request %d|0 to %d, by the columns of accept_index and "
             "the nodes", count, b, (c.accept_columns < c.nodes ? c.accept_columns : c.nodes) - 1);
    for (int32_t i = 0; i <= count; ++i)
      checked(c.accept_index[static_cast<int64_t>(b) * c.accept_columns + i], 0, total, "accept_index", b, i);
  }
}

void commit_request(const eyas_cpu_commit& c, int b) {
  const int32_t count = c.accept_token_num[b] + 1;
  c.accept_lens[b] = count;
  for (int32_t i = 0; i < c.accept_columns; ++i) {
    const int64_t at = static_cast<int64_t>(b) * c.accept_columns + i;
    const bool used = i < count;
    const int64_t node = used ? c.accept_index[at] : -1;
    c.rows[at] = node;
    c.tokens[at] = used ? c.predicts[node] : -1;
    c.src_loc[at] = used ? c.out_cache_loc[node] : -1;
    c.tgt_loc[at] = used ? c.out_cache_loc[static_cast<int64_t>(b) * c.nodes + i] : -1;
  }
  c.bonus[b] = c.tokens[static_cast<int64_t>(b) * c.accept_columns + count - 1];
}

}  // namespace
}  // namespace eyas::cpu

extern "C" int32_t eyas_cpu_accept_commit(const eyas_cpu_commit* commit) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(commit, "commit");
    check_commit(*commit);
    for (int b = 0; b < commit->batch; ++b) commit_request(*commit, b);
  });
}
