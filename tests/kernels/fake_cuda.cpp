// Stands in for libcuda.so.1 on a machine without a GPU: remembers what it was asked, computes nothing.
// Compiled against cuda.h where there is one, so that these prototypes are the driver's own.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUjit_option, CUlibraryOption, CUfunction_attribute;
typedef int CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill;
typedef void *CUcontext, *CUlibrary, *CUkernel, *CUfunction, *CUstream;
typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef struct { uint64_t opaque[16]; } CUtensorMap;
#define CUDAAPI
#endif

namespace {
thread_local CUcontext current = nullptr;
template <class T>
T handle(uintptr_t value) { return reinterpret_cast<T>(value); }
}  // namespace

extern "C" {
// What tests read and set.
int fake_failing = 0;          // the status that the next calls return, if not 0
int fake_num_encoded = 0, fake_num_launched = 0, fake_num_retained = 0;
uint64_t fake_map[40];         // of the last tensor map: dtype, rank, address, sizes, strides, box, modes
unsigned fake_launch[8];       // grid, block, shared bytes, stream
unsigned char fake_params[4096];
size_t fake_params_bytes = 0;  // how many bytes to keep of a launch's parameter
int fake_shared_bytes = 0;
int fake_version = 12080;
char fake_kernel_name[128];
void fake_forget_context() { current = nullptr; }

CUresult CUDAAPI cuInit(unsigned) { return CUresult(fake_failing); }
CUresult CUDAAPI cuDriverGetVersion(int* version) {
    *version = fake_version;
    return CUresult(0);
}
CUresult CUDAAPI cuGetErrorString(CUresult, const char** text) {
    *text = "out of imagination";
    return CUresult(0);
}
CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
    *context = current;
    return CUresult(0);
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUresult(0);
}
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal + 10;
    return CUresult(0);
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    fake_num_retained++;
    *context = handle<CUcontext>(uintptr_t(device));
    return CUresult(0);
}
CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned num_jit,
                                   CUlibraryOption*, void**, unsigned num_options) {
    if (fake_failing || num_jit || num_options || !current) return CUresult(fake_failing ? fake_failing : 201);
    *library = handle<CUlibrary>(std::strlen(static_cast<const char*>(code)));
    return CUresult(0);
}
CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    std::strncpy(fake_kernel_name, name, sizeof(fake_kernel_name) - 1);
    *kernel = handle<CUkernel>(reinterpret_cast<uintptr_t>(library) + 1000);
    return CUresult(0);
}
CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel, CUdevice) {
    if (int(attribute) != 8) return CUresult(1);
    fake_shared_bytes = value;
    return CUresult(0);
}
CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                        const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                        const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
    if (fake_failing || reinterpret_cast<uintptr_t>(map) % 64) return CUresult(fake_failing ? fake_failing : 1);
    uint64_t* to = fake_map;
    *to++ = uint64_t(dtype), *to++ = rank, *to++ = reinterpret_cast<uintptr_t>(address);
    for (unsigned i = 0; i < rank; i++) *to++ = sizes[i];
    for (unsigned i = 0; i + 1 < rank; i++) *to++ = strides[i];
    for (unsigned i = 0; i < rank; i++) *to++ = box[i];
    for (unsigned i = 0; i < rank; i++) *to++ = steps[i];
    *to++ = uint64_t(interleave), *to++ = uint64_t(swizzle), *to++ = uint64_t(promotion), *to++ = uint64_t(fill);
    std::memset(map, 0, sizeof(*map));
    map->opaque[0] = uint64_t(++fake_num_encoded);  // tells one map from another
    map->opaque[1] = reinterpret_cast<uintptr_t>(address);
    return CUresult(0);
}
CUresult CUDAAPI cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                unsigned bz, unsigned shared_bytes, CUstream stream, void** params, void** extra) {
    if (fake_failing || !kernel || extra) return CUresult(fake_failing ? fake_failing : 1);
    const unsigned launch[8] = {gx, gy, gz, bx, by, bz, shared_bytes, unsigned(reinterpret_cast<uintptr_t>(stream))};
    std::memcpy(fake_launch, launch, sizeof(launch));
    std::memcpy(fake_params, params[0], fake_params_bytes);
    fake_num_launched++;
    return CUresult(0);
}
}
