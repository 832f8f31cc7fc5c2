// sparse_postprocess: gradient = scale * sums, from float32 in the order of sm80/sparse_gather.cuh's
//                     add_rows to 16-bit rows.
//
//   A thread turns 16 columns of a row. Grid: (runs of 32 * NUM_WARPS such groups).
// Twin: rawattn/kernels_numba/sparse_postprocess.py.
#include "base/ptx.cuh"

constexpr int GROUPS = cfg::HEAD_DIM / 16;  // of a row

struct Args {
  const float* accum;  // (total_rows, num_heads, HEAD_DIM)
  Tensor grad;         // (total_rows, num_heads, head_dim)
  int total_rows;
  int num_heads;
  float scale;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_postprocess.py differ");

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    sparse_postprocess(const __grid_constant__ Args args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * NUM_THREADS + threadIdx.x;
  const int64_t row = index / GROUPS;
  const int col = static_cast<int>(index % GROUPS) * 16;
  if (row >= static_cast<int64_t>(args.total_rows) * args.num_heads || col >= cfg::WIDTH) return;
  const float4* places = reinterpret_cast<const float4*>(args.accum + row * cfg::HEAD_DIM + col);
  uint32_t low[4], high[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float4 four = places[q];
    low[q] = cvt_rn_x2(four.x * args.scale, four.y * args.scale);
    high[q] = cvt_rn_x2(four.z * args.scale, four.w * args.scale);
  }
  uint16_t* to = args.grad.at(row / args.num_heads, static_cast<int>(row % args.num_heads)) + col;
  *reinterpret_cast<uint4*>(to) = uint4{low[0], low[1], low[2], low[3]};
  if (col + 8 < cfg::WIDTH) {
    *reinterpret_cast<uint4*>(to + 8) = uint4{high[0], high[1], high[2], high[3]};
  }
}
