// Bindings of draft trees and their verification. Letters: B requests, N nodes, M nodes - 1, P parent columns.
#include "view.h"

namespace eyas::python {
namespace {

void match_outputs(Shapes& shapes, const View& positions, const View& index, const View& next, const View& sibling) {
  shapes.match(positions, "positions", "T", of(kI64));
  shapes.match(index, "retrive_index", "BN", of(kI64));
  shapes.match(next, "retrive_next_token", "BN", of(kI64));
  shapes.match(sibling, "retrive_next_sibling", "BN", of(kI64));
  if (positions.dims == 1)
    shapes.require(shapes['T'] == shapes['B'] * shapes['N'], "positions", std::to_string(shapes['T']) + " entries",
                   std::to_string(shapes['B'] * shapes['N']) + ", one per node");
}

eyas_cpu_tree tree_args(const View& mask, const View& seq_lens, const View& positions, const View& index,
                        const View& next, const View& sibling) {
  eyas_cpu_tree tree{};
  tree.struct_size = sizeof tree;
  tree.seq_lens = seq_lens.data<int64_t>();
  tree.tree_mask = mask.data<uint8_t>();
  tree.tree_mask_bytes = static_cast<uint64_t>(mask.bytes());
  tree.positions = positions.data<int64_t>();
  tree.retrive_index = index.data<int64_t>();
  tree.retrive_next_token = next.data<int64_t>();
  tree.retrive_next_sibling = sibling.data<int64_t>();
  return tree;
}

void tree_build(const py::object& parent_list_, const py::object& selected_index_, const py::object& seq_lens_,
                int32_t topk, int32_t num_nodes, int32_t mask_mode, const py::object& mask_,
                const py::object& positions_, const py::object& index_, const py::object& next_,
                const py::object& sibling_) {
  const View parent_list(parent_list_), selected_index(selected_index_), seq_lens(seq_lens_), mask(mask_),
      positions(positions_), index(index_), next(next_), sibling(sibling_);
  Shapes shapes;
  shapes.require(num_nodes >= 1, "num_nodes", std::to_string(num_nodes), "1 or more, the root included");
  shapes.done();
  shapes.fix('N', num_nodes, "num_nodes");
  shapes.fix('M', num_nodes - 1, "num_nodes");
  shapes.match(seq_lens, "seq_lens", "B", of(kI64));
  shapes.match(parent_list, "parent_list", "BP", of(kI64));
  shapes.match(selected_index, "selected_index", "BM", of(kI64));
  match_outputs(shapes, positions, index, next, sibling);
  const uint32_t packed = of(kU8) | of(kI32) | of(kU16) | of(kU32) | of(kI16);
  const bool bits = mask_mode == EYAS_CPU_MASK_BITS || mask_mode == EYAS_CPU_MASK_WORDS;
  const char* mask_axes[] = {"", "w", "wx", "wxy", "wxyz"};
  shapes.match(mask, "tree_mask", mask.dims <= 4 ? mask_axes[mask.dims] : "w", bits ? packed : kFlags);
  shapes.done();
  eyas_cpu_tree tree = tree_args(mask, seq_lens, positions, index, next, sibling);
  tree.batch = static_cast<int32_t>(shapes['B']);
  tree.nodes = num_nodes;
  tree.topk = topk;
  tree.mask_mode = mask_mode;
  tree.parent_list = parent_list.data<int64_t>();
  tree.parent_columns = shapes['P'];
  tree.selected_index = selected_index.data<int64_t>();
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    return eyas_cpu_tree_build(&tree);
  }();
  raise_on_error(code);
}

void tree_from_mask(const py::object& mask_, const py::object& seq_lens_, const py::object& positions_,
                    const py::object& index_, const py::object& next_, const py::object& sibling_) {
  const View mask(mask_), seq_lens(seq_lens_), positions(positions_), index(index_), next(next_), sibling(sibling_);
  Shapes shapes;
  shapes.match(mask, "tree_mask", "BNN", kFlags);
  shapes.match(seq_lens, "seq_lens", "B", of(kI64));
  match_outputs(shapes, positions, index, next, sibling);
  shapes.done();
  eyas_cpu_tree tree = tree_args(mask, seq_lens, positions, index, next, sibling);
  tree.batch = static_cast<int32_t>(shapes['B']);
  tree.nodes = static_cast<int32_t>(shapes['N']);
  raise_on_error(eyas_cpu_tree_from_mask(&tree));
}

py::bytes tree_validate(const py::object& mask_) {
  const View mask(mask_);
  Shapes shapes;
  shapes.match(mask, "tree_mask", "BNN", kFlags);
  shapes.done();
  std::string faults(static_cast<std::size_t>(shapes['B'] * shapes['N']), '\0');
  raise_on_error(eyas_cpu_tree_validate(mask.data<uint8_t>(), static_cast<int32_t>(shapes['B']),
                                        static_cast<int32_t>(shapes['N']), reinterpret_cast<uint8_t*>(faults.data())));
  return py::bytes(faults);
}

struct VerifyViews {
  View predicts, accept_index, accept_num, candidates, index, next, sibling;
};

eyas_cpu_verify verify_args(Shapes& shapes, const VerifyViews& v) {
  shapes.match(v.candidates, "candidates", "BN", of(kI64));
  shapes.match(v.index, "retrive_index", "BN", of(kI64));
  shapes.match(v.next, "retrive_next_token", "BN", of(kI64));
  shapes.match(v.sibling, "retrive_next_sibling", "BN", of(kI64));
  shapes.match(v.accept_index, "accept_index", "BA", of(kI32));
  shapes.match(v.accept_num, "accept_token_num", "B", of(kI32));
  shapes.match(v.predicts, "predicts", "T", of(kI32));
  shapes.require(v.predicts.dims != 1 || shapes['T'] == shapes['B'] * shapes['N'], "predicts",
                 std::to_string(shapes['T']) + " entries", "one per node of every request");
  eyas_cpu_verify verify{};
  verify.struct_size = sizeof verify;
  verify.batch = static_cast<int32_t>(shapes['B']);
  verify.nodes = static_cast<int32_t>(shapes['N']);
  verify.accept_columns = static_cast<int32_t>(shapes['A']);
  verify.candidates = v.candidates.data<int64_t>();
  verify.retrive_index = v.index.data<int64_t>();
  verify.retrive_next_token = v.next.data<int64_t>();
  verify.retrive_next_sibling = v.sibling.data<int64_t>();
  verify.predicts = v.predicts.data<int32_t>();
  verify.accept_index = v.accept_index.data<int32_t>();
  verify.accept_token_num = v.accept_num.data<int32_t>();
  return verify;
}

void verify_greedy(const py::object& predicts, const py::object& accept_index, const py::object& accept_num,
                   const py::object& candidates, const py::object& index, const py::object& next,
                   const py::object& sibling, const py::object& target_predict_) {
  const VerifyViews views{View(predicts), View(accept_index), View(accept_num), View(candidates),
                          View(index),    View(next),         View(sibling)};
  const View target_predict(target_predict_);
  Shapes shapes;
  eyas_cpu_verify verify = verify_args(shapes, views);
  shapes.match(target_predict, "target_predict", target_predict.dims == 1 ? "T" : "BN", of(kI64));
  shapes.done();
  verify.target_predict = target_predict.data<int64_t>();
  raise_on_error(eyas_cpu_verify_greedy(&verify));
}

void verify_sampled(const py::object& predicts, const py::object& accept_index, const py::object& accept_num,
                    const py::object& candidates, const py::object& index, const py::object& next,
                    const py::object& sibling, const py::object& uniform_, const py::object& uniform_final_,
                    const py::object& target_probs_, const py::object& draft_probs_, bool replacement,
                    float threshold_single, float threshold_acc) {
  const VerifyViews views{View(predicts), View(accept_index), View(accept_num), View(candidates),
                          View(index),    View(next),         View(sibling)};
  const View uniform(uniform_), uniform_final(uniform_final_), target_probs(target_probs_), draft_probs(draft_probs_);
  Shapes shapes;
  const eyas_cpu_verify verify = verify_args(shapes, views);
  shapes.match(uniform, "uniform", "BN", of(kFp32));
  shapes.match(uniform_final, "uniform_final", "B", of(kFp32));
  shapes.match(target_probs, "target_probs", "BNV", of(kFp32));
  if (draft_probs.present()) shapes.match(draft_probs, "draft_probs", "BNV", of(kFp32));
  shapes.done();
  eyas_cpu_sampling sampling{};
  sampling.struct_size = sizeof sampling;
  sampling.replacement = replacement;
  sampling.vocab = shapes['V'];
  sampling.uniform = uniform.data<float>();
  sampling.uniform_final = uniform_final.data<float>();
  sampling.target_probs = target_probs.data<float>();
  sampling.draft_probs = draft_probs.present() ? draft_probs.data<float>() : nullptr;
  sampling.threshold_single = threshold_single;
  sampling.threshold_acc = threshold_acc;
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    return eyas_cpu_verify_sampled(&verify, &sampling);
  }();
  raise_on_error(code);
}

