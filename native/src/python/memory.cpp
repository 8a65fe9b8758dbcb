// Bindings of the KV pool's writes and moves, and of the gather of hidden states.
#include "view.h"

namespace eyas::python {
namespace {

eyas_cpu_write write_args(const View& source, const View& buffer, const View& loc) {
  eyas_cpu_write write{};
  write.struct_size = sizeof write;
  write.dtype = static_cast<int32_t>(source.dtype);
  write.buffer_dtype = static_cast<int32_t>(buffer.dtype);
  write.rows = source.shape[0];
  write.heads = source.shape[1];
  write.width = source.shape[2];
  write.slots = buffer.shape[0];
  write.source = source.data();
  write.source_stride_token = source.stride[0];
  write.source_stride_head = source.stride[1];
  write.buffer = buffer.data();
  write.buffer_stride_token = buffer.stride[0];
  write.buffer_stride_head = buffer.stride[1];
  write.loc = loc.data<int64_t>();
  return write;
}

// Letters: N rows, G KV heads, D and V widths, S slots.
void kv_write(const py::object& k_, const py::object& v_, const py::object& k_buffer_, const py::object& v_buffer_,
              const py::object& loc_) {
  const View k(k_), v(v_), k_buffer(k_buffer_), v_buffer(v_buffer_), loc(loc_);
  Shapes shapes;
  shapes.match(k_buffer, "k_buffer", "SGD", kFloat, Layout::kRows);
  shapes.match(v_buffer, "v_buffer", "SGV", kFloat, Layout::kRows);
  shapes.match(loc, "loc", "N", of(kI64));
  shapes.match(k, "k", "NGD", kFloat, Layout::kRows);
  shapes.match(v, "v", "NGV", kFloat, Layout::kRows);
  shapes.done();
  const eyas_cpu_write write_k = write_args(k, k_buffer, loc), write_v = write_args(v, v_buffer, loc);
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    const int32_t first = eyas_cpu_kv_write(&write_k);
    return first != EYAS_CPU_OK ? first : eyas_cpu_kv_write(&write_v);
  }();
  raise_on_error(code);
}

// Letters: N rows moved.
void kv_move(const std::vector<uint64_t>& buffers, const std::vector<uint64_t>& strides,
             const std::vector<uint64_t>& bytes, int64_t slots, const py::object& tgt_, const py::object& src_) {
  const View tgt(tgt_), src(src_);
  Shapes shapes;
  shapes.match(tgt, "tgt_loc", "N", of(kI64));
  shapes.match(src, "src_loc", "N", of(kI64));
  shapes.require(buffers.size() == strides.size() && buffers.size() == bytes.size(), "strides",
                 std::to_string(strides.size()) + " strides for " + std::to_string(buffers.size()) + " buffers",
                 "one per buffer");
  shapes.done();
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    return eyas_cpu_kv_move(buffers.data(), strides.data(), bytes.data(), static_cast<int32_t>(buffers.size()), slots,
                            tgt.data<int64_t>(), src.data<int64_t>(), shapes['N']);
  }();
  raise_on_error(code);
}

// Letters: N source rows, H width, T rows out, W = K * H.
void hidden_gather(const py::list& sources, const py::list& residuals, const py::object& index_, const py::object& out_,
                   int32_t norm, const py::object& weight_, float eps, float out_scale, const py::object& row_scale_) {
  const View index(index_), out(out_), weight(weight_), row_scale(row_scale_);
  std::vector<const void*> addresses, added;
  std::vector<int64_t> strides, added_strides;
  Shapes shapes;
  shapes.require(!sources.empty(), "sources", "no array", "one or more");
  shapes.require(residuals.empty() || residuals.size() == sources.size(), "residuals",
                 std::to_string(residuals.size()) + " for " + std::to_string(sources.size()) + " sources",
                 "one per source, each an array or None");
  shapes.done();
  const View first(sources[0]);
  std::vector<std::string> names(sources.size()), added_names(residuals.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    names[i] = "sources[" + std::to_string(i) + "]";
    const View source(sources[i]);
    shapes.match(source, names[i].c_str(), "NH", kFloat, Layout::kRows);
    shapes.same_dtype(first, "sources[0]", source, names[i].c_str());
    addresses.push_back(source.data());
    strides.push_back(source.stride[0]);
  }
  for (std::size_t i = 0; i < residuals.size(); ++i) {
    added_names[i] = "residuals[" + std::to_string(i) + "]";
    const View residual(residuals[i]);
    added.push_back(residual.data());
    added_strides.push_back(residual.stride[0]);
    if (!residual.present()) continue;
    shapes.match(residual, added_names[i].c_str(), "NH", kFloat, Layout::kRows);
    shapes.same_dtype(first, "sources[0]", residual, added_names[i].c_str());
  }
  shapes.fix('W', shapes['H'] * static_cast<int64_t>(sources.size()), "the sources side by side");
  if (index.present()) shapes.match(index, "index", "T", kInt);
  else shapes.fix('T', shapes['N'], "sources[0]");
  shapes.match(out, "out", "TW", kFloat | of(kE4m3), Layout::kRows);
  if (row_scale.present()) shapes.match(row_scale, "row_scale", "T", of(kFp32));
  if (norm != 0) {
    shapes.require(weight.present(), "weight", "None", "a weight, with a norm");
    shapes.done();
    shapes.match(weight, "weight", "W", kFloat);
    shapes.same_dtype(first, "sources[0]", weight, "weight");
  }
  shapes.done();
  eyas_cpu_gather gather{};
  gather.struct_size = sizeof gather;
  gather.num_sources = static_cast<int32_t>(sources.size());
  gather.in_dtype = static_cast<int32_t>(first.dtype);
  gather.out_dtype = out.dtype == kE4m3 ? EYAS_CPU_E4M3 : static_cast<int32_t>(out.dtype);
  gather.norm = norm;
  gather.sources = addresses.data();
  gather.source_strides = strides.data();
  gather.source_rows = shapes['N'];
  gather.width = shapes['H'];
  gather.rows = shapes['T'];
  gather.index = index.data();
  gather.index_i64 = index.dtype == kI64;
  gather.eps = eps;
  gather.weight = weight.data();
  gather.out = out.data();
  gather.out_stride = out.stride[0];
  gather.residuals = added.empty() ? nullptr : added.data();
  gather.residual_strides = added_strides.data();
  gather.out_scale = out_scale;
  gather.row_scale = row_scale.data<float>();
  const int32_t code = [&] {
    const py::gil_scoped_release release;
    return eyas_cpu_hidden_gather(&gather);
  }();
  raise_on_error(code);
}

}  // namespace

void register_memory(py::module_& module) {
  module.def("kv_write", kv_write);
  module.def("kv_move", kv_move);
  module.def("hidden_gather", hidden_gather);
}

}  // namespace eyas::python
