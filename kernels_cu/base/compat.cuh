// Types and constants that every kernel shares; no headers, so that NVRTC starts at once.
#pragma once

using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr int WARP_SIZE = 32;
constexpr int NUM_THREADS = cfg::NUM_WARPS * WARP_SIZE;  // of a CTA
constexpr int ELEMENT_BYTES = 2;  // float16 and bfloat16 travel as 16 bits; cfg::BF16 says which

// A packed (tokens, heads, dim) tensor: element (t, h, d) lies at data[t * token_stride + h *
// head_stride + d].
struct Tensor {
  uint16_t* data;
  int64_t token_stride;  // elements; 64 bits, since token * stride may pass 2^31
  int64_t head_stride;

  __device__ __forceinline__ uint16_t* at(int64_t token, int head) const {
    return data + token * token_stride + head * head_stride;
  }
};
// `valid` rows of one head of a packed tensor, from token `first` on
struct Rows {
  int first, head, valid;
};

// What one attention call is about: the same numbers in every struct Args.
struct Sizes {
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  float softcap;  // with cfg::HAS_SOFTCAP

  __device__ __forceinline__ int group() const { return num_heads_q / num_heads_kv; }
};

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
