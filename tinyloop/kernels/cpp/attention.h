// Causal attention of packed segments straight over the pages: tiles of keys, a running softmax, sums in float.
//
// Tiles begin at multiples of TILE in the sequence, so what a row gets depends on its own segment alone. Segments with
// few query rows (an answer token) read the pages where they lie; a block of prompt rows first brings each tile, 64
// tokens of one head, into the layout that the product wants.
#pragma once

#include "common.h"
#include "product.h"
#include "threads.h"
#include "tiles.h"

#include <type_traits>

namespace tinyloop {

constexpr int TILE = 4 * W;       // keys
constexpr int BLOCK = 144;        // query rows times the heads that share a key head, about
constexpr int FEW = 4;            // query rows that are not worth rearranging keys for
constexpr int LARGEST_HEAD = 1024;
constexpr float NOWHERE = -INFINITY;

// One segment as the batch gives it; see tinyloop/kernels/reads.py.
struct Span {
  int64_t row, rows, start, window, first, offset;
};

// Refuses segments whose rows are not in the batch, or whose pages are not there.
inline void check_spans(const Span* spans, long segments, long rows, long blocks, long page_size) {
  for (const Span* s = spans; s < spans + segments; s++) {
    long last = (s->start + s->rows - 1 - s->first) / page_size;
    bool there = s->row >= 0 && s->rows > 0 && s->row + s->rows <= rows && s->first >= 0 && s->first <= s->start;
    if (!there || s->offset < 0 || s->offset + last >= blocks) throw std::out_of_range("a segment beyond its batch");
  }
}

template <class T>
struct Pages {
  const T *keys, *values;
  const int64_t* ids;
  long page_size, kv_heads, head_dim;

  // Elements before the vectors of one head of the tokens [from, to).
  void find(const Span& s, long from, long to, long head, long* at) const {
    const int64_t* page = ids + s.offset + (from - s.first) / page_size;
    long within = (from - s.first) % page_size;
    for (long position = from; position < to; position++) {
      *at++ = ((*page * page_size + within) * kv_heads + head) * head_dim;
      if (++within == page_size) page++, within = 0;
    }
  }
};

// Room of one thread. `padded` is head_dim up to a multiple of W, rows go up to a multiple of 16.
struct Scratch {
  std::vector<float> q, scores, out, keys, values, top, base, shrink, weight;
  std::vector<bf16> narrow_q, narrow_weights, packed;
  long at[TILE];  // where the keys of a tile lie, from the first that is looked at
  int padded = 0;

  void fit(int rows, int head_dim) {
    padded = (head_dim + W - 1) / W * W;
    int full = (rows + 15) / 16 * 16;
    q.resize(rows * padded);
    out.assign(full * padded, 0.0f);
    scores.resize(full * TILE);
    keys.resize(TILE * padded);
    values.resize(TILE * padded);
    top.assign(full, NOWHERE);
    base.resize(full);
    shrink.resize(full);
    weight.assign(full, 0.0f);
    narrow_q.resize(full * padded);
    narrow_weights.resize(full * TILE);
    packed.resize(TILE * padded);
  }
};

// A block of query rows of one segment, for one key head. Row m of the block is query m / shared, head m % shared.
template <class T>
struct Block {
  const Pages<T>& pages;
  const Span& span;
  long head, first_query;
  int queries, shared;
  Scratch& room;
  Tiles& tiles;

  int rows() const { return queries * shared; }
  long position(int m) const { return span.start + first_query + m / shared; }
  long low(long position) const {
    return std::max(span.first, span.window ? position - span.window + 1 : 0);
  }

  // Elements of q, or of what is written, before row m.
  long row_of(int m, long heads) const {
    return ((span.row + first_query + m / shared) * heads + head * shared + m % shared) * pages.head_dim;
  }

  void read_queries(const T* q, long heads) {
    int d = pages.head_dim;
    for (int m = 0; m < rows(); m++) {
      const T* in = q + row_of(m, heads);
      float* to = room.q.data() + m * room.padded;
      strips(d, [&](int i, int w) { store(to + i, load(in + i, w)); });
    }
  }

