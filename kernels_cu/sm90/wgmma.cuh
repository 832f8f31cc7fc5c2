// wgmma: products of a warpgroup, 64 rows by N columns, 16 of k at a time.
//
// Accumulator element [0][j][2 * half + e] of a lane of warp w of the warpgroup:
//   row 16 w + 8 half + lane / 4,  column 8 j + 2 (lane % 4) + e,  as of mma.m16n8
//
// From wgmma_fence to wgmma_wait_group the accumulators, and A where it is in registers, belong to
// the tensor cores: nothing may touch them.
#pragma once
#include "base/ptx.cuh"

enum Major { K_MAJOR, MN_MAJOR };  // which side of an operand lies along the rows of its tile

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving what it does with these registers across this place
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int NT>
__device__ __forceinline__ void hold(float (&c)[1][NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    asm volatile(""
                 : "+f"(c[0][j][0]), "+f"(c[0][j][1]), "+f"(c[0][j][2]), "+f"(c[0][j][3])
                 :
                 : "memory");
  }
}
template <int KT>
__device__ __forceinline__ void hold(uint32_t (&a)[KT][4]) {
#pragma unroll
  for (int k = 0; k < KT; ++k) {
    asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3]) : : "memory");
  }
}

// One instruction for each number of columns: c = a b or, to ACCUMULATE, c += a b
template <int N>
struct Wgmma;

// clang-format off
#define RAWATTN_C(m, j) m "f"(c[0][j][0]), m "f"(c[0][j][1]), m "f"(c[0][j][2]), m "f"(c[0][j][3])
#define RAWATTN_C16(m) RAWATTN_C(m, 0), RAWATTN_C(m, 1)
#define RAWATTN_C32(m) RAWATTN_C16(m), RAWATTN_C(m, 2), RAWATTN_C(m, 3)
#define RAWATTN_C48(m) RAWATTN_C32(m), RAWATTN_C(m, 4), RAWATTN_C(m, 5)
#define RAWATTN_C64(m) RAWATTN_C48(m), RAWATTN_C(m, 6), RAWATTN_C(m, 7)
#define RAWATTN_C80(m) RAWATTN_C64(m), RAWATTN_C(m, 8), RAWATTN_C(m, 9)
#define RAWATTN_C96(m) RAWATTN_C80(m), RAWATTN_C(m, 10), RAWATTN_C(m, 11)
#define RAWATTN_C112(m) RAWATTN_C96(m), RAWATTN_C(m, 12), RAWATTN_C(m, 13)
#define RAWATTN_C128(m) RAWATTN_C112(m), RAWATTN_C(m, 14), RAWATTN_C(m, 15)
#define RAWATTN_C144(m) RAWATTN_C128(m), RAWATTN_C(m, 16), RAWATTN_C(m, 17)
#define RAWATTN_C160(m) RAWATTN_C144(m), RAWATTN_C(m, 18), RAWATTN_C(m, 19)
#define RAWATTN_C176(m) RAWATTN_C160(m), RAWATTN_C(m, 20), RAWATTN_C(m, 21)
#define RAWATTN_C192(m) RAWATTN_C176(m), RAWATTN_C(m, 22), RAWATTN_C(m, 23)
#define RAWATTN_C208(m) RAWATTN_C192(m), RAWATTN_C(m, 24), RAWATTN_C(m, 25)
#define RAWATTN_C224(m) RAWATTN_C208(m), RAWATTN_C(m, 26), RAWATTN_C(m, 27)
#define RAWATTN_C240(m) RAWATTN_C224(m), RAWATTN_C(m, 28), RAWATTN_C(m, 29)
#define RAWATTN_C256(m) RAWATTN_C240(m), RAWATTN_C(m, 30), RAWATTN_C(m, 31)
#define RAWATTN_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RAWATTN_R32 RAWATTN_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define RAWATTN_R48 RAWATTN_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define RAWATTN_R64 RAWATTN_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define RAWATTN_R80 RAWATTN_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define RAWATTN_R96 RAWATTN_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define RAWATTN_R112 RAWATTN_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define RAWATTN_R128 RAWATTN_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define RAWATTN_R144 RAWATTN_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define RAWATTN_R160 RAWATTN_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define RAWATTN_R176 RAWATTN_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define RAWATTN_R192 RAWATTN_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define RAWATTN_R208 RAWATTN_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define RAWATTN_R224 RAWATTN_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define RAWATTN_R240 RAWATTN_R224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define RAWATTN_R256 RAWATTN_R240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// the instruction: `t` the elements' type, `m` "+" to accumulate or "=", r0 .. r5 the numbers of the
// operands behind the accumulators
#define RAWATTN_SS(t, m, n, r0, r1, r2, r3, r4) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" r2 ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." t "." t " {" RAWATTN_R##n "}, %" r0 ", %" r1 ", p, 1, 1, %" r3 ", %" r4 ";\n}\n" \
               : RAWATTN_C##n(m) : "l"(a), "l"(b), "n"(int{ACCUMULATE}), "n"(int{A_MAJOR}), "n"(int{B_MAJOR}))
