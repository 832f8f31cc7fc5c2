// backward_kv: dK = softmax_scale dS^T Q and dV = P^T dO in registers;
//              dQ += dS K in float32, by atomic adds (cfg::ATOMIC) or in order. wgmma and TMA.
//
//              BLOCK_M queries           A CTA owns BLOCK_N keys of one kv head and walks over the
//            +-------------------+       queries of every head of the group, BLOCK_M a step.
//   BLOCK_N  | S^T, dP^T         |       S and dP lie transposed, keys by queries: what a warpgroup
//   keys     |   -> P^T, dS^T    |       has of them in registers is operand A of its dV and dK.
//            +-------------------+       Grid: CTAs, as many as run at once, or fewer.
//
//   warpgroup 0, warp 0   loads K and V, then Q and dO, as far ahead as there are stages
//                warp 1   loads L and D beside these
//                warp 2   sends dS^T to the other CTA of a cluster
//                warp 3   finds the tiles to work on
//   warpgroups 1 ..       64 keys each: S^T and dP^T, then P^T and dS^T, then dV and dK; dS^T to
//                         shared memory. dQ of a step is one warpgroup's, in turn, a step later.
//
// What all CTAs add to dQ is what L2 can take: with cfg::CLUSTER two CTAs on neighbouring keys send
// each other dS, and each adds half of dQ's columns for the keys of both.
//
// Tiles that end beyond their sequence hold rows of the next one, be they NaN: the consumers fill
// these with zeros. L of such queries is inf: P is 0 there.
// Twin: rawattn/kernels_numba/backward_kv.py. Source: FlashAttention-3, arXiv 2407.08608, appendix B.1.
#include "sm90/backward.cuh"

// The CTAs of a cluster exchange dS, where half of dQ's columns are whole panels of K
constexpr bool SHARES = CLUSTER == 2 && HEAD_DIM % 128 == 0;
constexpr int DQ_COLS = SHARES ? HEAD_DIM / 2 : HEAD_DIM;  // of dQ, that a CTA adds to
static_assert(BLOCK_N == WARPGROUP_ROWS * CONSUMERS, "cfg::BLOCK_N: 64 keys for each of CONSUMERS");
constexpr int ADDERS = SHARES ? 1 : CLUSTER;  // to the same columns of dQ, one after the other
using TileKOfPeer = Tile<BLOCK_N, DQ_COLS>;
using KV = Ring<cfg::KV_STAGES>;
using Queries = Ring<cfg::NUM_STAGES>;
using Exchange = Ring<2>;

template <bool>
struct OfPeer {  // what the other CTA of a cluster sends, and its keys
  TileDS ds_of_peer[Exchange::STAGES];
  TileKOfPeer k_of_peer[KV::STAGES];
};
template <>
struct OfPeer<false> {};
struct alignas(1024) SmemPlan : OfPeer<SHARES> {
  TileK k[KV::STAGES];
  TileV v[KV::STAGES];
  TileQ q[Queries::STAGES];
  TileO dout[Queries::STAGES];
  TileDS ds[Exchange::STAGES];
  float lse_log2[Queries::STAGES][BLOCK_M], delta[Queries::STAGES][BLOCK_M];
  int large[Queries::STAGES];  // may scores of these be, see Cap
  KV keys;
  Queries queries;
  uint64_t terms_full[Queries::STAGES];  // of lse_log2 and delta
  Exchange exchange;                     // of ds, and for the writers of ds_of_peer
  uint64_t from_peer[Exchange::STAGES];
  Works<KeyWork> works;
  int* turns[CONSUMER_WARPS];
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

enum NamedBarrier : int { CONSUMERS_MEET = 1, TAIL_OF_FIRST };

// K and V of all tiles, and Q and dO of all that they walk over, by one thread
template <class Plan>
__device__ __forceinline__ void load_tiles(const Args& args, Plan& smem, int rank) {
  prefetch_tensormap(args.k_map);
  prefetch_tensormap(args.v_map);
  prefetch_tensormap(args.q_map);
  prefetch_tensormap(args.dout_map);
  Works<KeyWork>::Place work;
  Place<KV::STAGES> kv;
  Place<Queries::STAGES> place;
  while (true) {
    const KeyWork tile = smem.works.take(work);
    if (tile.valid_cols <= 0) return;
    // finding the next work takes as long as a step or two
    int until_want = (tile.m_end - tile.m_begin) * args.sizes.group() - 3;
    if (until_want <= 0) smem.works.want();
    if (tile.dead()) continue;
    kv.wait_empty(smem.keys);
    const uint64_t& keys_full = smem.keys.full[kv.stage];
    load_keys(smem.k[kv.stage], args.k_map, tile, rank, keys_full);
    load_keys(smem.v[kv.stage], args.v_map, tile, rank, keys_full);
    if constexpr (SHARES) {
      load_keys(smem.k_of_peer[kv.stage], args.k_map, tile, CLUSTER - 1 - rank, keys_full,
                rank * DQ_COLS);
    }
    kv.advance();
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      place.wait_empty(smem.queries);
      const uint64_t& full = smem.queries.full[place.stage];
      const int first = tile.queries.start + at.m * BLOCK_M;
      load_tile(smem.q[place.stage], args.q_map, at.head, first, full, EVICT_LAST);
      load_tile(smem.dout[place.stage], args.dout_map, at.head, first, full, EVICT_LAST);
      place.advance();
      if (--until_want == 0) smem.works.want();
    }
  }
}

