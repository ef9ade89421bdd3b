// The C interface around the kernel that the engine is linked with.
#include "abi.h"

#include <cstdio>

#include "engine/launch.h"
#include "engine/tensor_map.h"
#include "kernel.h"

using mcp::emulator::kKernel;
using mcp::emulator::LaunchConfig;
using mcp::emulator::LaunchReport;

void* mcp_emulator_run(const void* params, const McpEmulatorLaunch* launch) {
    if (launch->num_threads > kKernel.max_threads) {
        auto* refused = new LaunchReport;
        refused->error = "num_threads=" + std::to_string(launch->num_threads) +
                         " must not exceed the " + std::to_string(kKernel.max_threads) +
                         " of the kernel's launch bounds";
        return refused;
    }
    LaunchConfig config;
    config.num_blocks = launch->num_blocks;
    config.num_threads = launch->num_threads;
    config.shared_bytes = launch->shared_bytes;
    config.registers_per_thread = launch->registers_per_thread;
    config.seed = launch->seed;
    config.host_threads = launch->host_threads;
    config.record_history = launch->record_history != 0;
    for (int i = 0; i < launch->num_ranges; ++i) {
        const McpEmulatorRange& range = launch->ranges[i];
        config.global_ranges.push_back(
            {range.name, range.begin, range.bytes, range.is_written != 0});
    }
    return new LaunchReport(mcp::emulator::launch(config, [params] { kKernel.call(params); }));
}

void mcp_emulator_free(void* report) {
    delete static_cast<LaunchReport*>(report);
}

const char* mcp_emulator_error(const void* report) {
    return static_cast<const LaunchReport*>(report)->error.c_str();
}

const char* mcp_emulator_history(const void* report) {
    return static_cast<const LaunchReport*>(report)->history.c_str();
}

int mcp_emulator_num_instructions() {
    return mcp::emulator::kNumInstructions;
}

const char* mcp_emulator_instruction(int instruction) {
    return name_of(static_cast<mcp::emulator::Instruction>(instruction));
}

std::uint64_t mcp_emulator_count(const void* report, int instruction) {
    return static_cast<const LaunchReport*>(report)->counts[instruction];
}

std::uint64_t mcp_emulator_params_bytes() {
    return kKernel.params_bytes;
}

// One function of the driver, with its argument list.
int mcp_emulator_encode_tiled(void* map,
                              std::uint32_t type,
                              std::uint32_t rank,
                              const void* address,
                              const std::uint64_t* dims,
                              const std::uint64_t* strides,
                              const std::uint32_t* box,
                              const std::uint32_t* element_strides,
                              const std::uint32_t* modes,
                              char* reason,
                              std::uint64_t reason_bytes) {
    const std::string problem =
        mcp::emulator::encode_tiled(map, {type, rank, address, dims, strides, box, element_strides,
                                          modes[0], modes[1], modes[2], modes[3]});
    std::snprintf(reason, reason_bytes, "%s", problem.c_str());
    return problem.empty() ? 0 : 1;
}
