// backward_kv_wide: what backward_kv computes, where dK and dV of 64 keys are too wide for the
// registers of one warpgroup. wgmma and TMA.
//
//   Two warpgroups share 64 keys: each has S^T and dP^T of half of the BLOCK_M queries of a step,
//   and half of dK's and dV's columns. So P^T and dS^T go through shared memory, from which both
//   warpgroups read all of them. dQ, a step later: two CTAs of a cluster on neighbouring keys send
//   each other dS^T, and four warpgroups add a panel of dQ's columns each, for the keys of both.
//
//   warpgroup 0, warp 0   loads K and V, then Q and dO, as far ahead as there are stages
//                warp 1   loads L and D beside these
//                warp 2   sends dS^T to the other CTA of the cluster
//                warp 3   finds the tiles to work on
//   warpgroups 1 and 2    as above
//
// Twin: rawattn/kernels_numba/backward_kv.py. Source: FlashAttention-3, arXiv 2407.08608, appendix B.1.
#include "sm90/backward.cuh"

static_assert(CONSUMERS == 2 && CLUSTER == 2 && KEY_BLOCKS == 1, "cfg: two by two, 64 keys each");
constexpr int OWN_QUERIES = BLOCK_M / CONSUMERS;
using TilePt = Tile<BLOCK_N, BLOCK_M>;
using Queries = Ring<cfg::Q_STAGES>;  // Q, and L with D
using Douts = Ring<cfg::NUM_STAGES>;  // dO
using Exchange = Ring<2>;
// Panels of dQ: of four or more each warpgroup has its own; fewer go round from step to step, which
// takes all of K's columns of both CTAs
constexpr int PANELS = HEAD_DIM / TileK::PANEL;
constexpr bool GOES_ROUND = PANELS < 4;
static_assert(PANELS <= 4, "cfg::HEAD_DIM: a panel of dQ for each of four warpgroups");
using TileKOfPeer = Tile<BLOCK_N, (GOES_ROUND ? HEAD_DIM : HEAD_DIM / 2)>;
static_assert(TileKOfPeer::PANEL == TileK::PANEL, "panels of the same width");

struct alignas(1024) SmemPlan {
  TileK k;
  TileV v;
  TileKOfPeer k_of_peer;
  TileQ q[Queries::STAGES];
  TileO dout[Douts::STAGES];
  TilePt p[Exchange::STAGES];
  TileDS ds[Exchange::STAGES], ds_of_peer[Exchange::STAGES];
  float lse_log2[Queries::STAGES][BLOCK_M], delta[Queries::STAGES][BLOCK_M];
  int large[Queries::STAGES];  // may scores of these be, see Cap
  Ring<1> keys;
  Queries queries;
  uint64_t terms_full[Queries::STAGES];  // of lse_log2 and delta
  Douts douts;
  Exchange exchange;  // of p and ds, and for the writers of ds_of_peer
  uint64_t from_peer[Exchange::STAGES];
  uint64_t cleared;  // a phase ends when what lies past the keys is zero
  Works<KeyWork> works;
  int* turns[CONSUMER_WARPS];
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

enum NamedBarrier : int { TAIL_OF_FIRST = 1 };

// The columns of dK and dV that each of the two consumers adds up: the first has more of dK's panels,
// and of dV what makes both even, where that is whole panels or less than one.
__device__ constexpr int half_of_panels(int cols) {
  return (cols / TileK::PANEL + 1) / 2 * TileK::PANEL;
}
constexpr int K_CUT = half_of_panels(HEAD_DIM), EVEN = (2 * K_CUT - HEAD_DIM + HEAD_DIM_V) / 2;
constexpr bool IS_EVEN = EVEN % TileV::PANEL == 0 || HEAD_DIM_V - EVEN < TileV::PANEL;
constexpr int V_CUT = IS_EVEN ? EVEN : half_of_panels(HEAD_DIM_V);
template <class TileX, int CUT, bool BEFORE>
struct Part {
  static constexpr int FIRST = BEFORE ? 0 : CUT, COLS = BEFORE ? CUT : TileX::COLS - CUT;
};
// Registers that narrow tiles leave, of V's steps and of accumulators, go to steps of K: a step takes
// four of a thread, eight columns of dK or dV as many
constexpr int OF_FIRST = K_CUT + HEAD_DIM_V - V_CUT, OF_SECOND = HEAD_DIM - K_CUT + V_CUT;
constexpr int MOST = OF_FIRST > OF_SECOND ? OF_FIRST : OF_SECOND;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int ROOM = cfg::V_STEPS - V_STEPS + (WIDEST - MOST) / 8;
constexpr int K_STEPS = HEAD_DIM / 16 < ROOM ? HEAD_DIM / 16 : ROOM;

// K and V of all tiles, and Q and dO of all that they walk over, by one thread
__device__ __forceinline__ void load_tiles(const Args& args, SmemPlan& smem, int rank) {
  prefetch_tensormap(args.k_map);
  prefetch_tensormap(args.v_map);
  prefetch_tensormap(args.q_map);
  prefetch_tensormap(args.dout_map);
  Works<KeyWork>::Place work;
  Place<1> kv;
  Place<Queries::STAGES> query;
  Place<Douts::STAGES> gradient;
  while (true) {
    const KeyWork tile = smem.works.take(work);
    if (tile.valid_cols <= 0) return;
    // finding the next work takes as long as a step or two
    int until_want = (tile.m_end - tile.m_begin) * args.sizes.group() - 2;
    if (until_want <= 0) smem.works.want();
    if (tile.dead()) continue;
    kv.wait_empty(smem.keys);
    const uint64_t& keys_full = smem.keys.full[kv.stage];
    load_keys(smem.k, args.k_map, tile, rank, keys_full);
    load_keys(smem.v, args.v_map, tile, rank, keys_full);
    load_keys(smem.k_of_peer, args.k_map, tile, CLUSTER - 1 - rank, keys_full,
              GOES_ROUND ? 0 : rank * TileKOfPeer::COLS);
    kv.advance();
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      const int first = tile.queries.start + at.m * BLOCK_M;
      query.wait_empty(smem.queries);
      load_tile(smem.q[query.stage], args.q_map, at.head, first, smem.queries.full[query.stage],
                EVICT_LAST);
      query.advance();
      gradient.wait_empty(smem.douts);
      load_tile(smem.dout[gradient.stage], args.dout_map, at.head, first,
                smem.douts.full[gradient.stage], EVICT_LAST);
      gradient.advance();
      if (--until_want == 0) smem.works.want();
    }
  }
}

