// backward_sinks: the gradient of the sinks, from P0 = exp(sink - L) and the terms of a head's rows:
//                 dsinks = -sum P0 D,  gsinks = -sum P0 ((ddsinks - ddL) D + W).
//
//   A CTA owns a head: its threads take the queries of all sequences in turn, then add up in the
//   order of warps and lanes. Grid: (query heads).
//
// Twin: rawattn/kernels_numba/backward_sinks.py. Source: the column of a score that has no value,
// rawattn/reference/dense.py and second.py; in the denominator as of arXiv 2309.17453.
#include "base/ptx.cuh"
#include "base/varlen.cuh"

struct Args {
  const float* sinks;       // (num_heads_q,)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  const float* ddsinks;     // (num_heads_q,), or null
  const float* ddlse;       // (num_heads_q, total_q), or null: first order
  const float* ddelta;      // (num_heads_q, total_q), or null
  float* grad;              // (num_heads_q,)
  const int* cu_seqlens_q;  // (batch + 1,)
  int batch;
  int total_q;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/backward_sinks.py differ");

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    x += __shfl_xor_sync(0xffffffff, x, distance);
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    backward_sinks(const __grid_constant__ Args args) {
  __shared__ float partial[cfg::NUM_WARPS];
  const int head = blockIdx.x, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int begin = clamped(args.cu_seqlens_q[0], args.total_q);
  const int end = clamped(args.cu_seqlens_q[args.batch], args.total_q);
  const int64_t first = static_cast<int64_t>(head) * args.total_q;
  const float sink = args.sinks[head], moved = args.ddsinks ? args.ddsinks[head] : 0.0f;
  float sum = 0.0f;
#pragma unroll 4
  for (int token = begin + threadIdx.x; token < end; token += NUM_THREADS) {
    const int64_t at = first + token;
    const float lse = args.lse[at];
    float term = args.delta[at];
    if (args.ddlse) term = (moved - args.ddlse[at]) * term + args.ddelta[at];
    if (lse != -INF) sum -= ex2_approx((sink - lse) * LOG2E) * term;
  }
  sum = sum_of_warp(sum);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();  // the sums of all warps are there
  if (warp == 0) {
    sum = sum_of_warp(lane < cfg::NUM_WARPS ? partial[lane] : 0.0f);
    if (lane == 0) args.grad[head] = sum;
  }
}
