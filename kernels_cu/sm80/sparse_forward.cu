// sparse_forward: O = softmax(softmax_scale g Q K^T) V and L over the selected blocks of keys.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-----------+                     consumer warps own 16 rows each and take only the
//   BLOCK_M  |  S -> P   |  x V -> O           blocks that their rows named (sm80/sparse_walk.cuh);
//   rows     +-----------+                     the producers load each block once for all.
//                                              Grid: (tiles of tokens; selection heads).
//
// Twin: rawattn/kernels_numba/sparse_forward.py. Source: native sparse attention, arXiv 2502.11089,
// section 3.4; FlashAttention-2, arXiv 2307.08691, algorithm 1.
#include "base/softmax.cuh"
#include "sm80/sparse_walk.cuh"

struct SmemPlan {
  // O takes Q's place where a row lies the same in both: no other warp may still want that of Q
  static constexpr bool OVERLAP = TileQ::PANEL == TileO::PANEL;
  static constexpr int OUT = OVERLAP ? 0 : TileQ::BYTES;
  static constexpr int BYTES = OUT + TileO::BYTES;
  alignas(128) char rows[OVERLAP && TileQ::BYTES > BYTES ? TileQ::BYTES : BYTES];
  KeyStage stages[NUM_STAGES];
  Ring ring;

  __device__ __forceinline__ TileQ& q() { return reinterpret_cast<TileQ&>(rows); }
  __device__ __forceinline__ TileO& out() { return reinterpret_cast<TileO&>(rows[OUT]); }
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                  // (total_q, num_heads_q, head_dim)
  Tensor k;                  // (total_k, num_heads_kv, head_dim)
  Tensor v;                  // (total_k, num_heads_kv, head_dim_v)
  const int* blocks;         // (num_heads_sel, total_q, width)
  const int* slots;          // (num_heads_sel, total_q, width)
  const float* block_scale;  // (total_q, num_heads_sel, num_selected), or null
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  Tensor out;                // (total_q, num_heads_q, head_dim_v)
  float* lse;                // (num_heads_q, total_q)
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_forward.py differ");

// Rows of this warp: S, softmax and P V of every stage they named
__device__ __forceinline__ void attend(const Args& args, SmemPlan& smem, const ItemTile& tile,
                                       int warp_row) {
  const int lane = threadIdx.x % WARP_SIZE;
  load_own_rows<cfg::WIDTH>(smem.q(), args.q, tile, warp_row);
  cp_async_commit();
  const OperandA<TileQ> queries(smem.q().address(), warp_row);
  OnlineSoftmax<1> softmax;
  const float scale_log2 = args.sizes.softmax_scale * LOG2E;
  float rO[1][HEAD_DIM_V / 8][4];
  clear(rO);
  cp_async_wait<0>();
  __syncwarp();  // Q was loaded by this warp's other lanes
  consume(smem.ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const auto& keys = smem.stages[stage];
    const BlockScale block_scale(args, tile, rows, warp_row);
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rS[1][STEP_N / 8][4];
      clear(rS);
      multiply_xyt<HEAD_DIM>(rS, queries, OperandB<TileK>(keys.k.address(), col));
      block_scale.apply(rS);
      if (rows.cut) cut_rows(rS, rows, col);
      softmax.update_max(rS, scale_log2,
                         [&](int i, int half, float by) { scale_row(rO, i, half, by); });
      softmax.exponentiate(rS, scale_log2);
      multiply_py(rO, rS, OperandBT<TileV>(keys.v.address(), col));
    }
  });
  store_tile(smem.out(), rO, warp_row, 0, [&](int i, int half) {
    const float sum = softmax.total(i, half);
    const int row = warp_row + half * 8 + lane / 4;
    if (lane % 4 == 0 && tile.valid(row)) {
      args.lse[statistic_of(tile, row, args.sizes.total_q)] =
          softmax.lse(i, half, sum, args.sizes.softmax_scale);
    }
    return inverse_of(sum);
  });
  write_own_rows<cfg::WIDTH_V>(args.out, tile, smem.out(), warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const ItemTile tile = find_item_tile(args);
  if (tile.dead()) {
    zero_own_rows<cfg::WIDTH_V>(args.out, tile);
    fill_own_statistic(args.lse, tile, args.sizes.total_q, -INF);
    return;
  }
  smem.ring.init();
  __syncthreads();  // the barriers are there
  walk(args, smem, tile, [&](int warp_row) { attend(args, smem, tile, warp_row); });
}
