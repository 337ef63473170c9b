// The Python module: reads addresses and sizes, lets other threads run, calls a kernel. Knows no tensors; what it is
// given must be right, which tinyloop/kernels/native.py sees to.
//
// The same text is compiled once for each level of instruction set, as a module of its own: see setup.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "cpu.h"
#include "float.h"
#include "int8.h"
#include "linear.h"
#include "program.h"
#include "rows.h"

#include <tuple>

#define TEXT(x) #x
#define NAME(x) TEXT(x)
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)

using namespace tinyloop;

namespace {

// Reads the arguments of a call one after the other; a pointer, a whole number or a float, as the target needs.
struct Arguments {
  PyObject* const* next;

  template <class T>
  operator T*() { return (T*)PyLong_AsVoidPtr(*next++); }
  operator long() { return PyLong_AsLong(*next++); }
  operator int() { return (int)PyLong_AsLong(*next++); }
  operator float() { return (float)PyFloat_AsDouble(*next++); }
};

// Calls kernel(arguments...) without the interpreter's lock. Braces keep the order in which arguments are read.
template <class... A>
struct Call {
  std::tuple<A...> values;

  explicit Call(Arguments& from) : values{(A)from...} {}
  // False if it failed; Python then has the error.
  bool run(void (*kernel)(A...)) {
    std::string error;
    Py_BEGIN_ALLOW_THREADS try { std::apply(kernel, values); } catch (const std::exception& e) {
      error = e.what();
    }
    Py_END_ALLOW_THREADS if (!error.empty()) PyErr_SetString(PyExc_IndexError, error.c_str());
    return error.empty();
  }
};

template <class... A>
PyObject* call(void (*kernel)(A...), PyObject* const* args, Py_ssize_t count) {
  if (count != (Py_ssize_t)sizeof...(A)) return PyErr_Format(PyExc_TypeError, "%zd arguments needed", sizeof...(A));
  Arguments from{args};
  Call<A...> ready(from);
  if (PyErr_Occurred()) return nullptr;
  if (!ready.run(kernel)) return nullptr;
  Py_RETURN_NONE;
}

template <class T>
void paged_attention(const T* q, const T* keys, const T* values, long num_pages, const int64_t* pages, long blocks,
                     const Span* spans, T* out, long rows, long segments, long heads, long kv_heads, long head_dim,
                     long page_size, int threads) {
  check_within(pages, blocks, num_pages, "page");
  check_spans(spans, segments, rows, blocks, page_size);
  attention(q, Pages<T>{keys, values, pages, page_size, kv_heads, head_dim}, spans, segments, out, heads, threads);
}

void linear_bf16(const bf16* x, const bf16* packed, const bf16* added, bf16* y, long rows, long out, long in,
              int threads) {
  linear(Product{x, packed, added, y, rows, out, in}, threads);
}

void linear_float(const float* x, const float* packed, const float* added, float* y, long rows, long out, long in,
                  int threads) {
  linear(FloatProduct{x, packed, added, y, rows, out, in}, threads);
}

template <class T>
void rope_into_pages(const T* q, const T* k, const T* v, long stride, const float* cos, const float* sin,
                     const int64_t* slots, long end, T* turned, T* keys, T* values, long rows, int heads, int kv_heads,
                     int head_dim, int threads) {
  check_within(slots, rows, end, "slot");
  rope_write(q, k, v, stride, cos, sin, slots, turned, keys, values, rows, heads, kv_heads, head_dim, threads);
}

#define KERNEL(name, function)                                                      \
  PyObject* name(PyObject*, PyObject* const* args, Py_ssize_t count) { return call(function, args, count); }
#define METHOD(name) {#name, (PyCFunction)(void (*)())name, METH_FASTCALL, nullptr}

KERNEL(rms_norm_float32, tinyloop::rms_norm<float>)
KERNEL(rms_norm_bfloat16, tinyloop::rms_norm<bf16>)
KERNEL(silu_mul_float32, tinyloop::silu_mul<float>)
KERNEL(silu_mul_bfloat16, tinyloop::silu_mul<bf16>)
KERNEL(sigmoid_mul_float32, tinyloop::sigmoid_mul<float>)
KERNEL(sigmoid_mul_bfloat16, tinyloop::sigmoid_mul<bf16>)
KERNEL(most_likely_float32, tinyloop::most_likely<float>)
KERNEL(most_likely_bfloat16, tinyloop::most_likely<bf16>)
KERNEL(rope_write_float32, rope_into_pages<float>)
KERNEL(rope_write_bfloat16, rope_into_pages<bf16>)
KERNEL(attention_float32, paged_attention<float>)
KERNEL(attention_bfloat16, paged_attention<bf16>)
KERNEL(run_program_float32, tinyloop::run_program<float>)
KERNEL(run_program_bfloat16, tinyloop::run_program<bf16>)
KERNEL(linear_float32, linear_float)
KERNEL(linear_bfloat16, linear_bf16)
KERNEL(linear_int8_float32, tinyloop::linear_int8<float>)
KERNEL(linear_int8_bfloat16, tinyloop::linear_int8<bf16>)

PyObject* best_level(PyObject*, PyObject*) { return PyUnicode_FromString(tinyloop::best_level()); }

PyMethodDef methods[] = {
    METHOD(rms_norm_float32),
    METHOD(rms_norm_bfloat16),
    METHOD(silu_mul_float32),
    METHOD(silu_mul_bfloat16),
    METHOD(sigmoid_mul_float32),
    METHOD(sigmoid_mul_bfloat16),
    METHOD(most_likely_float32),
    METHOD(most_likely_bfloat16),
    METHOD(rope_write_float32),
    METHOD(rope_write_bfloat16),
    METHOD(attention_float32),
    METHOD(attention_bfloat16),
    METHOD(run_program_float32),
    METHOD(run_program_bfloat16),
    METHOD(linear_float32),
    METHOD(linear_bfloat16),
    METHOD(linear_int8_float32),
    METHOD(linear_int8_bfloat16),
    {"best_level", best_level, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME(TINYLOOP_MODULE), nullptr, -1, methods, nullptr, nullptr, nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC INIT(TINYLOOP_MODULE)(void) { return PyModule_Create(&module); }
