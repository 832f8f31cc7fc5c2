// double_backward_out: ddO = (P o E) V + P ddV - e o O and e = ddL = rowsum(P o E), with
//                      E = softmax_scale (ddQ K^T + Q ddK^T): the gradients of dO and dL;
//                      for the second pass D = dO.O - dL and its tangent W = dO.ddO, and zeros to
//                      the workspace that gQ is added into.
//
//              BLOCK_N keys               A CTA owns BLOCK_M queries of one head. Its warps own
//            +-------------+              whole rows, BLOCK_M / NUM_WARPS each; P comes from S and
//   BLOCK_M  | S, E -> P,  |  x V, ddV    the given L, so that no maximum is needed.
//   queries  |    P o E    |    -> ddO    Grid: (tiles of queries; query heads).
//            +-------------+
//
// K and ddK arrive by cp.async behind the products with V; V and ddV behind S and E.
// Twin: rawattn/kernels_numba/double_backward_out.py. Source: the derivative of FlashAttention-2's
// backward, arXiv 2307.08691, algorithm 2; rawattn/reference has the equations.
#include "base/softmax.cuh"
#include "base/varlen.cuh"
#include "base/workspace.cuh"
#include "sm80/tangent.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS;  // query rows of a warp
constexpr int MT = WARP_M / 16;              // its m16 tiles
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");
static_assert(BLOCK_N % 16 == 0, "cfg::BLOCK_N divides by 16");

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q = 0;  // ddO overlaps Q and ddQ at the end
  static constexpr int DDQ = Q + TileQ::BYTES;
  static constexpr int K = 2 * TileQ::BYTES > TileO::BYTES ? 2 * TileQ::BYTES : TileO::BYTES;
  static constexpr int DDK = K + TileK::BYTES;
  static constexpr int V = DDK + TileK::BYTES;
  static constexpr int DDV = V + TileV::BYTES;
  static constexpr int BYTES = DDV + TileV::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor ddq;               // like q; null without cfg::HAS_TQ
  Tensor ddk;               // like k; null without cfg::HAS_TK
  Tensor ddv;               // like v; null without cfg::HAS_TV
  Tensor out;               // (total_q, num_heads_q, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* dlse;        // (num_heads_q, total_q), or null
  Tensor ddout;             // (total_q, num_heads_q, head_dim_v)
  float* ddlse;             // (num_heads_q, total_q)
  float* delta;             // (num_heads_q, total_q)
  float* ddelta;            // (num_heads_q, total_q)
  float* gq_accum;          // (gq_accum_size,), zeroed here, or null
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  int64_t gq_accum_size;
};

__device__ __forceinline__ void write_dead_rows(const Args& args, int head, int row, int rows) {
  zero_rows<cfg::WIDTH_V, NUM_THREADS>(args.ddout.at(row, head), args.ddout.token_stride, rows);
  for (int r = threadIdx.x; r < rows; r += NUM_THREADS) {
    const int64_t index = static_cast<int64_t>(head) * args.total_q + row + r;
    args.ddlse[index] = args.delta[index] = args.ddelta[index] = 0.0f;
  }
}

// ddO += (P o E) V + P ddV; rounded += rowsum(P o E) as rounded for the product
template <int NT, int NT_V>
__device__ __forceinline__ void add_products(float (&rddO)[MT][NT_V][4],
                                             const float (&rP)[MT][NT][4],
                                             const float (&rPE)[MT][NT][4],
                                             const OperandBT<TileV>& v, float (&rounded)[MT][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t p[MT][4], pe[MT][4];
    if constexpr (HAS_E) {
      to_operand(pe, rPE, k);
      add_row_sums(rounded, pe);
      multiply_step(rddO, pe, [&](uint32_t (&b)[4], int j) { v.load(b, k, j); });
    }
    if constexpr (cfg::HAS_TV) {
      to_operand(p, rP, k);
      multiply_step(rddO, p,
                    [&](uint32_t (&b)[4], int j) { v.load(b, k, j, SmemPlan::DDV - SmemPlan::V); });
    }
  }
}

// ddO, e, D and W of this warp's rows. A dead row, or one past the sequence's end, reads nothing.
__device__ __forceinline__ void epilogue(const Args& args, int head, int first_row, int valid_rows,
                                         int warp_row, const PerRow<MT>& lse_log2,
                                         const float (&tangent)[MT][2],
                                         const float (&rounded)[MT][4],
                                         float (&rddO)[MT][HEAD_DIM_V / 8][4], char* smem) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      const bool alive = lse_log2.value[i][half] != INF;
      const float ddlse = sum_of_row(tangent[i][half]), e = rounded[i][half * 2];
      const uint16_t* gO = args.out.at(first_row + row, head) + lane % 4 * 2;
      const uint16_t* gdO = args.dout.at(first_row + row, head) + lane % 4 * 2;
      float delta = 0.0f, ddelta = 0.0f;
