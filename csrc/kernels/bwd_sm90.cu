// bwd_sm90.cu: attention backward for Hopper (sm_90a), TMA + wgmma, warp-specialised.
//
//   P = 2^(scale log2e K Q^T - LSE)     dS = P (V dO^T - delta)
//   dV += P dO     dK += dS Q     dQ^T += K^T dS
//
// Scores are transposed: keys are the rows of every accumulator, so that P and dS are in their
// place as operands of the products that are summed over queries. A CTA owns a block of keys of a
// key head and visits the query blocks that see them, of all query heads of the group: dK and dV
// stay in registers. dQ is summed in global memory, in fp32 and in the order of accumulators
// (GradQueryLayout::kTransposed), which launch_bwd_post turns into grad_query.
//
// A producer thread loads K and V once and keeps rings of Q (with its LSE) and dO (with its delta)
// full. Two consumer warpgroups share a visit, by head_dim:
//
//   up to 128  each has 64 of 128 keys. Both need all dS for their half of dQ, and exchange it:
//
//     head_dim 128, 64 queries a block; what else a warpgroup does stands below what runs meanwhile
//       tensor | dK(i-1)      dQ(i-1)      S(i)         dP(i)       dV(i)
//       other  |       fence dS        store dQ(i-1)    P(i)=2^S    dS(i)=P(dP-delta)
//
//     head_dim 64, where exponentials take as long as products: blocks of two parts of 64 queries
//       tensor | Sa dK(i-1) dQ(i-1) dPa | Sb dVa          | dKa dPb | dVb
//       other  |        fence  Pa=2^Sa  | store dQ  dSa   | Pb=2^Sb | dSb
//
//     One thread adds dQ of a block from shared memory to global memory, as one bulk reduction.
//
//   up to 256  both have all 64 keys: one computes S, P and dV, the other dP, dS and dK, because dV
//              and dK take 128 registers each. P goes from one to the other, thread by thread, dS
//              through shared memory to both. Each has half of dQ, in two quarters of 64
//              columns, and adds it to global memory from registers.
//
//       tensor | dQ(i-1)b    dV(i)     S(i+1)  dQ(i)a |     | dQ(i-1)b   dK(i)     dP(i+1)  dQ(i)a
//       other  | P(i)=2^S    add dQ(i-1)b    add dQ(i)a     | dS(i)      add dQ(i-1)b   add dQ(i)a
//
//   shared      head_dim 64     sK, sV [128][64]    sQ, sDo [2][128][64]   sDs [2][2][128][64]
//                               sDq [2][128][64] fp32   224 KiB
//               head_dim 128    sK, sV [128][128]   sQ, sDo [2][64][128]   sDs [2][128][64]
//                               sDq [2][64][128] fp32   224 KiB
//               head_dim 256    sK, sV [64][256]    sQ, sDo [2][64][256]   sDs [2][64][64]
//                               sP [64][64]   216 KiB
//   registers   producer 24, consumers 240 (setmaxnreg)
//
//   barriers    full_k, full_v, full_q[stage], full_do[stage]   TMA -> consumers
//               empty_q, empty_do   one arrival a warp, after its last read -> producer
//               full_ds[stage]      dS of all warps that have some -> both warpgroups, for dQ.
//                                   A stage is written again two blocks later; who waited for the
//                                   dS between knows that all have read it
//               full_p              P -> the warpgroup of dS
//               full_dq, empty_dq   dQ of all warps -> the adding thread -> all warps
//               landed_k, landed_q[stage], landed_do[stage]   TMA -> the clearing warp, see below
//
// Deterministic: key blocks add to a query block in ascending order, by counters in global memory
// (BwdParams::turns). A CTA waits only for CTAs before it.
//
// Packed sequences: CTAs take key blocks from a list (packed_tiles.cu). A box that runs over the
// end of a sequence brings rows of the next one. What they do to scores the mask hides; where
// products are summed over them (Q, dO, K), a warp of the producer's clears them before consumers
// see the box; and dK and dV of such keys are not stored.
//
// Units    strides count elements; scores, LSE and delta as BwdParams says.
// Needs    sm_90a; what BwdParams says of rows; scale > 0; no mask tensor; head_dim a multiple of
//          8, filled with zeros up to 64, 128 or 256; rows of the gradients in 16-byte pieces.
// Bounds   the tensor cores give 4096 FLOP a cycle and SM; with A and B in shared memory, 64 x 64
//          products (S, dP, dQ) take all of its 128 bytes a cycle. At D 64 the exponential unit is
//          the next limit, at D 256 additions in global memory, 32 bytes a cycle and SM.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "bwd_sm90_keys.cuh"
#include "bwd_sm90_producer.cuh"
#include "bwd_sm90_roles.cuh"
#include "dispatch.h"
#include "launch.h"
#include "shared_memory.h"
#include "tensor_map.h"

