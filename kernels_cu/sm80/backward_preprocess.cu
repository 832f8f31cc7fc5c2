// backward_preprocess: D_i = dO_i . O_i - dL_i, and zeros to the workspace that dQ is added into.
//
//   LANES lanes own one row of one head: each reads 16 bytes of O and dO at a time and sums up.
//   Grid: (rows / BLOCK_M; query heads); all CTAs together zero the workspace.
//
// Twin: rawattn/kernels_numba/backward_preprocess.py.
// Source: FlashAttention-2, arXiv 2307.08691, algorithm 2, line 4.
#include "base/workspace.cuh"

constexpr int ROWS = cfg::BLOCK_M;                                   // rows of a CTA
constexpr int LANES = cfg::HEAD_DIM_V <= 64 ? 8 : 16;                // lanes of a row
constexpr int STEPS = (cfg::WIDTH_V + LANES * 8 - 1) / (LANES * 8);  // 16-byte chunks of a lane
constexpr int ROWS_AT_ONCE = NUM_THREADS / LANES;
static_assert(ROWS % ROWS_AT_ONCE == 0, "cfg::BLOCK_M divides by the rows read at once");

struct Args {
  Tensor out;         // (total_q, num_heads_q, head_dim_v)
  Tensor dout;        // (total_q, num_heads_q, head_dim_v)
  const float* dlse;  // (num_heads_q, total_q), or null
  float* delta;       // (num_heads_q, total_q)
  float* dq_accum;    // (dq_accum_size,), zeroed here, or null
  int total_q;
  int num_heads_q;
  int64_t dq_accum_size;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/backward_preprocess.py differ");

__device__ __forceinline__ float dot_chunk(uint4 a, uint4 b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += cvt_f32(static_cast<uint16_t>(x[i])) * cvt_f32(static_cast<uint16_t>(y[i]));
    sum += cvt_f32(static_cast<uint16_t>(x[i] >> 16)) * cvt_f32(static_cast<uint16_t>(y[i] >> 16));
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    backward_preprocess(const __grid_constant__ Args args) {
  const int head = blockIdx.y, lane = threadIdx.x % LANES;
#pragma unroll
  for (int i = 0; i < ROWS / ROWS_AT_ONCE; ++i) {
    const int row = blockIdx.x * ROWS + i * ROWS_AT_ONCE + threadIdx.x / LANES;
    float sum = 0.0f;
    if (row < args.total_q) {
      const uint4* gO = reinterpret_cast<const uint4*>(args.out.at(row, head));
      const uint4* gdO = reinterpret_cast<const uint4*>(args.dout.at(row, head));
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int chunk = step * LANES + lane;
        if (chunk * 8 < cfg::WIDTH_V) sum += dot_chunk(gO[chunk], gdO[chunk]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (row < args.total_q && lane == 0) {
      const int64_t index = static_cast<int64_t>(head) * args.total_q + row;
      args.delta[index] = sum - (args.dlse ? args.dlse[index] : 0.0f);
    }
  }
  if (args.dq_accum) zero_workspace(args.dq_accum, args.dq_accum_size);
}
