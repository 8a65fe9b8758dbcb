// Draft trees: from the list of selected candidates or from a mask, to mask, positions and the links verify walks.
#include <cstring>
#include <vector>

#include "error.h"

namespace eyas::cpu {
namespace {

constexpr int kMaxNodes = 4096;

using Parents = std::vector<int32_t>;  // [B, n]: parent of each node, -1 for the root

void check_sizes(const eyas_cpu_tree& t) {
  if (t.batch < 0) refuse(EYAS_CPU_BAD_ARGUMENT, "batch", "%d|0 or more", t.batch);
  if (t.nodes < 1 || t.nodes > kMaxNodes)
    refuse(EYAS_CPU_BAD_TREE, "num_nodes", "a tree of %d nodes|1 to %d, the root included", t.nodes, kMaxNodes);
  for (int b = 0; b < t.batch; ++b)
    if (t.seq_lens[b] < 0)
      refuse(EYAS_CPU_OUT_OF_RANGE, "seq_lens", "%lld for request %d|0 or more",
             static_cast<long long>(t.seq_lens[b]), b);
}

uint64_t row_bytes(const eyas_cpu_tree& t) {
  if (t.mask_mode == EYAS_CPU_MASK_BITS) return t.nodes <= 8 ? 1 : t.nodes <= 16 ? 2 : 4;
  return 4 * ((static_cast<uint64_t>(t.nodes) + 31) / 32);
}

uint64_t mask_bytes(const eyas_cpu_tree& t) {
  const uint64_t n = static_cast<uint64_t>(t.nodes), batch = static_cast<uint64_t>(t.batch);
  switch (t.mask_mode) {
    case EYAS_CPU_MASK_FULL: {
      uint64_t bytes = batch * n * n;
      for (int b = 0; b < t.batch; ++b) {
        const uint64_t length = static_cast<uint64_t>(t.seq_lens[b]);
        if (length > t.tree_mask_bytes / n)  // before n * length, which 64 bits need not hold
          refuse(EYAS_CPU_OUT_OF_RANGE, "seq_lens", "%llu for request %d|0 to %llu, what tree_mask's %llu bytes can hold",
                 static_cast<unsigned long long>(length), b, static_cast<unsigned long long>(t.tree_mask_bytes / n),
                 static_cast<unsigned long long>(t.tree_mask_bytes));
        bytes += n * length;
      }
      return bytes;
    }
    case EYAS_CPU_MASK_TREE_ONLY:
      return batch * n * n;
    case EYAS_CPU_MASK_BITS:
      if (t.nodes > 32)
        refuse(EYAS_CPU_BAD_TREE, "mask_mode", "bit-packed rows for %d nodes|at most 32 nodes in mode 2; use mode 3",
               t.nodes);
      return batch * n * row_bytes(t);
    case EYAS_CPU_MASK_WORDS:
      return batch * n * row_bytes(t);
    default:
      refuse(EYAS_CPU_BAD_ARGUMENT, "mask_mode", "%d|0 full, 1 tree only, 2 bits or 3 words", t.mask_mode);
  }
}

Parents parents_of_selection(const eyas_cpu_tree& t) {
  if (t.topk < 1) refuse(EYAS_CPU_BAD_ARGUMENT, "topk", "%d|1 or more", t.topk);
  const int n = t.nodes;
  Parents parents(static_cast<std::size_t>(t.batch) * n, -1);
  for (int b = 0; b < t.batch; ++b) {
    const int64_t* selected = t.selected_index + static_cast<int64_t>(b) * (n - 1);
    const int64_t* flat_of_slot = t.parent_list + b * t.parent_columns;
    int32_t* parent = parents.data() + static_cast<int64_t>(b) * n;
    for (int node = 1; node < n; ++node) {
      const int64_t slot = selected[node - 1] < 0 ? -1 : selected[node - 1] / t.topk;
      if (slot == 0) {
        parent[node] = 0;
        continue;
      }
      if (slot < 0 || slot >= t.parent_columns)
        refuse(EYAS_CPU_OUT_OF_RANGE, "selected_index",
               "%lld (request %d, node %d), whose parent slot is %lld|a slot inside parent_list's %lld columns",
               static_cast<long long>(selected[node - 1]), b, node, static_cast<long long>(slot),
               static_cast<long long>(t.parent_columns));
      int at = 0;
      while (at < n - 1 && selected[at] != flat_of_slot[slot]) ++at;
      if (at + 1 >= node)
        refuse(EYAS_CPU_BAD_TREE, "selected_index",
               "request %d, node %d is an orphan: its parent %lld is not selected before it|every parent selected, "
               "sorted ascending (NaN scores cause this)", b, node, static_cast<long long>(flat_of_slot[slot]));
      parent[node] = at + 1;
    }
  }
  return parents;
}

Parents parents_of_mask(const eyas_cpu_tree& t) {
  const int64_t n = t.nodes;
  Parents parents(static_cast<std::size_t>(t.batch * n), -1);
  for (int64_t b = 0; b < t.batch; ++b)
    for (int64_t node = 1; node < n; ++node) {
      const uint8_t* row = t.tree_mask + (b * n + node) * n;
      int64_t parent = node - 1;
      while (parent >= 0 && row[parent] == 0) --parent;
      if (parent < 0)
        refuse(EYAS_CPU_BAD_TREE, "tree_mask", "request %lld, node %lld sees no earlier node|a path to the root",
               static_cast<long long>(b), static_cast<long long>(node));
      parents[static_cast<std::size_t>(b * n + node)] = static_cast<int32_t>(parent);
    }
  return parents;
}

void write_links(const eyas_cpu_tree& t, int b, const int32_t* parent) {
  const int64_t n = t.nodes, base = b * n;
  for (int64_t node = 0; node < n; ++node) {
    t.retrive_index[base + node] = base + node;
    t.retrive_next_token[base + node] = -1;
    t.retrive_next_sibling[base + node] = -1;
    t.positions[base + node] = node == 0 ? t.seq_lens[b] : t.positions[base + parent[node]] + 1;
  }
  // Backwards, so that the smallest child ends up first and each sibling points to the next larger one.
  for (int64_t node = n - 1; node > 0; --node) {
    int64_t& first = t.retrive_next_token[base + parent[node]];
    t.retrive_next_sibling[base + node] = first;
    first = node;
  }
}

template <class Mark>
void walk_ancestors(const int32_t* parent, int node, const Mark& mark) {
  for (; node >= 0; node = parent[node]) mark(node);
}

void write_mask(const eyas_cpu_tree& t, int b, const int32_t* parent, uint8_t*& block) {
  const int n = t.nodes;
  const bool packed = t.mask_mode == EYAS_CPU_MASK_BITS || t.mask_mode == EYAS_CPU_MASK_WORDS;
  const uint64_t prefix = t.mask_mode == EYAS_CPU_MASK_FULL ? static_cast<uint64_t>(t.seq_lens[b]) : 0;
  const uint64_t stride = packed ? row_bytes(t) : prefix + static_cast<uint64_t>(n);
  for (int node = 0; node < n; ++node, block += stride) {
    std::memset(block, 1, prefix);
    std::memset(block + prefix, 0, stride - prefix);
    if (packed)
      walk_ancestors(parent, node, [&](int j) { block[j / 8] |= static_cast<uint8_t>(1u << (j % 8)); });
    else
      walk_ancestors(parent, node, [&](int j) { block[prefix + static_cast<uint64_t>(j)] = 1; });
  }
}

}  // namespace
}  // namespace eyas::cpu

