// Random launches of the attention kernels' own source on a CPU, against double precision: emulate CASES SEED, exit code 1 when
// a case differs, 2 for an access outside shared memory, a misalignment or a deadlock. PART says which kernels.
#include "combine.cuh"
#include "gqa_kernel.cuh"
#include "mla_kernel.cuh"
#include "tiles.cuh"

using namespace eyas;

namespace {

int pick(std::initializer_list<int> l) { return l.begin()[cpu::rng() % l.size()]; }
float normal() { return std::normal_distribution<float>()(cpu::rng); }

// One random problem: requests over a paged cache with unused slots, and everything a launch is told of it.
template <class T, bool E4M3, int DK> struct Problem {
  static constexpr bool MLA = DK == 576;
  static constexpr int DV = MLA ? 512 : DK;
  int batch = pick({1, 2}), kv_heads = MLA ? 1 : pick({1, 2}), per = pick({1, 3, 8}), heads = kv_heads * per, top = pick({1, 5, 16, 33});
  int tree_keys = pick({0, 0, 1, 20, 70});  // above 0: queries of a draft's step, a masked choice of so many keys each
  int page = pick({1, 1, 3, 16}), window = tree_keys ? 0 : pick({0, 0, 0, 1, 40}), words = (std::max(top, tree_keys) + 31) / 32 + pick({0, 1});
  bool ragged = pick({0, 1}), prefixes = pick({0, 1}), flat = pick({0, 1}), masked = tree_keys || pick({0, 1, 1, 1}), one_mask = tree_keys && pick({0, 1});
  std::vector<int> trees, keys, lens, pages, q_start = {0}, starts, order, index;  // keys: those that the mask covers
  std::vector<int64_t> rows, seq_lens, positions;
  std::vector<std::vector<char>> sees;  // of all requests' nodes one after the other
  std::vector<uint32_t> mask;
  std::vector<uint16_t> q, out, part;
  std::vector<uint16_t> k, v;  // bytes of e4m3 where that is the cache
  std::vector<float> lse;
  std::vector<float2> stat;
  AttnParams p = {};

  size_t slot(int b, int n) const { return (size_t)order[starts[b] + n / page] * page + n % page; }
  float cached(const std::vector<uint16_t> &cache, int b, int n, int head, int d) const {
    const size_t at = (slot(b, n) * kv_heads + head) * DK + d;
    return E4M3 ? e4m3_value(((const uint8_t *)cache.data())[at]) : Scalar<T>::widen(cache[at]);
  }
  void fill(std::vector<uint16_t> &cache, size_t slots) {
    cache.assign(slots * kv_heads * DK, 0x7fff);  // NaN in every type
    for (int b = 0; b < batch; ++b)
      for (int n = 0; n < lens[b]; ++n)
        for (int i = 0; i < kv_heads * DK; ++i) {
          const size_t at = slot(b, n) * kv_heads * DK + i;
          if (E4M3) ((uint8_t *)cache.data())[at] = cpu::rng() % 0x41 | (cpu::rng() & 0x80);  // up to 2
          else cache[at] = Scalar<T>::round(normal());
        }
  }
  explicit Problem(bool keyless) {  // keyless: the first request has no keys
    int total = 0;
    prefixes &= !keyless;
    for (int b = 0; b < batch; ++b) {
      trees.push_back(ragged ? 1 + cpu::rng() % top : top);
      keys.push_back(tree_keys ? tree_keys : trees[b]);
      lens.push_back(keyless && b == 0 ? 0 : keys[b] + pick({0, 1, 31, (int)(cpu::rng() % 300), (int)(cpu::rng() % 1200)}));
      pages.push_back((lens[b] + page - 1) / page);
      starts.push_back(total);
      total += pages[b];
      q_start.push_back(q_start[b] + trees[b]);
      rows.push_back(batch - b);
      seq_lens.push_back(lens[b] - (prefixes ? keys[b] : 0));
    }
    for (int i = 0; i < total + 2; ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), cpu::rng);
    const int columns = *std::max_element(pages.begin(), pages.end()) + 3;
    if (flat) index.assign(order.begin(), order.begin() + total);
    else index.assign((size_t)(batch + 1) * columns, 1 << 29);
    for (int b = 0; !flat && b < batch; ++b) std::copy_n(&order[starts[b]], pages[b], &index[(size_t)rows[b] * columns]);
    mask.assign((size_t)batch * top * words, 0);
    for (int b = 0; b < batch; ++b) tree_keys ? choose_keys(b) : grow_tree(b);
    fill(k, (size_t)(total + 2) * page);
    if (!MLA) fill(v, (size_t)(total + 2) * page);
    const float gain = pick({1, 4}) * (E4M3 ? 0.3f : 1.f);
    for (size_t i = 0; i < (size_t)q_start[batch] * heads * DK; ++i) q.push_back(Scalar<T>::round(normal() * gain));
    out.assign((size_t)q_start[batch] * heads * DV, 0x7fff);
    lse.assign((size_t)q_start[batch] * heads, NAN);
    describe(columns);
  }
  void grow_tree(int b) {
    const size_t first = sees.size();
    std::vector<int> depth;
    for (int i = 0; i < trees[b]; ++i) {
      const int parent = masked ? std::max(0, i - 1 - (int)(cpu::rng() % 4)) : i - 1;
      sees.push_back(i ? sees[first + parent] : std::vector<char>(trees[b], 0));
      sees.back()[i] = 1;
      depth.push_back(i ? depth[parent] + 1 : 0);
      positions.push_back(lens[b] - trees[b] + depth[i]);
      for (int j = 0; j < trees[b]; ++j) mask[((size_t)b * top + i) * words + j / 32] |= (uint32_t)sees.back()[j] << (j % 32);
    }
  }
  void choose_keys(int b) {
    const size_t first = one_mask ? 0 : (size_t)b * top * words;
    for (int i = 0; (!b || !one_mask) && i < top * words; ++i) mask[first + i] = cpu::rng() & cpu::rng();  // behind the keys too
    for (int i = 0; i < trees[b]; ++i) {
      uint32_t *row = &mask[first + (size_t)i * words];
      row[0] |= 1;  // a query sees something
      sees.emplace_back(tree_keys);
      for (int j = 0; j < tree_keys; ++j) sees.back()[j] = row[j / 32] >> (j % 32) & 1;
    }
  }
  void describe(int columns) {
    eyas_attn &a = p.a;
    a.tree_keys = tree_keys;
    a.q = q.data(), a.out = out.data(), a.lse = lse.data(), a.k = k.data(), a.v = MLA ? nullptr : v.data();
    a.q_stride_token = heads * DK, a.q_stride_head = DK, a.out_stride_token = heads * DV, a.out_stride_head = DV;
    a.kv_stride_head = DK, a.kv_stride_token = kv_heads * DK, a.kv_stride_page = (int64_t)page * kv_heads * DK;
    a.kv_index = index.data(), a.index_stride = columns;
    a.index_rows = flat ? nullptr : rows.data(), a.index_start = flat ? starts.data() : nullptr;
    a.q_start = ragged ? q_start.data() : nullptr, a.seq_lens = seq_lens.data(), a.seq_lens_are_prefix = prefixes;
    a.mask = masked ? mask.data() : nullptr, a.mask_words = words, a.mask_stride_batch = one_mask ? 0 : (int64_t)top * words;
    a.positions = tree_keys ? nullptr : positions.data(), a.window = window, a.page_size = page, a.batch = batch, a.max_tree = top;
    a.num_q_heads = heads, a.num_kv_heads = kv_heads, a.scale = 1.f / std::sqrt((float)DK);
    a.k_scale = E4M3 ? 0.5f : 1.f, a.v_scale = E4M3 && !MLA ? 2.f : a.k_scale;
    a.stages = pick({2, 3}), p.scale_log2 = a.scale * 1.44269504089f * a.k_scale;
    split(pick({1, 2, 3, 7}));
  }
  void split(int splits) {
    p.a.num_splits = splits;
    part.assign((size_t)splits * batch * top * heads * DV, 0x7fff);
    stat.assign((size_t)splits * batch * top * heads, {NAN, NAN});
    p.part_out = part.data(), p.part_stat = stat.data();
  }
  // Largest relative error of a row and of a log-sum-exp; whatever is NaN counts as 9. Without keys: zeros and -inf.
  std::pair<double, double> errors() const {
    double row_error = 0, lse_error = 0;
    for (int b = 0; b < batch; ++b)
      for (int t = q_start[b]; t < q_start[b + 1]; ++t)
        for (int h = 0; h < heads; ++h) {
          std::vector<double> score(lens[b], -INFINITY), sum(DV, 0.);
          double top_score = -INFINITY, total = 0, wrong = 0, size = 0;
          for (int n = 0; n < lens[b]; ++n) {
            const int node = n - (lens[b] - keys[b]);
            if (node >= 0 && !sees[t][node]) continue;
            if (window && positions[t] - (node < 0 ? n : positions[q_start[b] + node]) >= window) continue;
            score[n] = 0;
            for (int d = 0; d < DK; ++d) score[n] += (double)Scalar<T>::widen(q[((size_t)t * heads + h) * DK + d]) * cached(k, b, n, h / per, d);
            top_score = std::max(top_score, score[n] *= p.a.scale * p.a.k_scale);
          }
          for (int n = 0; n < lens[b]; ++n) {
            const double w = std::exp(score[n] - top_score);
            total += w;
            for (int d = 0; w > 0 && d < DV; ++d) sum[d] += w * cached(MLA ? k : v, b, n, h / per, d) * p.a.v_scale;
          }
          for (int d = 0; d < DV; ++d) {
            const double wanted = lens[b] ? sum[d] / total : 0, e = Scalar<T>::widen(out[((size_t)t * heads + h) * DV + d]) - wanted;
            wrong += e * e, size += wanted * wanted;
          }
          const float found = lse[(size_t)t * heads + h];
          const double e = lens[b] ? std::abs(found - (top_score + std::log(total))) : found == -INFINITY ? 0 : 9;
          row_error = std::max(row_error, std::isnan(wrong) ? 9 : std::sqrt(wrong / std::max(size, 1e-9)));
          lse_error = std::max(lse_error, std::isnan(e) ? 9 : e);
        }
    return {row_error, lse_error};
  }
};

