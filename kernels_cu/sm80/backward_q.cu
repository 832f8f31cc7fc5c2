// backward_q: dQ = softmax_scale dS K in registers;
//             dK += dS^T Q and dV += P^T dO by float32 atomic adds (cfg::ATOMIC).
//
//              BLOCK_N keys             A CTA owns BLOCK_M queries of one head and walks over their
//            +-------------+            keys. Its warps own whole rows: dS feeds dQ straight from
//   BLOCK_M  | S, dP -> P, |  x K -> dQ registers. With cfg::ATOMIC, P and dS also pass shared
//   queries  |      dS     |            memory, 16 bits each, and the warps lie as WARPS_N_KV x ..
//            +-------------+            over dK and dV of the tile.
//             ^T x Q, dO -> dK, dV      Grid: (tiles of queries, upper bound; query heads).
//
// Without cfg::ATOMIC this is the second half of the deterministic backward, after backward_kv.
// Twin: rawattn/kernels_numba/backward_q.py.
// Source: FlashAttention, arXiv 2205.14135, algorithm 4, loops exchanged.
#include "base/varlen.cuh"
#include "base/workspace.cuh"
#include "sm80/gradient.cuh"
#include "sm80/tile_mma.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_STAGES, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS;  // query rows of a warp
constexpr int MT = WARP_M / 16;
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");

using CutK = Cut<BLOCK_N, HEAD_DIM / cfg::PIECES, cfg::WARPS_N_KV, NUM_WARPS>;
using CutV = Cut<BLOCK_N, HEAD_DIM_V / cfg::PIECES, cfg::WARPS_N_KV, NUM_WARPS>;
using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, BLOCK_N>;

struct SmemPlan {
  static constexpr int Q =
      0;  // dQ overlaps Q at the end: a warp reads and writes its own rows only
  static constexpr int DO = Q + TileQ::BYTES;
  static constexpr int K = DO + TileO::BYTES;
  static constexpr int V = K + NUM_STAGES * TileK::BYTES;
  static constexpr int P = V + NUM_STAGES * TileV::BYTES;
  static constexpr int DS = P + (cfg::ATOMIC ? TileP::BYTES : 0);
  static constexpr int BYTES = DS + (cfg::ATOMIC ? TileP::BYTES : 0);
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  Tensor dq;                // (total_q, num_heads_q, head_dim)
  float* dk_accum;          // workspace of dK, zeroed; unused without cfg::ATOMIC
  float* dv_accum;          // workspace of dV, zeroed; unused without cfg::ATOMIC
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
};