// The address of NT * 8 columns from `COL` on, of panels or within one
template <int COL, int NT, class TileY>
__device__ __forceinline__ uint32_t columns_of(const TileY& y) {
  constexpr int WITHIN = COL % TileY::PANEL;
  static_assert(WITHIN == 0 || WITHIN + NT * 8 <= TileY::PANEL, "columns of two panels");
  return y.address() + COL / TileY::PANEL * TileY::PANEL_BYTES + WITHIN * ELEMENT_BYTES;
}
// c += X^T Y of a step, columns of Y from `COL` on: of the consumer's own queries, whose X^T it has in
// registers, or of the other's, from shared memory
template <int CONSUMER, int COL, class TileY, int NT>
__device__ __forceinline__ void add_own(float (&c)[1][NT][4],
                                        const uint32_t (&x)[OWN_QUERIES / 16][4], const TileY& y) {
  const Operand<TileY, MN_MAJOR> columns(columns_of<COL, NT>(y));
#pragma unroll
  for (int k = 0; k < OWN_QUERIES / 16; ++k) {
    Wgmma<NT * 8>::template multiply<true, MN_MAJOR>(c, x[k],
                                                     columns.at(CONSUMER * OWN_QUERIES / 16 + k));
  }
}
template <int CONSUMER, int COL, class TileX, class TileY, int NT>
__device__ __forceinline__ void add_other(float (&c)[1][NT][4], const TileX& x, const TileY& y) {
  const Operand<TileX, K_MAJOR> rows(x.address());
  const Operand<TileY, MN_MAJOR> columns(columns_of<COL, NT>(y));
#pragma unroll
  for (int k = 0; k < OWN_QUERIES / 16; ++k) {
    const int at = (1 - CONSUMER) * OWN_QUERIES / 16 + k;
    Wgmma<NT * 8>::template multiply<true, K_MAJOR, MN_MAJOR>(c, rows.at(at), columns.at(at));
  }
}