#pragma nv_diag_suppress 177  // other archs get an empty kernel, which uses none of this

namespace fa {
namespace {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bwd_sm90_kernel(const __grid_constant__ BwdParams p,
                    const __grid_constant__ attn::TileOrder order,
                    const __grid_constant__ bwd_sm90::Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(smem_raw);
  constexpr bool kRoles = Config::kSplit == bwd_sm90::BwdSplit::kRoles;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&maps.query);
    ptx::prefetch_tensormap(&maps.key);
    ptx::prefetch_tensormap(&maps.value);
    ptx::prefetch_tensormap(&maps.grad_out);
    ptx::mbarrier_init(ptx::smem_addr(&smem.full_k), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.full_v), 1);
    ptx::mbarrier_init(ptx::smem_addr(&smem.full_p), 4);  // the warps of one warpgroup
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_q[s]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_do[s]), 1);
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_q[s]), 8);
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_do[s]), 8);
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_ds[s]), kRoles ? 4 : 8);
      ptx::mbarrier_init(ptx::smem_addr(&smem.full_dq[s]), 8);
      ptx::mbarrier_init(ptx::smem_addr(&smem.empty_dq[s]), 1);
    }
    ptx::fence_mbarrier_init();
    if constexpr (Config::kPacked) {
      ptx::mbarrier_init(ptx::smem_addr(&smem.landed_k), 1);
      for (int s = 0; s < Config::kStages; ++s) {
        ptx::mbarrier_init(ptx::smem_addr(&smem.landed_q[s]), 1);
        ptx::mbarrier_init(ptx::smem_addr(&smem.landed_do[s]), 1);
      }
      ptx::fence_mbarrier_init();
      ptx::griddepcontrol_wait();  // the list of tiles is in global memory
    }
    smem.work = Config::Work::template of_cta<Config>(p, order);
  }
  __syncthreads();
  if constexpr (Config::kPacked) {
    if (smem.work.n_block == bwd_sm90::PackedBwdWork::kNoBlock) return;
  }
  const int warpgroup = ptx::warpgroup_id();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) bwd_sm90::BwdProducer<Config>(p, maps, smem).run();
    if (Config::kDqInSmem && threadIdx.x == 32) bwd_sm90::add_dq_blocks<Config>(p, smem);
    if constexpr (Config::kPacked) {
      if (threadIdx.x / 32 == 2) bwd_sm90::clear_tails<Config>(smem);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    if constexpr (kRoles) {
      bwd_sm90::RolesConsumer<Config>(p, maps, smem, warpgroup - 1).run();
    } else {
      bwd_sm90::KeysConsumer<Config>(p, maps, smem, warpgroup - 1).run();
    }
  }
#endif
}

// ---- Launcher

// Half the L2 of an H200, which is two parts.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

