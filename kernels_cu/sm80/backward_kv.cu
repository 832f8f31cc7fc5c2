// backward_kv: dK = softmax_scale dS^T Q and dV = P^T dO in registers;
//              dQ += dS K by float32 atomic adds (cfg::ATOMIC).
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one kv head and walks over the
//            +-------------+            queries of every head of the group: dK and dV are summed
//   BLOCK_M  | S, dP -> P, |  x K -> dQ without atomics. Warps lie as WARPS_M_S x .. over S and dP,
//   queries  |      dS     |            WARPS_N_KV x .. over dK and dV, WARPS_M_DQ x .. over dQ;
//            +-------------+            P and dS pass through shared memory, 16 bits each.
//             ^T x dO, Q -> dV, dK      Grid: (tiles of keys, upper bound; kv heads).
//
// Without cfg::ATOMIC this is the first half of the deterministic backward, before backward_q.
// Twin: rawattn/kernels_numba/backward_kv.py. Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
#include "base/varlen.cuh"
#include "base/workspace.cuh"
#include "sm80/gradient.cuh"
#include "sm80/tile_mma.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_STAGES, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;

using CutS = Cut<BLOCK_M, BLOCK_N / cfg::PIECES, cfg::WARPS_M_S, NUM_WARPS>;
using CutK = Cut<BLOCK_N, HEAD_DIM, cfg::WARPS_N_KV, NUM_WARPS>;
using CutV = Cut<BLOCK_N, HEAD_DIM_V, cfg::WARPS_N_KV, NUM_WARPS>;
using CutQ = Cut<BLOCK_M, HEAD_DIM, cfg::WARPS_M_DQ, NUM_WARPS>;

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, BLOCK_N>;

struct SmemPlan {
  static constexpr int K = 0;  // dK overlaps K at the end, dV overlaps V
  static constexpr int V = K + TileK::BYTES;
  static constexpr int Q = V + TileV::BYTES;
  static constexpr int DO = Q + NUM_STAGES * TileQ::BYTES;
  static constexpr int P = DO + NUM_STAGES * TileO::BYTES;
  static constexpr int DS = P + TileP::BYTES;
  static constexpr int STATISTICS = DS + TileP::BYTES;  // [stage][L, D][BLOCK_M]
  static constexpr int BYTES = STATISTICS + NUM_STAGES * 2 * BLOCK_M * sizeof(float);
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  float* dq_accum;          // workspace of dQ, zeroed; unused without cfg::ATOMIC
  Tensor dk;                // (total_k, num_heads_kv, head_dim)
  Tensor dv;                // (total_k, num_heads_kv, head_dim_v)
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

// Q, dO, L and D of tile m of a head's queries into a stage. Rows past the sequence's end are zeros
// in all four: P is 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, char* smem, Sequence queries,
                                             int head, int m, int stage) {
  const int row0 = m * BLOCK_M, valid_rows = queries.length - row0;
  const int first_row = queries.start + row0;
  const uint32_t s0 = smem_address(smem);
  load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(s0 + SmemPlan::Q + stage * TileQ::BYTES,
                                                  args.q.at(first_row, head), args.q.token_stride,
                                                  valid_rows);
  load_tile_async<TileO, cfg::WIDTH_V, NUM_THREADS>(s0 + SmemPlan::DO + stage * TileO::BYTES,
                                                    args.dout.at(first_row, head),
                                                    args.dout.token_stride, valid_rows);
  const int64_t first = static_cast<int64_t>(head) * args.total_q + first_row;
  for (int i = threadIdx.x; i < 2 * BLOCK_M; i += NUM_THREADS) {
    cp_async_4(s0 + SmemPlan::STATISTICS + (stage * 2 * BLOCK_M + i) * sizeof(float),
               (i < BLOCK_M ? args.lse : args.delta) + first + i % BLOCK_M,
               i % BLOCK_M < valid_rows);
  }
  cp_async_commit();
}

// P and dS of this tile into shared memory, cfg::PIECES times BLOCK_N / PIECES columns
__device__ __forceinline__ void make_p_and_ds(char* smem, int stage, const Mask& mask,
                                              const CutS& cut, int row0, int col0,
                                              float scale_log2) {
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t s0 = smem_address(smem);
  const OperandA<TileQ> queries(s0 + SmemPlan::Q + stage * TileQ::BYTES, cut.row);
  const OperandA<TileO> gradients(s0 + SmemPlan::DO + stage * TileO::BYTES, cut.row);
  const float* lse = reinterpret_cast<const float*>(smem + SmemPlan::STATISTICS) +
                     stage * 2 * BLOCK_M + cut.row + lane / 4;
  const float* delta = lse + BLOCK_M;
  const auto one = [](int, int) { return 1.0f; };
#pragma unroll 1
  for (int piece = 0; piece < BLOCK_N; piece += BLOCK_N / cfg::PIECES) {
    const int col = piece + cut.col;
    float rP[CutS::MT][CutS::NT][4], rdS[CutS::MT][CutS::NT][4];
    clear(rP);
    multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(s0 + SmemPlan::K, col));
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + cut.row + lane / 4, col0 + col + lane % 4 * 2);
    }
    scores_to_p(rP, load_lse_log2<CutS::MT>(lse, 0, BLOCK_M), scale_log2);
    store_tile<TileP>(smem + SmemPlan::P, rP, cut.row, col, one);
    clear(rdS);
    multiply_xyt<HEAD_DIM_V>(rdS, gradients, OperandB<TileV>(s0 + SmemPlan::V, col));
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<CutS::MT>(lse, 0, BLOCK_M);
    dp_to_ds(rdS, rP, load_delta<CutS::MT>(delta, 0, lse_log2));
    store_tile<TileP>(smem + SmemPlan::DS, rdS, cut.row, col, one);
  }
}

