// The instructions of kernels_cu/sm90/ptx.cuh by what they do.
#pragma once
#include "base/ptx.cuh"

// As tests/shared/fake_gpu.py packs it in the place of cuTensorMapEncodeTiled
struct alignas(128) TensorMap {
  const char* data;
  uint64_t dims[3];     // elements; the innermost first
  uint64_t strides[2];  // bytes, of all dimensions but the innermost
  uint32_t box[3];
};

constexpr uint64_t EVICT_FIRST = 0;
constexpr uint64_t EVICT_LAST = 0;

__device__ __forceinline__ void fence_mbarrier_init() {}
__device__ __forceinline__ void fence_proxy_async() {}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  emulator::mbarrier(barrier).bytes += bytes;
  emulator::arrive(barrier, 1);
}
__device__ __forceinline__ void prefetch_tensormap(const TensorMap&) {}

namespace emulator {
// Where the hardware puts a byte of a swizzled tile whose rows are `row_bytes` long
inline uint32_t swizzled(uint32_t address, int row_bytes) {
  const uint32_t mask = row_bytes / 16 - 1;  // 16-byte chunks of a row
  return address ^ ((address >> 7 & mask) << 4);
}
}  // namespace emulator

__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t dst, const TensorMap& map, int col,
                                                        int head, int token, uint32_t barrier,
                                                        uint64_t) {
  const TensorMap copy = map;
  const int row_bytes = copy.box[0] * ELEMENT_BYTES;
  if (dst % (8 * row_bytes)) emulator::fail("a box at %u, where its swizzle does not begin", dst);
  dst = emulator::of_cluster(dst), barrier = emulator::of_cluster(barrier);
  emulator::later([=] {
    for (uint32_t row = 0; row < copy.box[2]; ++row) {
      for (uint32_t x = 0; x < copy.box[0]; ++x) {
        const int64_t t = int64_t{token} + row, c = int64_t{col} + x;
        const bool inside = t >= 0 && t < int64_t(copy.dims[2]) && c >= 0 &&
                            c < int64_t(copy.dims[0]) && head >= 0 && head < int(copy.dims[1]);
        uint16_t element = 0;
        if (inside) {
          std::memcpy(&element,
                      copy.data + t * copy.strides[1] + head * copy.strides[0] + c * ELEMENT_BYTES,
                      2);
        }
        const uint32_t at = dst + row * row_bytes + x * ELEMENT_BYTES;
        std::memcpy(emulator::at(emulator::swizzled(at, row_bytes), 2), &element, 2);
      }
    }
    emulator::Mbarrier& full = emulator::mbarrier(barrier);
    full.bytes -= row_bytes * copy.box[2];
    emulator::settle(full);
  });
}

__device__ __forceinline__ uint32_t cluster_ctarank() { return emulator::rank(); }
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  return emulator::of_rank(address, rank);
}
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  emulator::arrive(barrier, 1);
}
__device__ __forceinline__ void barrier_cluster() {
  emulator::together(emulator::cluster_barriers[emulator::block() / emulator::cluster],
                     emulator::cluster * emulator::block_threads, 0, "barrier.cluster", nullptr,
                     [](void**) {});
}
__device__ __forceinline__ void cp_async_bulk_cluster(uint32_t dst, uint32_t src, int bytes,
                                                      uint32_t barrier) {
  src = emulator::of_cluster(src);
  emulator::later([=] {
    for (int i = 0; i < bytes; i += 16) {
      std::memcpy(emulator::at(dst + i, 16), emulator::at(src + i, 16), 16);
    }
    emulator::Mbarrier& full = emulator::mbarrier(barrier);
    full.bytes -= bytes;
    emulator::settle(full);
  });
}

__device__ __forceinline__ void bar_sync(int id, int threads) { barrier_of(id, threads, true); }
__device__ __forceinline__ void bar_arrive(int id, int threads) { barrier_of(id, threads, false); }

__device__ __forceinline__ bool elect_sync() {
  __syncwarp();
  return threadIdx.x % WARP_SIZE == 0;
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  __syncwarp();
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  __syncwarp();
}

inline int max3(int a, int b, int c) { return max(max(a, b), c); }
inline void hold(float&) {}
inline void hold(int&) {}