template <class Plan>
__device__ __forceinline__ void consume(const Args& args, Plan& smem, int rank) {
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP - 1, 0);
  const int lane = threadIdx.x % WARP_SIZE, peer = CLUSTER - 1 - rank;
  const int warp_row = threadIdx.x % WARPGROUP / WARP_SIZE * 16;  // within the warpgroup's 64
  const int own_row = consumer * WARPGROUP_ROWS;                  // of its keys in the CTA's tiles
  const int own_key = first_key(rank, consumer);                  // and in the cluster's
  const Cap cap{args.cap};
  const float scale_log2 = cfg::HAS_SOFTCAP ? args.cap.top : args.sizes.softmax_scale * LOG2E;
  int*& turn = smem.turns[threadIdx.x / WARP_SIZE - 4];
  if (IN_ORDER && lane == 0) turn = nullptr;
  Works<KeyWork>::Place work;
  Place<KV::STAGES> kv;
  Place<Queries::STAGES> place;
  Place<Exchange::STAGES> written, read;
  while (true) {
    const KeyWork& tile = smem.works.look(work);  // and no copy: registers are short
    if (tile.valid_cols <= 0) return;
    const int valid = valid_keys(tile, rank, consumer), used = used_keys(tile, rank, consumer);
    const int key = tile.col0 + own_key, length = tile.queries.length;
    const Mask mask = tile.mask;
    TileK& k_tile = smem.k[kv.stage];
    TileV& v_tile = smem.v[kv.stage];
    KeptV rV;
    float rdK[1][HEAD_DIM / 8][4], rdV[1][HEAD_DIM_V / 8][4];
    clear(rdK);
    clear(rdV);
    if (!tile.dead()) {
      kv.wait_full(smem.keys);
      if (tile.used_cols() < CLUSTER * BLOCK_N) {
        clear_rows<WARPGROUP>(k_tile, own_row + used, own_row + WARPGROUP_ROWS);
        clear_rows<WARPGROUP>(v_tile, own_row + used, own_row + WARPGROUP_ROWS);
        if constexpr (SHARES) {
          clear_rows<WARPGROUP>(smem.k_of_peer[kv.stage], own_row + used_keys(tile, peer, consumer),
                                own_row + WARPGROUP_ROWS);
        }
        fence_proxy_async();
        bar_sync(CONSUMERS_MEET, CONSUMERS * WARPGROUP);
      }
      rV.load(v_tile, own_row + warp_row);
    }
    const Operand<TileK, K_MAJOR> own_keys(k_tile.address(), own_row);
    const Operand<TileV, K_MAJOR> own_values(v_tile.address(), own_row);
    int adder = 0, head_before = 0, row_before = 0;  // of the step before
    bool written_before = false;
    const auto number = [&] { return tile.number() * ADDERS + (ADDERS > 1 ? rank : 0); };
    const auto turn_before = [&] {
      return turn_at(args, tile, head_before, row_before + warp_row, SHARES ? rank : 0);
    };
    int seen = -1;  // of this turn, long before it is needed
    const auto look_at_turn = [&] {
      if (IN_ORDER && written_before && adder == consumer) seen = ld_relaxed(turn_before());
    };
    // dQ of a step: all columns, or half of them for the keys of both CTAs
    const auto add_dq = [&](int head, int row0) {
      read.wait_full(smem.exchange);
      float rdQ[1][DQ_COLS / 8][4];
      const int first_col = SHARES ? rank * DQ_COLS : 0;
      if (SHARES) mbarrier_wait(smem_address(smem.from_peer + read.stage), read.parity);
      wgmma_fence();
      multiply_xty<BLOCK_N, false>(
          rdQ, Operand<TileDS, MN_MAJOR>(smem.ds[read.stage].address()),
          Operand<TileK, MN_MAJOR>(k_tile.address() +
                                   first_col / TileK::PANEL * TileK::PANEL_BYTES));
      if constexpr (SHARES) {
        multiply_xty<BLOCK_N, true>(
            rdQ, Operand<TileDS, MN_MAJOR>(smem.ds_of_peer[read.stage].address()),
            Operand<TileKOfPeer, MN_MAJOR>(smem.k_of_peer[kv.stage].address()));
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      hold(rdQ);
      read.release(smem.exchange);
      if (SHARES && lane == 0) {
        mbarrier_arrive_cluster(mapa(smem_address(smem.exchange.empty + read.stage), peer));
      }
      const Workspace<cfg::WIDTH> sums(args.dq_accum, head, args.sizes.total_q, tile.queries.start,
                                       tile.queries.length);
      if (IN_ORDER) {
        wait_turn(tile, turn_before(), row0 + warp_row, number(), ADDERS > 1 && rank > 0, seen,
                  turn);
        seen = -1;
      }
      add_units<HEAD_DIM>(sums, rdQ, row0 + warp_row, first_col);
    };
    // dS^T of this warp to shared memory
    const auto write_ds = [&](const uint32_t (&rdSt)[BLOCK_M / 16][4]) {
      written.wait_empty(smem.exchange);
      int row = own_row + warp_row;
      if constexpr (cfg::HAS_SOFTCAP) hold(row);  // or its addresses take registers all along
      write_transposed(smem.ds[written.stage], rdSt, row, 0);
      fence_proxy_async();
      __syncwarp();  // this warp's part is written
      if (lane == 0) mbarrier_arrive(smem_address(smem.exchange.full + written.stage));
      written.advance();
    };
    // what a step adds to dK and dV, and its dS^T
    const auto add_step = [&](const TileQ& q, const TileO& dout, int row0) {
      float rP[1][BLOCK_M / 8][4], rdS[1][BLOCK_M / 8][4];
      wgmma_fence();
      multiply_xyt<HEAD_DIM, false>(rP, own_keys, Operand<TileQ, K_MAJOR>(q.address()));
      wgmma_commit_group();
      multiply_kept(rdS, rV, own_values, Operand<TileO, K_MAJOR>(dout.address()));
      wgmma_commit_group();
      look_at_turn();
      wgmma_wait_group<1>();
      hold(rP);
      const float* lse_log2 = smem.lse_log2[place.stage] + lane % 4 * 2;
      const float* delta = smem.delta[place.stage] + lane % 4 * 2;
      const auto wait_for_terms = [&] {
        mbarrier_wait(smem_address(smem.terms_full + place.stage), place.parity);
      };
      if constexpr (cfg::HAS_SOFTCAP) {
        wait_for_terms();
        cap.to_tanh(rP, lse_log2, smem.large[place.stage]);
      }
      if (mask.cuts(row0, BLOCK_M, key, WARPGROUP_ROWS)) {
        apply_mask_of_keys(rP, mask, key + warp_row + lane / 4, row0 + lane % 4 * 2, cap.masked());
      }
      uint32_t rPt[BLOCK_M / 16][4], rdSt[BLOCK_M / 16][4];
      if constexpr (cfg::HAS_SOFTCAP) {
        exponentiate(rP, rPt, lse_log2, scale_log2);
      } else {
        wait_for_terms();
        exponentiate(rP, lse_log2, scale_log2);
      }
      wgmma_wait_group<0>();
      hold(rdS);
      weigh(rdS, rP, delta);
      if constexpr (!cfg::HAS_SOFTCAP) to_operand(rPt, rP);
      to_operand(rdSt, rdS);
      wgmma_fence();
      multiply_py(rdV, rPt, Operand<TileO, MN_MAJOR>(dout.address()));
      multiply_py(rdK, rdSt, Operand<TileQ, MN_MAJOR>(q.address()));
      wgmma_commit_group();
      write_ds(rdSt);
      if (IN_ORDER) pass_turn(number(), turn);
      wgmma_wait_group<0>();
      hold(rdV);
      hold(rdK);
      hold(rPt);
      hold(rdSt);
    };
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      place.wait_full(smem.queries);
      TileQ& q = smem.q[place.stage];
      TileO& dout = smem.dout[place.stage];
      const int row0 = at.m * BLOCK_M, rows = length - row0;
      if (PASSES_OVER && mask.hides(row0, BLOCK_M, key, WARPGROUP_ROWS)) {
        if (IN_ORDER) pass_turn(number(), turn);
        mbarrier_wait(smem_address(smem.terms_full + place.stage), place.parity);
        write_ds({});
      } else {
        if (rows < BLOCK_M) {
          clear_rows<WARPGROUP>(q, rows);
          clear_rows<WARPGROUP>(dout, rows);
          fence_proxy_async();
          bar_sync(TAIL_OF_FIRST + consumer, WARPGROUP);
        }
        add_step(q, dout, row0);
      }
      mbarrier_arrive(
          smem_address(smem.queries.empty + place.stage));  // each lane has read L and D
      place.advance();
      if (written_before) {
        if (adder == consumer) add_dq(head_before, row_before);
        read.advance();
        adder = adder + 1 == CONSUMERS ? 0 : adder + 1;
      }
      head_before = at.head, row_before = row0, written_before = true;
    }
    if (!tile.dead()) {
      if (adder == consumer) add_dq(head_before, row_before);
      read.advance();
      if (IN_ORDER) pass_turn(number(), turn);
      kv.release(smem.keys);
      kv.advance();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8 + lane / 4;
      const int token = tile.first_col + own_key + row;
      write_row_of_quad<cfg::WIDTH>(args.dk.at(token, tile.kv_head), rdK, half,
                                    args.sizes.softmax_scale, row < valid);
      write_row_of_quad<cfg::WIDTH_V>(args.dv.at(token, tile.kv_head), rdV, half, 1.0f,
                                      row < valid);
    }
    smem.works.leave(work);
  }
}