#define RAWATTN_RS(t, m, n, r0, r1, r2, r3, r4, r5, r6) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" r5 ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." t "." t " {" RAWATTN_R##n "}, {%" r0 ", %" r1 ", %" r2 ", %" r3 "}, %" r4 ", p, 1, 1, %" r6 ";\n}\n" \
               : RAWATTN_C##n(m) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{ACCUMULATE}), "n"(int{B_MAJOR}))
#define RAWATTN_EITHER(instruction, m, ...) \
  if constexpr (cfg::BF16) { instruction("bf16", m, __VA_ARGS__); } else { instruction("f16", m, __VA_ARGS__); }
#define RAWATTN_WGMMA(n, r0, r1, r2, r3, r4, r5, r6) \
  template <> struct Wgmma<n> { \
    template <bool ACCUMULATE, Major A_MAJOR, Major B_MAJOR> \
    static __device__ __forceinline__ void multiply(float (&c)[1][n / 8][4], uint64_t a, uint64_t b) { \
      if constexpr (ACCUMULATE) { RAWATTN_EITHER(RAWATTN_SS, "+", n, r0, r1, r2, r3, r4) } \
      else { RAWATTN_EITHER(RAWATTN_SS, "=", n, r0, r1, r2, r3, r4) } \
    } \
    template <bool ACCUMULATE, Major B_MAJOR> \
    static __device__ __forceinline__ void multiply(float (&c)[1][n / 8][4], const uint32_t (&a)[4], uint64_t b) { \
      if constexpr (ACCUMULATE) { RAWATTN_EITHER(RAWATTN_RS, "+", n, r0, r1, r2, r3, r4, r5, r6) } \
      else { RAWATTN_EITHER(RAWATTN_RS, "=", n, r0, r1, r2, r3, r4, r5, r6) } \
    } \
  };
RAWATTN_WGMMA(32, "16", "17", "18", "19", "20", "21", "22")
RAWATTN_WGMMA(48, "24", "25", "26", "27", "28", "29", "30")
RAWATTN_WGMMA(64, "32", "33", "34", "35", "36", "37", "38")
RAWATTN_WGMMA(80, "40", "41", "42", "43", "44", "45", "46")
RAWATTN_WGMMA(96, "48", "49", "50", "51", "52", "53", "54")
RAWATTN_WGMMA(112, "56", "57", "58", "59", "60", "61", "62")
RAWATTN_WGMMA(128, "64", "65", "66", "67", "68", "69", "70")
RAWATTN_WGMMA(144, "72", "73", "74", "75", "76", "77", "78")
RAWATTN_WGMMA(160, "80", "81", "82", "83", "84", "85", "86")
RAWATTN_WGMMA(176, "88", "89", "90", "91", "92", "93", "94")
RAWATTN_WGMMA(192, "96", "97", "98", "99", "100", "101", "102")
RAWATTN_WGMMA(208, "104", "105", "106", "107", "108", "109", "110")
RAWATTN_WGMMA(224, "112", "113", "114", "115", "116", "117", "118")
RAWATTN_WGMMA(240, "120", "121", "122", "123", "124", "125", "126")
RAWATTN_WGMMA(256, "128", "129", "130", "131", "132", "133", "134")
// clang-format on
