// Everything that could make attention read or write outside its arrays is refused here.
#include <cmath>

#include "attention.h"
#include "error.h"

namespace eyas::cpu {
namespace {

using Long = long long;

int64_t entry(const void* values, bool is_i64, int64_t i) {
  return is_i64 ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

void check_dtype(int32_t dtype, const char* argument) {
  if (dtype < EYAS_CPU_FP32 || dtype > EYAS_CPU_FP16)
    refuse(EYAS_CPU_BAD_ARGUMENT, argument, "dtype code %d|0 fp32, 1 bf16 or 2 fp16", dtype);
}

void check_options(const eyas_cpu_attention& a) {
  check_dtype(a.q_dtype, "q");
  check_dtype(a.kv_dtype, "k_buffer");
  if (a.num_kv_heads < 1 || a.num_q_heads < 1 || a.num_q_heads % a.num_kv_heads != 0)
    refuse(EYAS_CPU_BAD_ARGUMENT, "q", "%d query heads for %d KV heads|a multiple of the KV heads", a.num_q_heads,
           a.num_kv_heads);
  if (a.head_dim < 1 || a.head_dim > 1024 || a.v_head_dim < 1 || a.v_head_dim > 1024)
    refuse(EYAS_CPU_BAD_ARGUMENT, "q", "head widths %d and %d|1 to 1024", a.head_dim, a.v_head_dim);
  if (a.window < 0) refuse(EYAS_CPU_BAD_ARGUMENT, "window", "%d|0 (none) or more", a.window);
  if (a.tree_keys < 0 || (a.tree_keys > 0 && (a.tree_mask == nullptr || a.extend_lens == nullptr)))
    refuse(EYAS_CPU_BAD_ARGUMENT, "tree_keys", "%d%s|0, or with a tree_mask more", a.tree_keys,
           a.tree_mask == nullptr ? " without tree_mask" : "");
  if (!std::isfinite(a.scale)) refuse(EYAS_CPU_BAD_ARGUMENT, "scale", "%g|a finite number", a.scale);
  if (!std::isfinite(a.logit_cap) || a.logit_cap < 0.0f)
    refuse(EYAS_CPU_BAD_ARGUMENT, "logit_cap", "%g|0 (none) or more", a.logit_cap);
}

void check_slots(const Request& request, int64_t keys, int64_t slots, int64_t row) {
  bool outside = false;
  for (int64_t i = 0; i < keys; ++i) outside |= request.slots[i] < 0 || request.slots[i] >= slots;
  if (!outside) return;
  for (int64_t i = 0; i < keys; ++i)
    if (request.slots[i] < 0 || request.slots[i] >= slots)
      refuse(EYAS_CPU_OUT_OF_RANGE, "req_to_token", "slot %d at [%lld, %lld]|0 to %lld, the pool's slots",
             request.slots[i], static_cast<Long>(row), static_cast<Long>(i), static_cast<Long>(slots - 1));
}

Request read_request(const eyas_cpu_attention& a, int64_t b) {
  const int64_t row = a.req_pool_indices[b], keys = a.seq_lens[b];
  if (row < 0 || row >= a.req_rows)
    refuse(EYAS_CPU_OUT_OF_RANGE, "req_pool_indices", "%lld for request %lld|0 to %lld, the rows of req_to_token",
           static_cast<Long>(row), static_cast<Long>(b), static_cast<Long>(a.req_rows - 1));
  if (keys < 0 || keys > a.req_columns)
    refuse(EYAS_CPU_OUT_OF_RANGE, "seq_lens", "%lld for request %lld|0 to %lld, the columns of req_to_token",
           static_cast<Long>(keys), static_cast<Long>(b), static_cast<Long>(a.req_columns));
  Request request{};
  request.slots = a.req_to_token + row * a.req_stride;
  request.causal = a.causal != 0;
  if (a.extend_lens == nullptr) {
    request.first_query = b;
    request.length = 1;
    request.prefix = keys;  // the query's own key is the last of them: it sees all
    request.causal = false;
  } else {
    request.first_query = entry(a.extend_start, a.extend_start_i64 != 0, b);
    request.length = entry(a.extend_lens, a.extend_lens_i64 != 0, b);
    request.tree = a.tree_keys > 0 ? a.tree_keys : request.length;
    request.prefix = keys - request.tree;
    if (a.tree_keys > keys)
      refuse(EYAS_CPU_OUT_OF_RANGE, "tree_keys", "%d|0 to %lld, the seq_lens of request %lld", a.tree_keys,
             static_cast<Long>(keys), static_cast<Long>(b));
    if (request.length < 0 || request.prefix < 0)
      refuse(EYAS_CPU_OUT_OF_RANGE, "extend_lens", "%lld for request %lld|0 to %lld, its seq_lens",
             static_cast<Long>(request.length), static_cast<Long>(b), static_cast<Long>(keys));
  }
  if (request.first_query < 0 || request.first_query > a.q_rows - request.length)
    refuse(EYAS_CPU_OUT_OF_RANGE, a.extend_lens == nullptr ? "q" : "extend_start",
           "queries %lld to %lld of request %lld|rows inside q's %lld", static_cast<Long>(request.first_query),
           static_cast<Long>(request.first_query + request.length - 1), static_cast<Long>(b),
           static_cast<Long>(a.q_rows));
  check_slots(request, keys, a.slots, row);
  return request;
}

void list_seen(Request& request) {
  request.seen_from.reserve(static_cast<std::size_t>(request.length) + 1);
  request.seen_from.push_back(0);
  for (int64_t query = 0; query < request.length; ++query) {
    const uint8_t* sees = request.tree_mask + query * request.tree;
    for (int64_t j = 0; j < request.tree; ++j)
      if (sees[j] != 0) request.seen.push_back(static_cast<int32_t>(j));
    request.seen_from.push_back(static_cast<int32_t>(request.seen.size()));
  }
}

}  // namespace

std::vector<Request> read_requests(const eyas_cpu_attention& a) {
  check_options(a);
  if (a.batch < 0) refuse(EYAS_CPU_BAD_ARGUMENT, "seq_lens", "%d requests|0 or more", a.batch);
  if ((a.extend_lens == nullptr) != (a.extend_start == nullptr))
    refuse(EYAS_CPU_BAD_ARGUMENT, "extend_start", "one of extend_lens and extend_start is null|both or none");
  std::vector<Request> requests;
  requests.reserve(static_cast<std::size_t>(a.batch));
  uint64_t mask_bytes = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    requests.push_back(read_request(a, b));
    Request& request = requests.back();
    if (a.tree_mask == nullptr || a.extend_lens == nullptr) continue;
    const uint64_t rows = static_cast<uint64_t>(request.length), columns = static_cast<uint64_t>(request.tree);
    if (columns > 0 && rows > (a.tree_mask_bytes - mask_bytes) / columns)  // 64 bits need not hold rows * columns
      refuse(EYAS_CPU_BAD_ARGUMENT, "tree_mask", "%llu entries, of which %llu are left for request %lld|%llu times %llu, "
             "for each query as many as its request's masked keys", static_cast<unsigned long long>(a.tree_mask_bytes),
             static_cast<unsigned long long>(a.tree_mask_bytes - mask_bytes), static_cast<Long>(b),
             static_cast<unsigned long long>(rows), static_cast<unsigned long long>(columns));
    request.tree_mask = a.tree_mask + mask_bytes;
    mask_bytes += rows * columns;
  }
  for (Request& request : requests)
    if (request.tree_mask != nullptr) list_seen(request);
  return requests;
}

}  // namespace eyas::cpu