template <int CONSUMER>
__device__ __forceinline__ void consume(const Args& args, SmemPlan& smem, int rank) {
  using OfK = Part<TileK, K_CUT, CONSUMER == 0>;
  using OfV = Part<TileV, V_CUT, CONSUMER == 1>;
  constexpr int OWN_QUERY = CONSUMER * OWN_QUERIES;
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row = threadIdx.x % WARPGROUP / WARP_SIZE * 16;
  const Cap cap{args.cap};
  const float scale_log2 = cfg::HAS_SOFTCAP ? args.cap.top : args.sizes.softmax_scale * LOG2E;
  int*& turn = smem.turns[threadIdx.x / WARP_SIZE - 4];
  if (IN_ORDER && lane == 0) turn = nullptr;
  Works<KeyWork>::Place work;
  Place<1> kv;
  Place<Queries::STAGES> query;
  Place<Douts::STAGES> gradient;
  Place<Exchange::STAGES> written, read;
  int parity_of_cleared = 0;
  while (true) {
    const KeyWork& tile = smem.works.look(work);  // and no copy: registers are short
    if (tile.valid_cols <= 0) return;
    const int valid = valid_keys(tile, rank, 0), used = used_keys(tile, rank, 0);
    const int length = tile.queries.length;
    const int key = tile.col0 + first_key(rank, 0);
    const Mask mask = tile.mask;
    Kept<TileK, K_STEPS> rK;
    KeptV rV;
    float rdK[1][OfK::COLS > 0 ? OfK::COLS / 8 : 1][4];
    float rdV[1][OfV::COLS > 0 ? OfV::COLS / 8 : 1][4];
    clear(rdK);
    clear(rdV);
    if (!tile.dead()) {
      kv.wait_full(smem.keys);
      if (tile.used_cols() < CLUSTER * BLOCK_N) {
        if (CONSUMER == 0) clear_rows<WARPGROUP>(smem.k, used);
        if (CONSUMER == 1) {
          clear_rows<WARPGROUP>(smem.v, used);
          clear_rows<WARPGROUP>(smem.k_of_peer, used_keys(tile, CLUSTER - 1 - rank, 0));
        }
        fence_proxy_async();
        mbarrier_arrive(smem_address(&smem.cleared));  // each lane for its own
        mbarrier_wait(smem_address(&smem.cleared), parity_of_cleared);
        parity_of_cleared ^= 1;
      }
      rK.load(smem.k, warp_row);
      rV.load(smem.v, warp_row);
    }
    const auto write_ds = [&](const uint32_t (&rdSt)[OWN_QUERIES / 16][4]) {
      write_transposed(smem.ds[written.stage], rdSt, warp_row, OWN_QUERY);
      fence_proxy_async();
      __syncwarp();  // this warp's part is written
      if (lane == 0) mbarrier_arrive(smem_address(smem.exchange.full + written.stage));
    };
    int round = rank * CONSUMERS + CONSUMER;  // its panel of dQ, if there is one
    const auto has_panel = [&] { return !GOES_ROUND || round < PANELS; };
    int head_before = 0, row_before = 0;  // of the step before
    bool written_before = false;
    const auto turn_before = [&] {
      return turn_at(args, tile, head_before, row_before + warp_row, round);
    };
    int seen = -1;  // of this turn, long before it is needed: a register, which not all builds have
    const auto look_at_turn = [&] {
      constexpr bool LOOKS = IN_ORDER && cfg::WIDTH == HEAD_DIM;
      if (LOOKS && written_before && has_panel()) seen = ld_relaxed(turn_before());
    };
    // what a step adds to dK and dV, from P^T and dS^T, which it makes
    const auto add_step = [&](TileQ& q, int row0, uint32_t (&rPt)[OWN_QUERIES / 16][4],
                              uint32_t (&rdSt)[OWN_QUERIES / 16][4]) {
      float rP[1][OWN_QUERIES / 8][4], rdS[1][OWN_QUERIES / 8][4];
      wgmma_fence();
      multiply_kept(rP, rK, Operand<TileK, K_MAJOR>(smem.k.address()),
                    Operand<TileQ, K_MAJOR>(q.address(), OWN_QUERY));
      wgmma_commit_group();
      gradient.wait_full(smem.douts);
      TileO& dout = smem.dout[gradient.stage];
      if (length - row0 < BLOCK_M) {
        clear_rows<WARPGROUP>(dout, length - row0);
        fence_proxy_async();
        bar_sync(TAIL_OF_FIRST + CONSUMER, WARPGROUP);
      }
      wgmma_fence();
      multiply_kept(rdS, rV, Operand<TileV, K_MAJOR>(smem.v.address()),
                    Operand<TileO, K_MAJOR>(dout.address(), OWN_QUERY));
      wgmma_commit_group();
      look_at_turn();
      wgmma_wait_group<1>();
      hold(rP);
      const float* lse_log2 = smem.lse_log2[query.stage] + OWN_QUERY + lane % 4 * 2;
      const float* delta = smem.delta[query.stage] + OWN_QUERY + lane % 4 * 2;
      const auto wait_for_terms = [&] {
        mbarrier_wait(smem_address(smem.terms_full + query.stage), query.parity);
      };
      if constexpr (cfg::HAS_SOFTCAP) {
        wait_for_terms();
        cap.to_tanh(rP, lse_log2, smem.large[query.stage]);
      }
      if (mask.cuts(row0 + OWN_QUERY, OWN_QUERIES, key, WARPGROUP_ROWS)) {
        apply_mask_of_keys(rP, mask, key + warp_row + lane / 4, row0 + OWN_QUERY + lane % 4 * 2,
                           cap.masked());
      }
      if constexpr (cfg::HAS_SOFTCAP) {
        exponentiate(rP, rPt, lse_log2, scale_log2);
      } else {
        wait_for_terms();
        exponentiate(rP, lse_log2, scale_log2);
        to_operand(rPt, rP);
      }
      written.wait_empty(smem.exchange);
      write_transposed(smem.p[written.stage], rPt, warp_row, OWN_QUERY);
      wgmma_wait_group<0>();
      hold(rdS);
      weigh(rdS, rP, delta);
      to_operand(rdSt, rdS);
      write_ds(rdSt);
      wgmma_fence();
      if constexpr (OfV::COLS > 0) add_own<CONSUMER, OfV::FIRST>(rdV, rPt, dout);
      if constexpr (OfK::COLS > 0) add_own<CONSUMER, OfK::FIRST>(rdK, rdSt, q);
      written.wait_full(smem.exchange);
      wgmma_fence();
      if constexpr (OfV::COLS > 0) {
        add_other<CONSUMER, OfV::FIRST>(rdV, smem.p[written.stage], dout);
      }
      if constexpr (OfK::COLS > 0) {
        add_other<CONSUMER, OfK::FIRST>(rdK, smem.ds[written.stage], q);
      }
      wgmma_commit_group();
      if (IN_ORDER) pass_turn(tile.number(), turn);
      written.advance();
    };
    // a panel of dQ of the step before, for the keys of both CTAs
    const auto wait_for_ds = [&] {
      read.wait_full(smem.exchange);
      mbarrier_wait(smem_address(smem.from_peer + read.stage), read.parity);
    };
    const auto begin_dq = [&](float (&rdQ)[1][TileK::PANEL / 8][4]) {
      wait_for_ds();
      const int panel = round * TileK::PANEL_BYTES;
      const int panel_of_peer = GOES_ROUND ? panel : CONSUMER * TileK::PANEL_BYTES;
      wgmma_fence();
      multiply_xty<BLOCK_N, false>(rdQ, Operand<TileDS, MN_MAJOR>(smem.ds[read.stage].address()),
                                   Operand<TileK, MN_MAJOR>(smem.k.address() + panel));
      multiply_xty<BLOCK_N, true>(
          rdQ, Operand<TileDS, MN_MAJOR>(smem.ds_of_peer[read.stage].address()),
          Operand<TileKOfPeer, MN_MAJOR>(smem.k_of_peer.address() + panel_of_peer));
      wgmma_commit_group();
    };
    const auto end_dq = [&](float (&rdQ)[1][TileK::PANEL / 8][4], int head, int row0) {
      wgmma_wait_group<0>();
      hold(rdQ);
      const Workspace<cfg::WIDTH> sums(args.dq_accum, head, args.sizes.total_q, tile.queries.start,
                                       length);
      if (IN_ORDER) {
        wait_turn(tile, turn_before(), row0 + warp_row, tile.number(), false, seen, turn);
        seen = -1;
      }
      add_units<HEAD_DIM>(sums, rdQ, row0 + warp_row, round * TileK::PANEL);
    };
    const auto leave_ds = [&] {
      if (!has_panel()) wait_for_ds();  // a phase of its barrier ends before the next
      read.release(smem.exchange);
      if (lane == 0) {
        mbarrier_arrive_cluster(
            mapa(smem_address(smem.exchange.empty + read.stage), CLUSTER - 1 - rank));
      }
      read.advance();
      if (GOES_ROUND) round = (round + 1) % 4;
    };
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      query.wait_full(smem.queries);
      TileQ& q = smem.q[query.stage];
      const int row0 = at.m * BLOCK_M;
      uint32_t rPt[OWN_QUERIES / 16][4] = {}, rdSt[OWN_QUERIES / 16][4] = {};
      const bool hidden = PASSES_OVER && mask.hides(row0, BLOCK_M, key, WARPGROUP_ROWS);
      if (hidden) {
        mbarrier_wait(smem_address(smem.terms_full + query.stage), query.parity);
        gradient.wait_full(smem.douts);
        if (IN_ORDER) pass_turn(tile.number(), turn);
        written.wait_empty(smem.exchange);
        write_ds(rdSt);
        written.advance();
      } else {
        if (length - row0 < BLOCK_M) {
          clear_rows<WARPGROUP>(q, length - row0);
          fence_proxy_async();
          bar_sync(TAIL_OF_FIRST + CONSUMER, WARPGROUP);
        }
        add_step(q, row0, rPt, rdSt);
      }
      const auto leave = [&] {
        hold(rdK);
        hold(rdV);
        hold(rPt);
        hold(rdSt);
        mbarrier_arrive(
            smem_address(smem.queries.empty + query.stage));  // each lane has read L and D
        query.advance();
        gradient.release(smem.douts);
        gradient.advance();
      };
      if (written_before && has_panel()) {
        float rdQ[1][TileK::PANEL / 8][4];
        begin_dq(rdQ);
        wgmma_wait_group<1>();
        leave();
        end_dq(rdQ, head_before, row_before);
      } else {
        wgmma_wait_group<0>();
        leave();
      }
      if (written_before) leave_ds();
      head_before = at.head, row_before = row0, written_before = true;
    }
    if (!tile.dead()) {
      if (IN_ORDER) pass_turn(tile.number(), turn);
      if (has_panel()) {
        float rdQ[1][TileK::PANEL / 8][4];
        begin_dq(rdQ);
        end_dq(rdQ, head_before, row_before);
      }
      leave_ds();
      if (IN_ORDER) pass_turn(tile.number(), turn);
      kv.release(smem.keys);
      kv.advance();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8 + lane / 4;
      const int token = tile.first_col + first_key(rank, 0) + row;
      if constexpr (OfK::COLS > 0) {
        write_row_of_quad<cfg::WIDTH - OfK::FIRST>(args.dk.at(token, tile.kv_head) + OfK::FIRST,
                                                   rdK, half, args.sizes.softmax_scale,
                                                   row < valid);
      }
      if constexpr (OfV::COLS > 0) {
        write_row_of_quad<cfg::WIDTH_V - OfV::FIRST>(args.dv.at(token, tile.kv_head) + OfV::FIRST,
                                                     rdV, half, 1.0f, row < valid);
      }
    }
    smem.works.leave(work);
  }
}

