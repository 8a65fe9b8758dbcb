// Sampled verification: a path whose tokens follow the target's distribution.
//
// target-only: SGLang's tree_speculative_sampling_target_only. Rejection: multi-round speculative sampling (SpecInfer,
// Miao et al. 2023, algorithm 2): each child x of a node, drawn from q, is accepted with probability min(1, p(x) / q(x));
// after a refusal p becomes the positive part of p - q, normalised. A chain is a tree with one child a node.
#include <algorithm>
#include <vector>

#include "verify.h"

namespace eyas::cpu {
namespace {

// What the last token of a path is drawn from; sums in double, so that a vocabulary of any size adds up.
struct Distribution {
  std::vector<double> p, q;

  void load(std::vector<double>& to, const float* row, int64_t vocab) {
    to.assign(row, row + vocab);
    for (double& value : to) value = std::max(value, 0.0);
  }

  int64_t draw(double coin) const {
    double total = 0, running = 0;
    for (const double value : p) total += value;
    int64_t last = 0;
    for (std::size_t token = 0; token < p.size(); ++token) {
      if (p[token] <= 0) continue;
      last = static_cast<int64_t>(token);
      running += p[token];
      if (running > coin * total) break;
    }
    return last;
  }
};

struct Walk {
  const eyas_cpu_verify& v;
  const eyas_cpu_sampling& s;
  int b;
  Distribution d;

  int64_t token(int64_t node) const {
    return checked(v.candidates[static_cast<int64_t>(b) * v.nodes + node], 0, s.vocab, "candidates", b, node);
  }
  const float* row(const float* probs, int64_t node) const {
    return probs + (static_cast<int64_t>(b) * v.nodes + node) * s.vocab;
  }
  double coin(int64_t node) const { return s.uniform[static_cast<int64_t>(b) * v.nodes + node]; }

  // The child of `node` that is accepted, or -1; then d.p is what remains of the target's distribution.
  int64_t accept_target_only(int64_t node) {
    const double bar = std::max(static_cast<double>(s.threshold_acc), 1e-9);
    double sum = 0;
    for (Children child(v, b, node); child.node != -1; child.next()) {
      const double p = d.p[static_cast<std::size_t>(token(child.node))];
      sum += p;
      if (coin(node) <= sum / bar || p >= s.threshold_single) return child.node;
    }
    for (Children child(v, b, node); child.node != -1; child.next())
      d.p[static_cast<std::size_t>(token(child.node))] = 0;
    return -1;
  }

  int64_t accept_by_rejection(int64_t node) {
    d.load(d.q, row(s.draft_probs, node), s.vocab);
    for (Children child(v, b, node); child.node != -1; child.next()) {
      const auto x = static_cast<std::size_t>(token(child.node));
      if (coin(child.node) * d.q[x] < d.p[x]) return child.node;
      refuse_token(x);
    }
    return -1;
  }

  void refuse_token(std::size_t x) {
    double left = 0;
    for (std::size_t i = 0; i < d.p.size(); ++i) left += std::max(d.p[i] - d.q[i], 0.0);
    if (left > 0)  // else p and q are equal up to rounding, and what is left of p is p
      for (std::size_t i = 0; i < d.p.size(); ++i) d.p[i] = std::max(d.p[i] - d.q[i], 0.0) / left;
    if (s.replacement) return;
    d.q[x] = 0;
    double total = 0;
    for (const double value : d.q) total += value;
    if (total > 0)
      for (double& value : d.q) value /= total;
  }

  void run() {
    int32_t* accepted = v.accept_index + static_cast<int64_t>(b) * v.accept_columns;
    std::fill(accepted, accepted + v.accept_columns, -1);
    const int64_t base = static_cast<int64_t>(b) * v.nodes, total = static_cast<int64_t>(v.batch) * v.nodes;
    int64_t node = 0;
    int32_t count = 0;
    for (;;) {
      const int64_t global = checked(v.retrive_index[base + node], 0, total, "retrive_index", b, node);
      accepted[count] = static_cast<int32_t>(global);
      d.load(d.p, row(s.target_probs, node), s.vocab);
      const bool deepest = count + 1 == v.accept_columns;
      const int64_t child = deepest ? -1 : s.draft_probs ? accept_by_rejection(node) : accept_target_only(node);
      v.predicts[global] = static_cast<int32_t>(child < 0 ? d.draw(s.uniform_final[b]) : token(child));
      if (child < 0) break;
      node = child;
      ++count;
    }
    v.accept_token_num[b] = count;
  }
};

}  // namespace
}  // namespace eyas::cpu

extern "C" int32_t eyas_cpu_verify_sampled(const eyas_cpu_verify* verify, const eyas_cpu_sampling* sampling) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_verify(verify);
    check_struct(sampling, "sampling");
    if (sampling->vocab < 1)
      refuse(EYAS_CPU_BAD_ARGUMENT, "target_probs", "%lld tokens|1 or more", static_cast<long long>(sampling->vocab));
    if (!(sampling->threshold_acc > 0))
      refuse(EYAS_CPU_BAD_ARGUMENT, "threshold_acc", "%g|a positive number",
             static_cast<double>(sampling->threshold_acc));
    for (int b = 0; b < verify->batch; ++b) Walk{*verify, *sampling, b, {}}.run();
  });
}