extern "C" {

int32_t eyas_cpu_tree_build(const eyas_cpu_tree* tree) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(tree, "tree");
    check_sizes(*tree);
    const uint64_t wanted = mask_bytes(*tree);
    if (tree->tree_mask_bytes < wanted)
      refuse(EYAS_CPU_BAD_ARGUMENT, "tree_mask", "%llu bytes|%llu for these lengths and this mode",
             static_cast<unsigned long long>(tree->tree_mask_bytes), static_cast<unsigned long long>(wanted));
    const Parents parents = parents_of_selection(*tree);
    uint8_t* block = tree->tree_mask;
    for (int b = 0; b < tree->batch; ++b) {
      const int32_t* parent = parents.data() + static_cast<int64_t>(b) * tree->nodes;
      write_links(*tree, b, parent);
      write_mask(*tree, b, parent, block);
    }
  });
}

int32_t eyas_cpu_tree_from_mask(const eyas_cpu_tree* tree) {
  using namespace eyas::cpu;
  return guarded([&] {
    check_struct(tree, "tree");
    check_sizes(*tree);
    const Parents parents = parents_of_mask(*tree);
    for (int b = 0; b < tree->batch; ++b)
      write_links(*tree, b, parents.data() + static_cast<int64_t>(b) * tree->nodes);
  });
}

int32_t eyas_cpu_tree_validate(const uint8_t* tree_mask, int32_t batch, int32_t nodes, uint8_t* faults) {
  return eyas::cpu::guarded([&] {
    const int64_t n = nodes;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t node = 0; node < n; ++node) {
        const uint8_t* row = tree_mask + (b * n + node) * n;
        int64_t parent = node - 1;
        while (parent >= 0 && row[parent] == 0) --parent;
        uint8_t fault = row[node] == 0 ? 1 : 0;
        for (int64_t j = node + 1; j < n && fault == 0; ++j) fault = row[j] != 0 ? 2 : 0;
        if (fault == 0 && node > 0 && parent < 0) fault = 3;
        for (int64_t j = 0; j < parent && fault == 0; ++j)
          fault = (row[j] != 0) != (tree_mask[(b * n + parent) * n + j] != 0) ? 4 : 0;
        faults[b * n + node] = fault;
      }
  });
}
}