#pragma unroll
      for (int j = 0; j < HEAD_DIM_V / 8; ++j) {
        if (alive && j * 8 < cfg::WIDTH_V) {
          const Pair out(gO + j * 8), dout(gdO + j * 8);
          float& x = rddO[i][j][half * 2];
          float& y = rddO[i][j][half * 2 + 1];
          x -= e * out.x, y -= e * out.y;
          delta += dout.x * out.x + dout.y * out.y;
          ddelta += dout.x * x + dout.y * y;
        }
      }
      delta = sum_of_row(delta), ddelta = sum_of_row(ddelta);
      if (lane % 4 == 0 && row < valid_rows) {
        const int64_t index = static_cast<int64_t>(head) * args.total_q + first_row + row;
        args.ddlse[index] = ddlse;
        args.delta[index] = alive && args.dlse ? delta - args.dlse[index] : delta;
        args.ddelta[index] = ddelta;
      }
    }
  }
  __syncthreads();  // every warp has left Q and ddQ
  store_tile<TileO>(smem, rddO, warp_row, 0, [](int, int) { return 1.0f; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileO, cfg::WIDTH_V, WARP_SIZE, WARP_M>(
      args.ddout.at(first_row, head), args.ddout.token_stride, smem, warp_row, valid_rows, lane);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_out(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  if (args.gq_accum) zero_workspace<NUM_THREADS>(args.gq_accum, args.gq_accum_size);
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.batch, args.total_q, BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, kv_head = head / (args.num_heads_q / args.num_heads_kv);
  if (tile.batch_index < 0) {  // rows that belong to no sequence
    const int row = tile.block * BLOCK_M;
    write_dead_rows(args, head, tile.start + row, min(BLOCK_M, tile.length - row));
    return;
  }
  // with a right bound the last tiles of a sequence are the longest: they start first
  const int m_block = cfg::HAS_RIGHT ? ceil_div(tile.length, BLOCK_M) - 1 - tile.block : tile.block;
  const int row0 = m_block * BLOCK_M, valid_rows = min(BLOCK_M, tile.length - row0);
  const int first_row = tile.start + row0;
  const Sequence keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.total_k);
  const Mask mask{tile.length, keys.length, args.window_left, args.window_right};
  const int n_begin = mask.first_key(row0) / BLOCK_N;
  const int n_end = ceil_div(mask.end_key(row0 + valid_rows - 1), BLOCK_N);
  if (n_end <= n_begin) {
    write_dead_rows(args, head, first_row, valid_rows);
    return;
  }

  const uint32_t s0 = smem_address(smem);
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const auto load_q = [&](int offset, const Tensor& x) {
    load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(s0 + offset, x.at(first_row, head),
                                                    x.token_stride, valid_rows);
  };
  const auto load_k = [&](int offset, const Tensor& x, int n) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(s0 + offset,
                                                    x.at(keys.start + n * BLOCK_N, kv_head),
                                                    x.token_stride, keys.length - n * BLOCK_N);
  };
  const auto load_v = [&](int offset, const Tensor& x, int n) {
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(s0 + offset,
                                                      x.at(keys.start + n * BLOCK_N, kv_head),
                                                      x.token_stride, keys.length - n * BLOCK_N);
  };
  const auto load_keys = [&](int n) {
    load_k(SmemPlan::K, args.k, n);
    if constexpr (cfg::HAS_TK) load_k(SmemPlan::DDK, args.ddk, n);
    cp_async_commit();
  };
  const auto load_values = [&](int n) {
    if constexpr (HAS_E) load_v(SmemPlan::V, args.v, n);
    if constexpr (cfg::HAS_TV) load_v(SmemPlan::DDV, args.ddv, n);
    cp_async_commit();
  };
  load_q(SmemPlan::Q, args.q);
  if constexpr (cfg::HAS_TQ) load_q(SmemPlan::DDQ, args.ddq);
  load_keys(n_end - 1);
  const auto lse_log2 =
      load_lse_log2<MT>(args.lse + static_cast<int64_t>(head) * args.total_q + first_row,
                        warp_row + lane / 4, valid_rows);

  const OperandA<TileQ> q(s0 + SmemPlan::Q, warp_row);
  const OperandB<TileK> k(s0 + SmemPlan::K);
  const OperandBT<TileV> v(s0 + SmemPlan::V);
  float rddO[MT][HEAD_DIM_V / 8][4], rP[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
  float tangent[MT][2] = {}, rounded[MT][4] = {};
  clear(rddO);
  for (int n = n_end - 1; n >= n_begin; --n) {
    cp_async_wait<0>();
    __syncthreads();  // K and ddK of this tile are here; every warp has left V and ddV
    load_values(n);
    multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK - SmemPlan::K>(rP, rE, q,
                                                                                        k);
    cp_async_wait<0>();
    __syncthreads();  // V and ddV are here; every warp has left K and ddK
    if (n > n_begin) load_keys(n - 1);
    if (mask.cuts(row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rP, mask, row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    scores_to_p(rP, lse_log2, args.softmax_scale * LOG2E);
    if constexpr (HAS_E) weigh_tangents(rE, rP, args.softmax_scale, tangent);
    add_products(rddO, rP, rE, v, rounded);
  }
  epilogue(args, head, first_row, valid_rows, warp_row, lse_log2, tangent, rounded, rddO, smem);
}