  // Scores of the keys [from, to) of the tile, in the columns after from % TILE.
  void score_where_they_lie(long from, long to) {
    int d = pages.head_dim;
    for (long first = from; first < to; first += W) {
      int count = (int)std::min<long>(W, to - first);
      const T* k[W];
      for (int i = 0; i < W; i++) k[i] = pages.keys + room.at[first - from + std::min(i, count - 1)];
      for (int m = 0; m < rows(); m++) {
        const float* x = room.q.data() + m * room.padded;
        vec totals[W];
#pragma GCC unroll 16
        for (int key = 0; key < W; key++) totals[key] = load(x) * load(k[key]);
        for (int i = W; i < d; i += W)
#pragma GCC unroll 16
          for (int key = 0; key < W; key++) totals[key] += load(x + i) * load(k[key] + i);
        store(room.scores.data() + m * TILE + first % TILE, sums(totals), count);
      }
    }
  }

  void score_tile(long from, long to) {
    int d = pages.head_dim;
    float* turned = room.keys.data();  // [head_dim, TILE]
    const float* lines[LARGEST_HEAD];
    for (int i = 0; i < d; i++) lines[i] = turned + i * TILE;
    for (long key = from; key < to; key++) {
      const T* k = pages.keys + room.at[key - from];
      strips(d, [&](int i, int w) {
        float part[W];
        store(part, load(k + i, w));
        for (int j = 0; j < w; j++) turned[(i + j) * TILE + key % TILE] = part[j];
      });
    }
    product(rows(), TILE, d, room.q.data(), room.padded, lines, room.scores.data(), TILE, false);
  }

#if defined(__AMX_BF16__)
  // The tile's keys or values; those outside [from, to) are zero.
  void lines_of(const bf16* cache, long from, long to, const bf16** lines) const {
    static const bf16 zeros[LARGEST_HEAD] = {};
    long tile = from / TILE * TILE;
    for (int i = 0; i < TILE; i++)
      lines[i] = tile + i < from || tile + i >= to ? zeros : cache + room.at[tile + i - from];
  }

  int full_rows() const { return (rows() + 15) / 16 * 16; }

  // Whether 16 keys of a page, as they lie, are a tile.
  bool lies_in_tiles() const { return pages.page_size % 16 == 0; }

  // Pairs of elements go down, queries across.
  void turn_queries(const bf16* q, long heads) {
    int d = (int)pages.head_dim, n = rows();
    for (int m = 0; m < n; m++) {
      const bf16* from = q + row_of(m, heads);
      for (int i = 0; i < d; i += 2) std::memcpy(&room.narrow_q[(i / 2 * n + m) * 2], from + i, 2 * sizeof(bf16));
    }
    tiles.use_for(n);
  }

  // For few queries. Scores come as keys x queries, so that no key is moved; then they are turned.
  void score_in_tiles(long from, long to) {
    const int d = (int)pages.head_dim, n = rows();
    const long tile = from / TILE * TILE, kept = pages.kv_heads * d;
    float* turned = room.keys.data();
    settle();
    for (long first = from / 16 * 16; first < to; first += 16) {
      long key = std::max(first, from);
      const bf16* k = pages.keys + room.at[key - from] - (key - first) * kept;
      _tile_zero(0);
      for (int i = 0; i < d; i += 32) {
        _tile_loadd(4, k + i, kept * 2);
        _tile_loadd(6, room.narrow_q.data() + i * n, n * 4);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, turned + (first - tile) * n, n * 4);
    }
    settle();
    for (int m = 0; m < n; m++)
      for (int key = 0; key < TILE; key++) room.scores[m * TILE + key] = turned[key * n + m];
  }