// (X^T Y) of this tile of keys, X = P or dS, added to the workspace of dV or dK, cfg::PIECES times
// COLS / PIECES columns
template <class CutT, class TileY, int COLS>
__device__ __forceinline__ void add_transposed(const Workspace<COLS>& sums, uint32_t sX,
                                               uint32_t sY, const CutT& cut, int col0,
                                               int valid_cols) {
#pragma unroll 1
  for (int piece = 0; piece < COLS; piece += COLS / cfg::PIECES) {
    float rY[CutT::MT][CutT::NT][4];
    clear(rY);
    multiply_xty<BLOCK_M>(rY, OperandAT<TileP, CutT::SPAN_M>(sX, 0, cut.row),
                          OperandBT<TileY, CutT::SPAN_N>(sY, 0, piece + cut.col));
#pragma unroll
    for (int i = 0; i < CutT::MT; ++i) {
      if (cut.row + i * 16 >= valid_cols) break;  // the unit may belong to the next sequence
#pragma unroll
      for (int j = 0; j < CutT::NT; ++j) {
        sums.add((col0 + cut.row) / UNIT + i, (piece + cut.col) / 8 + j, rY[i][j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.batch, args.total_q, BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, kv_head = head / (args.num_heads_q / args.num_heads_kv);
  const int m_block = cfg::HAS_RIGHT && tile.batch_index >= 0
                          ? ceil_div(tile.length, BLOCK_M) - 1 - tile.block  // longest first
                          : tile.block;
  const int row0 = m_block * BLOCK_M, valid_rows = min(BLOCK_M, tile.length - row0);
  const int first_row = tile.start + row0;
  uint16_t* gdQ = args.dq.at(first_row, head);
  Sequence keys{0, 0};
  if (tile.batch_index >= 0) keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.total_k);
  const Mask mask{tile.length, keys.length, args.window_left, args.window_right};
  const int n_begin = mask.first_key(row0) / BLOCK_N;
  const int n_end = ceil_div(mask.end_key(row0 + valid_rows - 1), BLOCK_N);
  if (n_end <= n_begin) {  // these queries see nothing, or belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(gdQ, args.dq.token_stride, valid_rows);
    return;
  }

  const uint32_t sQ = smem_address(smem), sdO = sQ + SmemPlan::DO, sK = sQ + SmemPlan::K;
  const uint32_t sV = sQ + SmemPlan::V, sP = sQ + SmemPlan::P, sdS = sQ + SmemPlan::DS;
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int warp_row = warp * WARP_M;
  const auto load_step = [&](int n, int stage) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(sK + stage * TileK::BYTES,
                                                    args.k.at(keys.start + n * BLOCK_N, kv_head),
                                                    args.k.token_stride, keys.length - n * BLOCK_N);
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(
        sV + stage * TileV::BYTES, args.v.at(keys.start + n * BLOCK_N, kv_head),
        args.v.token_stride, keys.length - n * BLOCK_N);
    cp_async_commit();
  };
  load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(sQ, args.q.at(first_row, head),
                                                  args.q.token_stride, valid_rows);
  load_tile_async<TileO, cfg::WIDTH_V, NUM_THREADS>(sdO, args.dout.at(first_row, head),
                                                    args.dout.token_stride, valid_rows);
  load_step(n_end - 1, 0);
  const int64_t statistics = static_cast<int64_t>(head) * args.total_q + first_row;
  const int stat_row = warp_row + lane / 4;
  const auto lse_log2 = load_lse_log2<MT>(args.lse + statistics, stat_row, valid_rows);
  const auto delta = load_delta<MT>(args.delta + statistics, stat_row, lse_log2);

  const float scale_log2 = args.softmax_scale * LOG2E;
  float rdQ[MT][HEAD_DIM / 8][4];
  clear(rdQ);
  int stage = 0;
  for (int n = n_end - 1; n >= n_begin; --n) {
    const int col0 = n * BLOCK_N;
    cp_async_wait<0>();
    __syncthreads();  // K and V are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && n > n_begin) load_step(n - 1, stage ^ 1);
    const uint32_t sK_now = sK + stage * TileK::BYTES, sV_now = sV + stage * TileV::BYTES;

    float rP[MT][BLOCK_N / 8][4], rdS[MT][BLOCK_N / 8][4];
    clear(rP);
    multiply_xyt<HEAD_DIM>(rP, OperandA<TileQ>(sQ, warp_row), OperandB<TileK>(sK_now));
    clear(rdS);
    multiply_xyt<HEAD_DIM_V>(rdS, OperandA<TileO>(sdO, warp_row), OperandB<TileV>(sV_now));
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + warp_row + lane / 4, col0 + lane % 4 * 2);
    }
    scores_to_p(rP, lse_log2, scale_log2);
    dp_to_ds(rdS, rP, delta);
    if constexpr (cfg::ATOMIC) {
      const auto one = [](int, int) { return 1.0f; };
      store_tile<TileP>(smem + SmemPlan::P, rP, warp_row, 0, one);
      store_tile<TileP>(smem + SmemPlan::DS, rdS, warp_row, 0, one);
    }
    multiply_py(rdQ, rdS, OperandBT<TileK>(sK_now));
    if constexpr (cfg::ATOMIC) {
      __syncthreads();  // P and dS are whole
      const int valid_cols = keys.length - col0;
      const Workspace<HEAD_DIM_V> sums_v(args.dv_accum, kv_head, args.total_k, args.batch,
                                         keys.start, tile.batch_index);
      add_transposed<CutV, TileO>(sums_v, sP, sdO, CutV(warp), col0, valid_cols);
      const Workspace<HEAD_DIM> sums_k(args.dk_accum, kv_head, args.total_k, args.batch, keys.start,
                                       tile.batch_index);
      add_transposed<CutK, TileQ>(sums_k, sdS, sQ, CutK(warp), col0, valid_cols);
    }
    if constexpr (NUM_STAGES == 2) {
      stage ^= 1;
    } else if (n > n_begin) {
      __syncthreads();  // every warp has left K and V
      load_step(n - 1, 0);
    }
  }

  __syncthreads();  // every warp has left Q
  store_tile<TileQ>(smem + SmemPlan::Q, rdQ, warp_row, 0,
                    [&](int, int) { return args.softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileQ, cfg::WIDTH, WARP_SIZE, WARP_M>(gdQ, args.dq.token_stride, smem + SmemPlan::Q,
                                                   warp_row, valid_rows, lane);
}
