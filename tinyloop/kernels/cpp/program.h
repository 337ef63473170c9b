// A program: what the layers of a section ask of the kernels, in order, run over the rows of a step in one call.
//
// It is recorded once (tinyloop/kernels/program.py). A step of it is ten whole numbers: which kernel, then its buffers,
// the addresses of its weights and its sizes. Buffer 0 is what comes in, buffer 1 what goes out; the others are of this
// thread and lie one behind the other.
#pragma once

#include "attention.h"
#include "float.h"
#include "int8.h"
#include "linear.h"
#include "rows.h"

namespace tinyloop {

enum Kernel : int64_t { NORM, SILU_MUL, LINEAR, LINEAR_INT8, ATTEND, SIGMOID_MUL };

struct Step {
  int64_t kernel, out, in, added, a, b, c, d, e, f;
};

// What changes from step to step: the rows, their angles, where they keep keys and values and what they may look at.
template <class T>
struct Rows {
  long count;
  const float *cos, *sin;
  const int64_t *slots, *pages;  // [page rows, rows], [page rows, blocks]
  long blocks;
  const Span* spans;
  long segments;
  T *keys, *values;
  long layer;  // elements of one layer of a page, over all pages
  long page_size;
  int threads;
};

template <class T>
class Buffers {
 public:
  Buffers(const int64_t* widths, long count, long rows, T* in, T* out) {
    static thread_local std::vector<T> memory;
    constexpr long LINE = 64 / sizeof(T);
    long size = LINE;
    for (long i = 2; i < count; i++) size += (widths[i] * rows + LINE - 1) / LINE * LINE;
    if ((long)memory.size() < size) memory.resize(size);
    at_ = {in, out};
    T* next = (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    for (long i = 2; i < count; i++) at_.push_back(next), next += (widths[i] * rows + LINE - 1) / LINE * LINE;
  }

  T* operator[](int64_t buffer) const { return buffer < 0 ? nullptr : at_[buffer]; }

 private:
  std::vector<T*> at_;
};

// The queries, keys and values of a row lie side by side in `in`. a: layer in the page, b: row of slots and pages, c:
// heads, d: heads of keys, e: elements of a head, f: a buffer for the turned queries.
template <class T>
void attend(const Step& s, const Rows<T>& rows, const Buffers<T>& buffers) {
  const long heads = s.c, kv_heads = s.d, size = s.e;
  const T* q = buffers[s.in];
  T *keys = rows.keys + s.a * rows.layer, *values = rows.values + s.a * rows.layer, *turned = buffers[s.f];
  rope_write(q, q + heads * size, q + (heads + kv_heads) * size, (heads + 2 * kv_heads) * size, rows.cos, rows.sin,
             rows.slots + s.b * rows.count, turned, keys, values, rows.count, (int)heads, (int)kv_heads, (int)size,
             rows.threads);
  Pages<T> pages{keys, values, rows.pages + s.b * rows.blocks, rows.page_size, kv_heads, size};
  attention(turned, pages, rows.spans, rows.segments, buffers[s.out], heads, rows.threads);
}

template <class T>
void run_step(const Step& s, const Rows<T>& rows, const Buffers<T>& buffers) {
  T *out = buffers[s.out], *added = buffers[s.added];
  const T* in = buffers[s.in];
  switch (s.kernel) {
    case NORM: {  // a: weight, b: size, c: bits of epsilon
      float eps;
      std::memcpy(&eps, &s.c, sizeof eps);
      return rms_norm(in, (const T*)s.a, (const T*)added, out, rows.count, (int)s.b, eps, rows.threads);
    }
    case SILU_MUL:  // a: size, b: whether nothing else reads what comes in
      return silu_mul(in, out, rows.count, (int)s.a, rows.threads);
    case LINEAR:  // a: packed weight, b: out, c: in
      if constexpr (std::is_same_v<T, bf16>)
        return linear(Product{in, (const bf16*)s.a, added, out, rows.count, (long)s.b, (long)s.c}, rows.threads);
      else
        return linear(FloatProduct{in, (const float*)s.a, added, out, rows.count, (long)s.b, (long)s.c}, rows.threads);
    case LINEAR_INT8:  // a: packed weight, b: out, c: in, d: scales
      return linear_int8(in, (const uint8_t*)s.a, (const float*)s.d, (const T*)added, out, rows.count, s.b, s.c,
                         rows.threads);
    case ATTEND:
      return attend(s, rows, buffers);
    case SIGMOID_MUL:  // of what comes in, times what stands where others add; a: size
      return sigmoid_mul(in, (const T*)added, out, rows.count, (int)s.a, rows.threads);
  }
}

// A product and the activation of it in one, where that can be; false if not.
template <class T>
bool run_both([[maybe_unused]] const Step& s, [[maybe_unused]] const Step& next, [[maybe_unused]] const Rows<T>& rows,
              [[maybe_unused]] const Buffers<T>& buffers) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>) {
    bool product = s.kernel == LINEAR && s.added < 0 && s.b % (2 * SIDE) == 0;
    bool activation = next.kernel == SILU_MUL && next.in == s.out && next.b;
    if (!product || !activation || next.out == s.in) return false;  // what is read must not be written yet
    gated_linear(Product{buffers[s.in], (const bf16*)s.a, nullptr, buffers[next.out], rows.count, (long)s.b, (long)s.c},
                 rows.threads);
    return true;
  }
#endif
  return false;
}

template <class T>
void run_program(const Step* steps, long count, const int64_t* widths, long buffers, T* in, T* out, long rows,
                 const float* cos, const float* sin, const int64_t* slots, const int64_t* pages, long planes, long blocks,
                 const Span* spans, long segments, T* keys, T* values, long num_pages, long layer, long page_size,
                 int threads) {
  check_within(slots, planes * rows, num_pages * page_size, "slot");
  check_within(pages, planes * blocks, num_pages, "page");
  check_spans(spans, segments, rows, blocks, page_size);
  Rows<T> all{rows, cos, sin, slots, pages, blocks, spans, segments, keys, values, layer, page_size, threads};
  Buffers<T> memory(widths, buffers, rows, in, out);
  for (const Step* s = steps; s < steps + count; s++) {
    bool both = s + 1 < steps + count && run_both(s[0], s[1], all, memory);
    both ? (void)s++ : run_step(*s, all, memory);
  }
}

}  // namespace tinyloop
