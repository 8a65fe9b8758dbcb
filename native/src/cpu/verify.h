// What both verifications share: checked links and the list of a node's children.
#pragma once

#include "error.h"

namespace eyas::cpu {

inline int64_t checked(int64_t value, int64_t low, int64_t high, const char* argument, int b, int64_t node) {
  if (value < low || value >= high)
    refuse(EYAS_CPU_OUT_OF_RANGE, argument, "%lld (request %d, node %lld)|%lld to %lld", static_cast<long long>(value),
           b, static_cast<long long>(node), static_cast<long long>(low), static_cast<long long>(high - 1));
  return value;
}

// Walks the children of a node in their order; refuses links that leave the tree or run in a circle.
struct Children {
  Children(const eyas_cpu_verify& verify, int request, int64_t parent)
      : v(verify), b(request), base(static_cast<int64_t>(request) * verify.nodes), of(parent) {
    node = checked(v.retrive_next_token[base + parent], -1, v.nodes, "retrive_next_token", b, parent);
  }

  void next() {
    if (++steps == v.nodes)
      refuse(EYAS_CPU_BAD_TREE, "retrive_next_sibling", "a cycle among the children of node %lld of request %d|a list",
             static_cast<long long>(of), b);
    node = checked(v.retrive_next_sibling[base + node], -1, v.nodes, "retrive_next_sibling", b, node);
  }

  const eyas_cpu_verify& v;
  int b;
  int64_t base, of, node, steps = 0;
};

inline void check_verify(const eyas_cpu_verify* verify) {
  check_struct(verify, "verify");
  if (verify->nodes < 1) refuse(EYAS_CPU_BAD_TREE, "candidates", "a tree of %d nodes|1 or more", verify->nodes);
  if (verify->accept_columns < 1)
    refuse(EYAS_CPU_BAD_ARGUMENT, "accept_index", "%d columns|depth + 1", verify->accept_columns);
}

}  // namespace eyas::cpu
