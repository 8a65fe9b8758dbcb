// Binding of attention. Letters: B requests, T query rows, H query heads, G KV heads, D head width, V value width,
// S pool slots, R x L the table of slots.
#include "view.h"

namespace eyas::python {
namespace {

void attention(const py::object& q_, const py::object& k_, const py::object& v_, const py::object& out_,
               const py::object& lse_, const py::object& req_to_token_, const py::object& req_pool_indices_,
               const py::object& seq_lens_, const py::object& extend_lens_, const py::object& extend_start_,
               const py::object& tree_mask_, bool causal, int32_t window, float scale, float logit_cap, int32_t tree_keys) {
  const View q(q_), k(k_), v(v_), out(out_), lse(lse_), req_to_token(req_to_token_),
      req_pool_indices(req_pool_indices_), seq_lens(seq_lens_), extend_lens(extend_lens_),
      extend_start(extend_start_), tree_mask(tree_mask_);
  const bool extend = extend_lens.present();
  Shapes shapes;
  shapes.match(q, "q", extend ? "THD" : "BHD", kFloat, Layout::kRows);
  shapes.match(k, "k_buffer", "SGD", kFloat, Layout::kRows);
  shapes.match(v, "v_buffer", "SGV", kFloat, Layout::kRows);
  shapes.match(out, "out", extend ? "THV" : "BHV", kFloat, Layout::kRows);
  shapes.same_dtype(k, "k_buffer", v, "v_buffer");
  shapes.same_dtype(q, "q", out, "out");
  shapes.match(req_to_token, "req_to_token", "RL", of(kI32), Layout::kRows);
  shapes.match(req_pool_indices, "req_pool_indices", "B", of(kI64));
  shapes.match(seq_lens, "seq_lens", "B", of(kI64));
  if (extend) shapes.match(extend_lens, "extend_lens", "B", kInt);
  if (extend) shapes.match(extend_start, "extend_start", "B", kInt);
  if (lse.present()) shapes.match(lse, "lse", extend ? "TH" : "BH", of(kFp32));
  if (tree_mask.present()) {
    const char* axes[] = {"", "w", "wx", "wxy"};
    shapes.match(tree_mask, "tree_mask", tree_mask.dims <= 3 ? axes[tree_mask.dims] : "w", kFlags);
  }
  shapes.done();
  eyas_cpu_attention a{};
  a.struct_size = sizeof a;
  a.q_dtype = static_cast<int32_t>(q.dtype);
  a.kv_dtype = static_cast<int32_t>(k.dtype);
  a.num_q_heads = static_cast<int32_t>(q.shape[1]);
  a.num_kv_heads = static_cast<int32_t>(k.shape[1]);
  a.head_dim = static_cast<int32_t>(q.shape[2]);
  a.v_head_dim = static_cast<int32_t>(v.shape[2]);
  a.batch = static_cast<int32_t>(seq_lens.shape[0]);
  a.causal = causal ? 1 : 0;
  a.window = window;
  a.scale = scale;
  a.logit_cap = logit_cap;
  a.q = q.data();
  a.k = k.data();
  a.v = v.data();
  a.out = out.data();
  a.lse = lse.data<float>();
  a.q_stride_token = q.stride[0];
  a.q_stride_head = q.stride[1];
  a.out_stride_token = out.stride[0];
  a.out_stride_head = out.stride[1];
  a.k_stride_token = k.stride[0];
  a.k_stride_head = k.stride[1];
  a.v_stride_token = v.stride[0];
  a.v_stride_head = v.stride[1];
  a.q_rows = q.shape[0];
  a.slots = k.shape[0];
  a.req_to_token = req_to_token.data<int32_t>();
  a.req_rows = req_to_token.shape[0];
  a.req_columns = req_to_token.shape[1];
  a.req_stride = req_to_token.stride[0];
  a.req_pool_indices = req_pool_indices.data<int64_t>();
  a.seq_lens = seq_lens.data<int64_t>();
  a.extend_lens = extend_lens.data();
  a.extend_start = extend_start.data();
  a.extend_lens_i64 = extend_lens.dtype == kI64;
  a.extend_start_i64 = extend_start.dtype == kI64;
  a.tree_keys = tree_keys;
  if (tree_mask.present()) {
    a.tree_mask = tree_mask.data<uint8_t>();
    a.tree_mask_bytes = static_cast<uint64_t>(tree_mask.bytes());
  }
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    return eyas_cpu_attention_run(&a);
  }();
  raise_on_error(code);
}

}  // namespace

void register_attention(py::module_& module) { module.def("attention", attention); }

}  // namespace eyas::python
