// Every line of PTX in rawattn. A wrapper keeps the name of its instruction.
#pragma once
#include "base/compat.cuh"

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes global -> shared; where `valid` is false nothing is read and zeros are written.
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src),
               "r"(valid ? 16 : 0)
               : "memory");
}
// the same without a condition
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(dst), "l"(src) : "memory");
}
// the same for 4 bytes
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(dst), "l"(src),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Barriers in shared memory that count arrivals; a phase ends with its last arrival.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier)
               : "memory");
}
// several arrivals at once, which must not be the phase's last
__device__ __forceinline__ void mbarrier_arrive_no_complete(uint32_t barrier, int arrivals) {
  asm volatile(
      "{\n.reg .b64 state;\nmbarrier.arrive.noComplete.shared.b64 state, [%0], %1;\n}\n" ::"r"(
          barrier),
      "r"(arrivals)
      : "memory");
}
// arrives once all earlier cp.async of this thread are there
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// has the phase of that parity ended?
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// the same; from 9.0 on a thread sleeps a while before it says no
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, int parity) {
  uint32_t done;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#else
  done = mbarrier_test_wait_parity(barrier, parity);
#endif
  return done != 0;
}
// until the phase of that parity has ended
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c (16 x 8, float32) += a (16 x 16) b (16 x 8), both 16-bit
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (cfg::BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// two float32 -> one register of two 16-bit elements, round to nearest even; `lo` comes first in
// memory
__device__ __forceinline__ uint32_t cvt_rn_x2(float lo, float hi) {
  uint32_t packed;
  if constexpr (cfg::BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}
// one 16-bit element -> float32
__device__ __forceinline__ float cvt_f32(uint16_t element) {
  if constexpr (cfg::BF16) {
    return __uint_as_float(static_cast<uint32_t>(element) << 16);
  } else {
    float value;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(element));
    return value;
  }
}

__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The lane of this thread, read anew: it takes no register before
__device__ __forceinline__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// float32 added to global memory without a return value.
__device__ __forceinline__ void red_add(float* address, float x) {
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(address), "f"(x) : "memory");
}
// A number that other CTAs raise, with all that they did before
__device__ __forceinline__ int ld_acquire(const int* address) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(address) : "memory");
  return x;
}
// The same at a glance: what others did is there for what hangs on the number, no fence orders the rest
__device__ __forceinline__ int ld_relaxed(const int* address) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(address) : "memory");
  return x;
}
// Raises a number, when all that was done before has been
__device__ __forceinline__ void red_release_max(int* address, int x) {
  asm volatile("red.release.gpu.global.max.s32 [%0], %1;\n" ::"l"(address), "r"(x) : "memory");
}
// Two and four at consecutive addresses, 8- and 16-byte aligned: one instruction from 9.0 on
__device__ __forceinline__ void red_add_v2(float* address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};\n" ::"l"(address), "f"(x), "f"(y) : "memory");
#else
  red_add(address, x);
  red_add(address + 1, y);
#endif
}
__device__ __forceinline__ void red_add_v4(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) red_add(address + e, x[e]);
#endif
}
