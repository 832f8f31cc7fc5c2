// double_backward_q: gQ = softmax_scale (tdS K + dS ddK) in registers, without atomics: the second
//                    half of the deterministic form; the first is double_backward_kv, whose head
//                    has tdS and dS.
//
//              BLOCK_N keys             A CTA owns BLOCK_M queries of one head and walks over their
//            +-------------+            keys. Its warps own whole rows: tdS and dS feed gQ straight
//   BLOCK_M  | S, E, dP, X |  x K, ddK  from registers.
//   queries  | -> dS, tdS  |    -> gQ   Grid: (tiles of queries, upper bound; query heads).
//            +-------------+
//
// Twin: rawattn/kernels_numba/double_backward_q.py. Source: the derivative of FlashAttention's
// backward, arXiv 2205.14135, algorithm 4, loops exchanged; rawattn/reference has the equations.
#include "base/varlen.cuh"
#include "sm80/tangent.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS;  // query rows of a warp
constexpr int MT = WARP_M / 16;
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q =
      0;  // gQ overlaps Q at the end: a warp reads and writes its own rows only
  static constexpr int DDQ = Q + TileQ::BYTES;
  static constexpr int DO = DDQ + TileQ::BYTES;
  static constexpr int K = DO + TileO::BYTES;
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
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  const float* ddlse;       // (num_heads_q, total_q)
  const float* ddelta;      // (num_heads_q, total_q)
  Tensor gq;                // (total_q, num_heads_q, head_dim)
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

// gQ += tdS K + dS ddK
template <int NT>
__device__ __forceinline__ void add_products(float (&rgQ)[MT][HEAD_DIM / 8][4],
                                             const float (&rtdS)[MT][NT][4],
                                             const float (&rdS)[MT][NT][4],
                                             const OperandBT<TileK>& k,
                                             const OperandBT<TileK>& ddk) {
  multiply_py(rgQ, rtdS, k);
  if constexpr (cfg::HAS_TK) multiply_py(rgQ, rdS, ddk);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.batch, args.total_q, BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, kv_head = head / (args.num_heads_q / args.num_heads_kv);
  const int m_block = cfg::HAS_RIGHT && tile.batch_index >= 0
                          ? ceil_div(tile.length, BLOCK_M) - 1 - tile.block  // longest first
                          : tile.block;
  const int row0 = m_block * BLOCK_M, valid_rows = min(BLOCK_M, tile.length - row0);
  const int first_row = tile.start + row0;
  uint16_t* ggQ = args.gq.at(first_row, head);
  Sequence keys{0, 0};
  if (tile.batch_index >= 0) keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.total_k);
  const Mask mask{tile.length, keys.length, args.window_left, args.window_right};
  const int n_begin = mask.first_key(row0) / BLOCK_N;
  const int n_end = ceil_div(mask.end_key(row0 + valid_rows - 1), BLOCK_N);
  if (n_end <= n_begin) {  // these queries see nothing, or belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(ggQ, args.gq.token_stride, valid_rows);
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
  const auto load_step = [&](int n) {
    load_k(SmemPlan::K, args.k, n);
    if constexpr (cfg::HAS_TK) load_k(SmemPlan::DDK, args.ddk, n);
    if constexpr (HAS_E) load_v(SmemPlan::V, args.v, n);
    if constexpr (cfg::HAS_TV) load_v(SmemPlan::DDV, args.ddv, n);
    cp_async_commit();
  };
  load_q(SmemPlan::Q, args.q);
  if constexpr (cfg::HAS_TQ) load_q(SmemPlan::DDQ, args.ddq);
  load_tile_async<TileO, cfg::WIDTH_V, NUM_THREADS>(
      s0 + SmemPlan::DO, args.dout.at(first_row, head), args.dout.token_stride, valid_rows);
  load_step(n_end - 1);
  const int64_t statistics = static_cast<int64_t>(head) * args.total_q + first_row;
  const int stat_row = warp_row + lane / 4;
  const auto lse_log2 = load_lse_log2<MT>(args.lse + statistics, stat_row, valid_rows);
  const RowTerms<MT> terms{load_delta<MT>(args.delta + statistics, stat_row, lse_log2),
                           load_delta<MT>(args.ddlse + statistics, stat_row, lse_log2),
                           load_delta<MT>(args.ddelta + statistics, stat_row, lse_log2)};

  const OperandA<TileQ> q(s0 + SmemPlan::Q, warp_row);
  const OperandA<TileO> dout(s0 + SmemPlan::DO, warp_row);
  const OperandB<TileK> k(s0 + SmemPlan::K);
  const OperandB<TileV> v(s0 + SmemPlan::V);
  float rgQ[MT][HEAD_DIM / 8][4];
  clear(rgQ);
  for (int n = n_end - 1; n >= n_begin; --n) {
    const int col0 = n * BLOCK_N;
    cp_async_wait<0>();
    __syncthreads();  // K, ddK, V and ddV are here
    float rP[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
    float rdS[MT][BLOCK_N / 8][4], rtdS[MT][BLOCK_N / 8][4];
    multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK - SmemPlan::K>(rP, rE, q,
                                                                                        k);
    multiply_gradients<HEAD_DIM_V, SmemPlan::DDV - SmemPlan::V>(rdS, rtdS, dout, v);
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + warp_row + lane / 4, col0 + lane % 4 * 2);
    }
    scores_to_p(rP, lse_log2, args.softmax_scale * LOG2E);
    tangents_of_p_and_ds(rE, rdS, rtdS, rP, terms, args.softmax_scale);
    add_products(rgQ, rtdS, rdS, OperandBT<TileK>(s0 + SmemPlan::K),
                 OperandBT<TileK>(s0 + SmemPlan::DDK));
    if (n > n_begin) {
      __syncthreads();  // every warp has left K, ddK, V and ddV
      load_step(n - 1);
    }
  }

  __syncthreads();  // every warp has left Q
  store_tile<TileQ>(smem + SmemPlan::Q, rgQ, warp_row, 0,
                    [&](int, int) { return args.softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileQ, cfg::WIDTH, WARP_SIZE, WARP_M>(ggQ, args.gq.token_stride, smem + SmemPlan::Q,
                                                   warp_row, valid_rows, lane);
}