extern "C" __global__ void __cluster_dims__(cfg::CLUSTER, 1, 1)
    __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS) backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const int rank = CLUSTER == 1 ? 0 : cluster_ctarank();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / WARP_SIZE, 0);
  if (threadIdx.x == 0) {
    smem.queries.init(CONSUMERS * WARPGROUP, 2);         // writers: Q and dO
    smem.exchange.init(SHARES ? 8 : 4, CONSUMER_WARPS);  // a warpgroup reads it, of each CTA
    for (uint64_t& barrier : smem.from_peer) mbarrier_init(smem_address(&barrier), 1);
    for (uint64_t& barrier : smem.terms_full) mbarrier_init(smem_address(&barrier), WARP_SIZE);
    smem.keys.init(CONSUMER_WARPS, SHARES ? 3 : 2);  // writers: K, V, and K of the peer
    smem.works.init(CONSUMERS * WARPGROUP + WARP_SIZE + (SHARES ? 2 : 1));
    fence_mbarrier_init();
  }
  if constexpr (CLUSTER == 2) {
    barrier_cluster();  // the barriers of both CTAs are there
  } else {
    __syncthreads();  // the barriers are there
  }
  if (warp < 4) {
    setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
    if (warp == 1) load_terms(args, smem);
    if (warp == 0 && elect_sync()) load_tiles(args, smem, rank);
    if constexpr (SHARES) {
      if (warp == 2 && elect_sync()) send_ds(args, smem, CLUSTER - 1 - rank);
    }
    if (warp == 3) find_tiles(args, smem);
  } else {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    consume(args, smem, rank);
  }
  if constexpr (CLUSTER == 2) barrier_cluster();  // nobody reaches into a CTA that has gone
}