// Order of the key blocks. CTAs start in the order of their index:
// - without a right limit, key blocks run fastest: neighbours read the same queries from L2;
// - with one, the first keys are seen by the most queries and go first, across a section of (batch,
//   key head) pairs whose Q, dO and dQ fit in L2 together.
// In both, the blocks of a head ascend, which deterministic adding relies on. Those of packed
// sequences do so in a list, the longest first, that is walked in sections of heads.
attn::TileOrder make_key_order(const FwdParams& p, int block_n) {
  const bool packed = p.packed.tiles != nullptr;
  const int64_t n_blocks = (p.seqlen_k + block_n - 1) / block_n;
  const int64_t pairs = (packed ? 1 : int64_t{p.batch}) * p.heads_k, group = p.heads_q / p.heads_k;
  int64_t section = 1;
  if (packed || p.window_right < p.seqlen_k) {
    const int64_t pair_bytes = int64_t{8} * p.seqlen_q * p.head_dim * group;
    section = std::min(pairs, std::max<int64_t>(kSectionBytes / pair_bytes, 1));
  }
  attn::TileOrder order{};
  order.m_blocks = n_blocks;
  order.num_tiles = pairs * (packed ? p.packed.max_tiles : n_blocks);
  order.num_sections = (pairs + section - 1) / section;
  order.per_section = attn::FastDivide(section * n_blocks);
  order.section_heads = attn::FastDivide(section);
  order.last_heads = attn::FastDivide(pairs - (order.num_sections - 1) * section);
  order.heads = attn::FastDivide(p.heads_k);
  return order;
}

template <class Config>
cudaError_t launch_config(const BwdParams& params, cudaStream_t stream) {
  const FwdParams& p = params.fwd;
  constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  cudaError_t status = allow_shared_memory<bwd_sm90_kernel<Config>>(kSmemBytes);
  bwd_sm90::Maps maps;
  const auto describe = [&](CUtensorMap* map, const void* pointer, const int64_t (&stride)[3],
                            int seqlen, int heads, int box_rows) {
    if (status == cudaSuccess)
      status = cached_tensor_map(map, p, pointer, stride, seqlen, heads, box_rows);
  };
  describe(&maps.query, p.query, p.query_stride, p.seqlen_q, p.heads_q, Config::kBlockM);
  describe(&maps.key, p.key, p.key_stride, p.seqlen_k, p.heads_k, Config::kBlockN);
  describe(&maps.value, p.value, p.value_stride, p.seqlen_k, p.heads_k, Config::kBlockN);
  describe(&maps.grad_out, params.grad_out, params.grad_out_stride, p.seqlen_q, p.heads_q,
           Config::kBlockM);
  describe(&maps.grad_key, params.grad_key, params.grad_key_stride, p.seqlen_k, p.heads_k, 64);
  describe(&maps.grad_value, params.grad_value, params.grad_value_stride, p.seqlen_k, p.heads_k,
           64);
  if (status != cudaSuccess) return status;

  const int64_t n_blocks = (p.seqlen_k + Config::kBlockN - 1) / Config::kBlockN;
  const int64_t tiles_of_head = Config::kPacked ? p.packed.max_tiles : p.batch * n_blocks;
  if (tiles_of_head * p.heads_k > std::numeric_limits<int>::max())
    return cudaErrorInvalidConfiguration;
  const attn::TileOrder order = make_key_order(p, Config::kBlockN);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = order.num_tiles;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = kSmemBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, bwd_sm90_kernel<Config>, params, order, maps);
}

// Calls f(head_dim instance), an integral_constant.
template <class F>
cudaError_t dispatch_head_dim(int head_dim, F&& f) {
  return dispatch_value<64, 128, 256>(head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256, f);
}

}  // namespace

BwdShape describe_bwd_sm90(int head_dim) {
  BwdShape result{};
  dispatch_head_dim(head_dim, [&](auto d) {
    using Config = bwd_sm90::BwdConfig<d(), Dtype::kFloat16>;
    result = {{Config::kBlockM, Config::kBlockN, Config::kThreads,
               static_cast<int>(sizeof(typename Config::SharedStorage))},
              d(),
              GradQueryLayout::kTransposed};
    return cudaSuccess;
  });
  return result;
}

cudaError_t launch_bwd_sm90(const BwdParams& params, int, cudaStream_t stream) {
  return dispatch_head_dim(params.fwd.head_dim, [&](auto d) {
    return dispatch_value<Dtype::kFloat16, Dtype::kBFloat16>(params.fwd.dtype, [&](auto dtype) {
      return params.fwd.packed.cu_seqlens_q == nullptr
                 ? launch_config<bwd_sm90::BwdConfig<d(), dtype()>>(params, stream)
                 : launch_config<bwd_sm90::BwdConfig<d(), dtype(), true>>(params, stream);
    });
  });
}

}  // namespace fa
