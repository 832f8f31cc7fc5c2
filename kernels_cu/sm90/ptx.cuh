// PTX that only Hopper has, matrix products apart: the tensor memory accelerator (TMA), barriers
// that count bytes, named barriers, registers moved between warpgroups.
#pragma once
#include "base/ptx.cuh"

// What cuTensorMapEncodeTiled makes; a kernel's parameter, which TMA reads by its address
struct alignas(128) TensorMap {
  char opaque[128];
};

// L2 eviction priorities, as createpolicy encodes them
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;
constexpr uint64_t EVICT_LAST = 0x14F0000000000000;

// Makes inits of mbarriers visible to TMA
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Orders this thread's ordinary accesses to shared memory before those of TMA and wgmma
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
// An arrival that makes the phase wait for so many bytes as well
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(
          barrier),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}
// A box of a (tokens, heads, dim) tensor to shared memory; what lies outside becomes zeros. Its
// bytes count at `barrier`.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t dst, const TensorMap& map, int col,
                                                        int head, int token, uint32_t barrier,
                                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(dst),
      "l"(&map), "r"(col), "r"(head), "r"(token), "r"(barrier), "l"(policy)
      : "memory");
}

// --- clusters: CTAs that reach into each other's shared memory ------------------------------------

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// The same place in the shared memory of another CTA of the cluster
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An arrival in another CTA's shared memory, that says nothing of what this thread has written: a
// release would wait for its reductions in global memory too
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(barrier)
               : "memory");
}
// All threads of the cluster meet
__device__ __forceinline__ void barrier_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
                   : "memory");
}
// Bytes of this CTA's shared memory to that of another one, where they count at `barrier`
__device__ __forceinline__ void cp_async_bulk_cluster(uint32_t dst, uint32_t src, int bytes,
                                                      uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n" ::"r"(dst),
      "r"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// Barriers 1 to 15 of a CTA: `threads` arrive, some of which wait
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// one lane of a warp that is together
__device__ __forceinline__ bool elect_sync() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(chosen));
  return chosen != 0;
}

// Registers of a thread from here on, given back or asked for by a whole warpgroup
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// x is made here, not in a branch that comes to want it
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void hold(int& x) { asm volatile("" : "+r"(x)); }

// The largest of three, in one instruction
__device__ __forceinline__ int max3(int a, int b, int c) {
  int largest;
  asm("{\n.reg .s32 t;\nmax.s32 t, %1, %2;\nmax.s32 %0, t, %3;\n}\n"
      : "=r"(largest)
      : "r"(a), "r"(b), "r"(c));
  return largest;
}