// dQ of this tile of queries: dS K, added to the workspace
__device__ __forceinline__ void add_dq(const Workspace<HEAD_DIM>& sums, uint32_t sdS, uint32_t sK,
                                       const CutQ& cut, int row0, int valid_rows) {
  float rdQ[CutQ::MT][CutQ::NT][4];
  clear(rdQ);
  multiply_xy<BLOCK_N>(rdQ, OperandA<TileP>(sdS, cut.row),
                       OperandBT<TileK, CutQ::SPAN_N>(sK, 0, cut.col));
#pragma unroll
  for (int i = 0; i < CutQ::MT; ++i) {
    if (cut.row + i * 16 >= valid_rows) break;  // the unit may belong to the next sequence
#pragma unroll
    for (int j = 0; j < CutQ::NT; ++j) {
      sums.add((row0 + cut.row) / UNIT + i, cut.col / 8 + j, rdQ[i][j]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_k, args.batch, args.total_k, BLOCK_N, blockIdx.x);
  const int kv_head = blockIdx.y, group = args.num_heads_q / args.num_heads_kv;
  const int col0 = tile.block * BLOCK_N, valid_cols = min(BLOCK_N, tile.length - col0);
  const int first_col = tile.start + col0;
  uint16_t* gdK = args.dk.at(first_col, kv_head);
  uint16_t* gdV = args.dv.at(first_col, kv_head);
  Sequence queries{0, 0};
  if (tile.batch_index >= 0) {
    queries = sequence_at(args.cu_seqlens_q, tile.batch_index, args.total_q);
  }
  const Mask mask{queries.length, tile.length, args.window_left, args.window_right};
  const int m_begin = mask.first_query(col0) / BLOCK_M;
  const int m_end = ceil_div(mask.end_query(col0 + valid_cols - 1), BLOCK_M);
  if (m_end <= m_begin) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(gdK, args.dk.token_stride, valid_cols);
    zero_rows<cfg::WIDTH_V, NUM_THREADS>(gdV, args.dv.token_stride, valid_cols);
    return;
  }

  const uint32_t sK = smem_address(smem), sV = sK + SmemPlan::V, sP = sK + SmemPlan::P;
  const uint32_t sdS = sK + SmemPlan::DS, sQ = sK + SmemPlan::Q, sdO = sK + SmemPlan::DO;
  const int warp = threadIdx.x / WARP_SIZE;
  const CutS cut_s(warp);
  const CutK cut_k(warp);
  const CutV cut_v(warp);
  const CutQ cut_q(warp);
  load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(sK, args.k.at(first_col, kv_head),
                                                  args.k.token_stride, valid_cols);
  load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(sV, args.v.at(first_col, kv_head),
                                                    args.v.token_stride, valid_cols);
  int head = kv_head * group, m = m_begin;
  load_queries(args, smem, queries, head, m, 0);

  const float scale_log2 = args.softmax_scale * LOG2E;
  float rdK[CutK::MT][CutK::NT][4], rdV[CutV::MT][CutV::NT][4];
  clear(rdK);
  clear(rdV);
  int stage = 0;
  for (const int end_head = head + group; head < end_head;) {
    const int row0 = m * BLOCK_M;
    const bool last_of_head = m + 1 == m_end;  // then the next head of the group begins
    const int next_m = last_of_head ? m_begin : m + 1, next_head = head + last_of_head;
    cp_async_wait<0>();
    __syncthreads();  // Q and dO are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && next_head < end_head) {
      load_queries(args, smem, queries, next_head, next_m, stage ^ 1);
    }
    const uint32_t sQ_now = sQ + stage * TileQ::BYTES, sdO_now = sdO + stage * TileO::BYTES;
    make_p_and_ds(smem, stage, mask, cut_s, row0, col0, scale_log2);
    __syncthreads();  // P and dS are whole

    multiply_xty<BLOCK_M>(rdV, OperandAT<TileP, CutV::SPAN_M>(sP, 0, cut_v.row),
                          OperandBT<TileO, CutV::SPAN_N>(sdO_now, 0, cut_v.col));
    if constexpr (cfg::ATOMIC) {
      const Workspace<HEAD_DIM> sums(args.dq_accum, head, args.total_q, args.batch, queries.start,
                                     tile.batch_index);
      add_dq(sums, sdS, sK, cut_q, row0, queries.length - row0);
    }
    multiply_xty<BLOCK_M>(rdK, OperandAT<TileP, CutK::SPAN_M>(sdS, 0, cut_k.row),
                          OperandBT<TileQ, CutK::SPAN_N>(sQ_now, 0, cut_k.col));
    if constexpr (NUM_STAGES == 2) {
      stage ^= 1;
    } else if (next_head < end_head) {
      __syncthreads();  // every warp has left Q and dO
      load_queries(args, smem, queries, next_head, next_m, 0);
    }
    head = next_head, m = next_m;
  }

  __syncthreads();  // every warp has left K and V: dK and dV take their place
  store_tile<TileK>(smem + SmemPlan::K, rdK, cut_k.row, cut_k.col,
                    [&](int, int) { return args.softmax_scale; });
  store_tile<TileV>(smem + SmemPlan::V, rdV, cut_v.row, cut_v.col, [](int, int) { return 1.0f; });
  __syncthreads();  // both are whole
  write_rows<TileK, cfg::WIDTH, NUM_THREADS, BLOCK_N>(gdK, args.dk.token_stride, smem + SmemPlan::K,
                                                      0, valid_cols, threadIdx.x);
  write_rows<TileV, cfg::WIDTH_V, NUM_THREADS, BLOCK_N>(
      gdV, args.dv.token_stride, smem + SmemPlan::V, 0, valid_cols, threadIdx.x);
}