void accept_commit(const py::object& predicts_, const py::object& accept_index_, const py::object& accept_num_,
                   const py::object& out_cache_loc_, const py::object& accept_lens_, const py::object& tokens_,
                   const py::object& src_loc_, const py::object& tgt_loc_, const py::object& rows_,
                   const py::object& bonus_) {
  const View predicts(predicts_), accept_index(accept_index_), accept_num(accept_num_), out_cache_loc(out_cache_loc_),
      accept_lens(accept_lens_), tokens(tokens_), src_loc(src_loc_), tgt_loc(tgt_loc_), rows(rows_), bonus(bonus_);
  Shapes shapes;
  shapes.match(accept_index, "accept_index", "BA", of(kI32));
  shapes.match(accept_num, "accept_token_num", "B", of(kI32));
  shapes.match(predicts, "predicts", "T", of(kI32));
  shapes.match(out_cache_loc, "out_cache_loc", "T", of(kI64));
  shapes.match(accept_lens, "accept_lens", "B", of(kI32));
  shapes.match(tokens, "tokens", "BA", of(kI64));
  shapes.match(src_loc, "src_loc", "BA", of(kI64));
  shapes.match(tgt_loc, "tgt_loc", "BA", of(kI64));
  shapes.match(rows, "rows", "BA", of(kI64));
  shapes.match(bonus, "bonus", "B", of(kI64));
  shapes.done();
  const int64_t batch = shapes['B'], total = shapes['T'];
  shapes.require(batch == 0 ? total == 0 : total % batch == 0, "predicts", std::to_string(total) + " entries",
                 "the same number of nodes for each of " + std::to_string(batch) + " requests");
  shapes.done();
  if (batch == 0) return;
  eyas_cpu_commit commit{};
  commit.struct_size = sizeof commit;
  commit.batch = static_cast<int32_t>(batch);
  commit.nodes = static_cast<int32_t>(total / batch);
  commit.accept_columns = static_cast<int32_t>(shapes['A']);
  commit.predicts = predicts.data<int32_t>();
  commit.accept_index = accept_index.data<int32_t>();
  commit.accept_token_num = accept_num.data<int32_t>();
  commit.out_cache_loc = out_cache_loc.data<int64_t>();
  commit.accept_lens = accept_lens.data<int32_t>();
  commit.tokens = tokens.data<int64_t>();
  commit.src_loc = src_loc.data<int64_t>();
  commit.tgt_loc = tgt_loc.data<int64_t>();
  commit.rows = rows.data<int64_t>();
  commit.bonus = bonus.data<int64_t>();
  raise_on_error(eyas_cpu_accept_commit(&commit));
}

}  // namespace

void register_tree(py::module_& module) {
  module.def("tree_build", tree_build);
  module.def("tree_from_mask", tree_from_mask);
  module.def("tree_validate", tree_validate);
  module.def("verify_greedy", verify_greedy);
  module.def("verify_sampled", verify_sampled);
  module.def("accept_commit", accept_commit);
}

}  // namespace eyas::python
