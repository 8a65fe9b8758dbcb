// Rows into a KV pool, and rows moved inside it.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "convert.h"
#include "threads.h"

namespace eyas::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

void check_slots(const int64_t* loc, int64_t count, int64_t slots, const char* argument) {
  for (int64_t i = 0; i < count; ++i)
    if (loc[i] < 0 || (slots >= 0 && loc[i] >= slots))
      refuse(EYAS_CPU_OUT_OF_RANGE, argument, "slot %lld at %lld|0 to %lld, the pool's slots",
             static_cast<long long>(loc[i]), static_cast<long long>(i), static_cast<long long>(slots - 1));
}

template <class From, class To>
void write_rows(const eyas_cpu_write& w, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i)
    for (int64_t h = 0; h < w.heads; ++h) {
      const From* from = static_cast<const From*>(w.source) + i * w.source_stride_token + h * w.source_stride_head;
      To* to = static_cast<To*>(w.buffer) + w.loc[i] * w.buffer_stride_token + h * w.buffer_stride_head;
      if constexpr (std::is_same_v<From, To>)
        std::memcpy(to, from, static_cast<std::size_t>(w.width) * sizeof(To));
      else
        for (int64_t d = 0; d < w.width; ++d) from_float(to_float(from[d]), to[d]);
    }
}

void move_rows(uint8_t* buffer, uint64_t stride, uint64_t bytes, const int64_t* tgt, const int64_t* src, int64_t count) {
  std::vector<uint8_t> rows(static_cast<std::size_t>(count) * bytes);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(rows.data() + static_cast<uint64_t>(i) * bytes, buffer + static_cast<uint64_t>(src[i]) * stride, bytes);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(buffer + static_cast<uint64_t>(tgt[i]) * stride, rows.data() + static_cast<uint64_t>(i) * bytes, bytes);
}

}  // namespace
}  // namespace eyas::cpu

extern "C" {

int32_t eyas_cpu_kv_write(const eyas_cpu_write* write) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(write, "write");
    const eyas_cpu_write& w = *write;
    check_slots(w.loc, w.rows, w.slots, "loc");
    with_dtype(w.dtype, "k", [&](auto* from) {
      with_dtype(w.buffer_dtype, "k_buffer", [&](auto* to) {
        using From = std::remove_pointer_t<decltype(from)>;
        using To = std::remove_pointer_t<decltype(to)>;
        const int64_t tasks = (w.rows + kRowsPerTask - 1) / kRowsPerTask;
        parallel_for(tasks, w.rows * w.heads * w.width, [&](int64_t task) {
          write_rows<From, To>(w, task * kRowsPerTask, std::min(w.rows, (task + 1) * kRowsPerTask));
        });
      });
    });
  });
}

int32_t eyas_cpu_kv_move(const uint64_t* buffers, const uint64_t* slot_strides, const uint64_t* slot_bytes,
                         int32_t num_buffers, int64_t slots, const int64_t* tgt_loc, const int64_t* src_loc,
                         int64_t count) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_slots(tgt_loc, count, slots, "tgt_loc");
    check_slots(src_loc, count, slots, "src_loc");
    int64_t bytes = 0;
    for (int64_t i = 0; i < num_buffers; ++i) bytes += static_cast<int64_t>(slot_bytes[i]);
    parallel_for(num_buffers, count * bytes, [&](int64_t i) {
      move_rows(reinterpret_cast<uint8_t*>(buffers[i]), slot_strides[i], slot_bytes[i], tgt_loc, src_loc, count);
    });
  });
}
}
