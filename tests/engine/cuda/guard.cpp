// Lets a torch that was built for CPUs move tensors of a fake mode to "cuda".
#include <c10/core/impl/FakeGuardImpl.h>
namespace {
c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
}
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