// keyless_splits: 0, or of how many splits a launch is whose first request has no keys.
template <class T, bool E4M3, class Tile, int DK> bool agrees(const char *name, int keyless_splits) {
  Problem<T, E4M3, DK> x(keyless_splits > 0);
  eyas_attn &a = x.p.a;
  if (keyless_splits) x.split(keyless_splits);
  cpu::arrival = (cpu::Arrival)pick({0, 1, 2});
  const AttnParams &p = x.p;
  if constexpr (x.MLA) {
    a.groups = 1;
    if (Tile::smem_bytes(a.stages) > (int)sizeof(smem)) a.stages = 2;
    const dim3 blocks = {(x.top * x.heads + Tile::BM - 1) / Tile::BM, a.num_splits, x.batch};
    cpu::launch(blocks, Tile::THREADS, Tile::smem_bytes(a.stages), [&p] { mla_kernel<T, E4M3, Tile>(p); });
  } else {
    a.groups = pick({256, 256, 128}) / Tile::GT;
    const dim3 blocks = {x.kv_heads, a.num_splits * ((x.top * x.per + Tile::BM - 1) / Tile::BM), x.batch};
    while (Tile::smem_bytes(a.groups, a.stages) > (int)sizeof(smem)) a.stages > 2 ? --a.stages : a.groups /= 2;
    cpu::launch(blocks, a.groups * Tile::GT, Tile::smem_bytes(a.groups, a.stages), [&p] { gqa_kernel<T, E4M3, Tile>(p); });
  }
  if (a.num_splits > 1) {
    const int items = x.batch * x.top * x.heads * ((x.DV + 127) / 128);
    cpu::launch({(items + 7) / 8, 1, 1}, 256, 0, [&p] { combine_kernel<T, Problem<T, E4M3, DK>::DV>(p, Tile::BN); });
  }
  const auto [row, lse] = x.errors();
  if (row < 0.024 && lse < 2e-3) return true;
  std::printf("%s: row %.1e lse %.1e: batch %d heads %d/%d top %d page %d window %d splits %d groups %d stages %d arrival %d mask %d tree_keys %d lens",
              name, row, lse, x.batch, x.heads, x.kv_heads, x.top, x.page, x.window, a.num_splits, a.groups, a.stages, cpu::arrival, x.masked, x.tree_keys);
  for (int b = 0; b < x.batch; ++b) std::printf(" %d (%d)", x.lens[b], x.trees[b]);
  std::printf("\n");
  return false;
}