extern "C" __global__ void __cluster_dims__(cfg::CLUSTER, 1, 1)
    __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS) backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const int rank = cluster_ctarank();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / WARP_SIZE, 0);
  if (threadIdx.x == 0) {
    smem.keys.init(CONSUMER_WARPS, 3);  // writers: K, V, and K of the peer
    smem.queries.init(CONSUMERS * WARPGROUP);
    smem.douts.init(CONSUMER_WARPS);
    smem.exchange.init(2 * CONSUMER_WARPS, CONSUMER_WARPS);
    for (uint64_t& barrier : smem.from_peer) mbarrier_init(smem_address(&barrier), 1);
    for (uint64_t& barrier : smem.terms_full) mbarrier_init(smem_address(&barrier), WARP_SIZE);
    mbarrier_init(smem_address(&smem.cleared), CONSUMERS * WARPGROUP);
    smem.works.init(CONSUMERS * WARPGROUP + WARP_SIZE + 2);
    fence_mbarrier_init();
  }
  barrier_cluster();  // the barriers of both CTAs are there
  if (warp < 4) {
    setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
    if (warp == 0 && elect_sync()) load_tiles(args, smem, rank);
    if (warp == 1) load_terms(args, smem);
    if (warp == 2 && elect_sync()) send_ds(args, smem, CLUSTER - 1 - rank);
    if (warp == 3) find_tiles(args, smem);
  } else {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    if (warp < 8) {
      consume<0>(args, smem, rank);
    } else {
      consume<1>(args, smem, rank);
    }
  }
  barrier_cluster();  // nobody reaches into a CTA that has gone
}