  void add_in_tiles(long from, long to) {
    const bf16* lines[TILE];
    const int d = (int)pages.head_dim;
    const bool both = to - from / TILE * TILE > 32;
    lines_of(pages.values, from, to, lines);
    pack_values(lines, d, room.packed.data());
    settle();
    _tile_loadd(2, room.narrow_weights.data(), TILE * 2);
    _tile_loadd(3, room.narrow_weights.data() + 32, TILE * 2);
    for (int n = 0; n < d; n += 16) {
      const bf16* v = room.packed.data() + n / 32 * 2048 + n % 32 * 32;
      float* out = room.out.data() + n;
      _tile_loadd(5, out, room.padded * 4);
      _tile_loadd(7, v, 64);
      _tile_dpbf16ps(5, 2, 7);
      if (both) {
        _tile_loadd(7, v + 1024, 64);
        _tile_dpbf16ps(5, 3, 7);
      }
      _tile_stored(5, out, room.padded * 4);
    }
    settle();
  }

  void narrow_queries(const bf16* q, long heads) {
    int d = pages.head_dim;
    std::fill(room.narrow_q.begin(), room.narrow_q.end(), 0);
    for (int m = 0; m < rows(); m++) std::memcpy(&room.narrow_q[m * d], q + row_of(m, heads), d * sizeof(bf16));
    tiles.use(16, 16);
  }

  void score_by_matrix(long from, long to) {
    const bf16* lines[TILE];
    int d = pages.head_dim;
    lines_of(pages.keys, from, to, lines);
    pack_keys(lines, d, room.packed.data());
    tile_product<false>(full_rows(), TILE, d, room.narrow_q.data(), d, room.packed.data(), room.scores.data(), TILE);
  }

  void add_by_matrix(long from, long to) {
    const bf16* lines[TILE];
    int d = pages.head_dim;
    lines_of(pages.values, from, to, lines);
    pack_values(lines, d, room.packed.data());
    tile_product<true>(full_rows(), d, TILE, room.narrow_weights.data(), TILE, room.packed.data(), room.out.data(), d);
  }
#endif

  // Scores become weights exp(score - top), and what was summed before shrinks to the new top. They go to `weights`.
  template <class S>
  void soften(long from, long to, S* weights) {
    long tile = from / TILE * TILE;
    const vec scale = splat(1.0f / std::sqrt((float)pages.head_dim)), twos = scale * LOG2_E;
    for (int first = 0; first < rows(); first += W) {
      const int count = std::min(W, rows() - first);
      vec lines[W];
      for (vec& line : lines) line = splat(NOWHERE);
      for (int m = first; m < first + count; m++) {
        float* s = room.scores.data() + m * TILE;
        int begin = std::max(low(position(m)), from) - tile, end = std::min(position(m) + 1, to) - tile;
        if (begin > 0) std::fill(s, s + std::min(begin, TILE), NOWHERE);
        if (end < TILE) std::fill(s + std::max(end, 0), s + TILE, NOWHERE);
        lines[m - first] = larger(larger(load(s), load(s + W)), larger(load(s + 2 * W), load(s + 3 * W)));
      }
      vec before = load(&room.top[first]), top = larger(before, largest(lines) * scale);
      vec base = top == NOWHERE ? splat(0.0f) : top;  // nothing seen so far: all weights are zero
      vec shrink = exponential(before - base);
      store(&room.top[first], top);
      store(&room.base[first], base);
      store(&room.shrink[first], shrink);
      for (vec& line : lines) line = vec{};
      for (int m = first; m < first + count; m++) {
        const float* s = room.scores.data() + m * TILE;
        for (int i = 0; i < TILE; i += W) {
          vec e;
          if constexpr (std::is_same_v<S, bf16>)
            e = rough_power(load(s + i) * twos - room.base[m] * LOG2_E);
          else
            e = exponential(load(s + i) * scale - room.base[m]);
          store(weights + m * TILE + i, e);
          lines[m - first] += e;
        }
        shrink_row(m);
      }
      store(&room.weight[first], load(&room.weight[first]) * shrink + sums(lines));
    }
  }

