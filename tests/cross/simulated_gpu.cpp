// Lets autograd and attention work on fake CUDA tensors in any build of torch: one device that computes nothing.
// It must be loaded before torch is imported, which looks up devices only once. What a build for CUDA registers under
// the same names is replaced: such a build is linked, so it comes first.

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace at {

struct SimulatedGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    Device exchangeDevice(Device) const override { return getDevice(); }
    Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
    Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
    Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard);

struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);

namespace native {

// cuDNN's attention on Hopper and later, as torch 2.11 for CUDA 13 does, before them flash attention, which has no masks;
// with a mask the memory-efficient kernel, which has no grouped queries; else separate operations
// (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). A mask is what the checks look for.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask,
                         double, bool, std::optional<double>, bool grouped) {
    auto half = query.scalar_type() == kBFloat16 || query.scalar_type() == kHalf;
    const char* major = std::getenv("SIMULATED_CAPABILITY");
    auto cudnn = major != nullptr && std::atoi(major) >= 9 && query.sym_size(3) <= 128;
    auto unmasked = cudnn ? sdp::SDPBackend::cudnn_attention : sdp::SDPBackend::flash_attention;
    if (half && !mask.has_value()) return static_cast<int64_t>(unmasked);
    auto fits = !(grouped && query.sym_size(1) != key.sym_size(1));
    return static_cast<int64_t>(fits ? sdp::SDPBackend::efficient_attention : sdp::SDPBackend::math);
}

const int chosen = (_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention), 0);

}  // namespace native
}  // namespace at