// Every tile belongs to exactly one split, and the splits that have any come first.
bool splits_cover_all() {
  for (int splits : {1, 2, 3, 7, 16})
    for (int groups : {1, 2, 8})
      for (int len = 0; len < 1500; len += 7) {
        eyas_attn a = {};
        a.num_splits = splits, a.groups = groups;
        const Request r = {0, 1, len, len - 1};
        int next = 0;
        for (int split = 0; split < splits; ++split) {
          const Span span = split_span(a, r, 16, split);
          const bool used = split < span.active;
          if (used != (span.count > 0) || (used && span.first != next)) next = -1 << 20;
          if (used) next += span.count;
        }
        if (next == (len + 15) / 16) continue;
        std::printf("%d splits of %d groups do not cover %d keys\n", splits, groups, len);
        return false;
      }
  return true;
}

}  // namespace

#define CASE(T, E4M3, TILE, DK) wrong += !agrees<T, E4M3, TILE, DK>(#T " " #TILE, keyless_splits);
int main(int, char **given) {
  const int cases = std::atoi(given[1]);
  int wrong = 0;
  cpu::rng.seed(std::atoi(given[2]));
  wrong += !splits_cover_all();
  for (int i = 0; i < cases + 2; ++i) {  // the last two: a request without keys, of one split and of several
    const int keyless_splits = i < cases ? 0 : i == cases ? 1 : 3;
#if PART == 1
    CASE(Bf16, false, Gqa128Rows128<false>, 128)
    CASE(Bf16, true, Gqa128Rows32<true>, 128)
    CASE(Fp16, true, Gqa96Rows128<true>, 96)
    CASE(Fp16, false, Gqa256Rows64<false>, 256)
#elif PART == 2
    CASE(Bf16, false, MlaRows64, 576)
    CASE(Fp16, true, MlaRows32E4m3, 576)
#elif PART == 3
    CASE(Bf16, true, Gqa64Rows64<true>, 64)
    CASE(Fp16, false, Gqa96Rows32<false>, 96)
    CASE(Fp16, true, Gqa128Rows128Small<true>, 128)
    CASE(Bf16, true, Gqa192Rows16<true>, 192)
    CASE(Bf16, false, Gqa192Rows64<false>, 192)
    CASE(Fp16, true, Gqa256Rows16<true>, 256)
#elif PART == 4
    CASE(Bf16, false, MlaRows32, 576)
    CASE(Bf16, true, MlaRows64E4m3, 576)
#endif
  }
  std::printf("%d wrong\n", wrong);
  return wrong > 0;
}