  void shrink_row(int m) {
    float* o = room.out.data() + m * room.padded;
    if (room.shrink[m] != 1.0f)
      for (int i = 0; i < room.padded; i += W) store(o + i, load(o + i) * room.shrink[m]);
  }

  void add_where_they_lie(long from, long to) {
    const T* rows_of_values[TILE];
    for (long key = from; key < to; key++) rows_of_values[key - from] = pages.values + room.at[key - from];
    product(rows(), (int)pages.head_dim, (int)(to - from), room.scores.data() + from % TILE, TILE, rows_of_values,
            room.out.data(), room.padded, true);
  }

  void add_tile(long from, long to) {
    const float* rows_of_values[TILE];
    for (long key = from; key < to; key++) {
      const T* v = pages.values + room.at[key - from];
      float* to_row = room.values.data() + (key - from) * room.padded;
      strips((int)pages.head_dim, [&](int i, int w) { store(to_row + i, load(v + i, w)); });
      rows_of_values[key - from] = to_row;
    }
    product(rows(), room.padded, (int)(to - from), room.scores.data() + from % TILE, TILE, rows_of_values,
            room.out.data(), room.padded, true);
  }

  void write(T* out, long heads) {
    int d = pages.head_dim;
    for (int m = 0; m < rows(); m++) {
      T* to = out + row_of(m, heads);
      const float* o = room.out.data() + m * room.padded;
      float scale = 1.0f / room.weight[m];
      strips(d, [&](int i, int w) { store(to + i, load(o + i) * scale, w); });
    }
  }

  // How the scores of a tile are found and its values added.
  typedef void (Block::*Step)(long from, long to);

  template <class S>
  void walk(Step score, S* weights, Step add) {
    long end = position(rows() - 1) + 1;
    for (long from = low(position(0)); from < end; from = from / TILE * TILE + TILE) {
      long to = std::min(end, from / TILE * TILE + TILE);
      pages.find(span, from, to, head, room.at);
      (this->*score)(from, to);
      soften(from, to, weights);
      (this->*add)(from, to);
    }
  }

  void run(const T* q, T* out, long heads) {
    room.fit(rows(), (int)pages.head_dim);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bf16>)
      if (pages.head_dim % 32 == 0) {
        if (rows() <= 16 && lies_in_tiles()) {
          turn_queries(q, heads);
          walk(&Block::score_in_tiles, room.narrow_weights.data(), &Block::add_in_tiles);
        } else {
          narrow_queries(q, heads);
          walk(&Block::score_by_matrix, room.narrow_weights.data(), &Block::add_by_matrix);
        }
        return write(out, heads);
      }
#endif
    bool few = rows() <= FEW && pages.head_dim % W == 0;
    read_queries(q, heads);
    few ? walk(&Block::score_where_they_lie, room.scores.data(), &Block::add_where_they_lie)
        : walk(&Block::score_tile, room.scores.data(), &Block::add_tile);
    write(out, heads);
  }
};

// q, out: [rows, heads, head_dim]; keys, values: [pages, page_size, kv_heads, head_dim].
template <class T>
void attention(const T* q, const Pages<T>& pages, const Span* spans, long segments, T* out, long heads, int threads) {
  int shared = (int)(heads / pages.kv_heads), step = std::max(1, BLOCK / shared);
  struct Item {
    const Span* span;
    long query;
  };
  std::vector<Item> items;
  for (long s = 0; s < segments; s++)
    for (long query = (spans[s].rows - 1) / step * step; query >= 0; query -= step) items.push_back({spans + s, query});
  parallel_workers(threads, (long)items.size() * pages.kv_heads, [&] {
    return [&, tiles = Tiles()](long i) mutable {
      static thread_local Scratch room;
      const Item& item = items[i / pages.kv_heads];
      int queries = (int)std::min<long>(step, item.span->rows - item.query);
      Block<T>{pages, *item.span, i % pages.kv_heads, item.query, queries, shared, room, tiles}.run(q, out, heads);
    };
  });
}

}  // namespace tinyloop
