#include "launch.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "cta.h"

namespace mcp::emulator {

namespace {

std::string check(const LaunchConfig& config) {
    if (config.num_blocks < 1)
        return "num_blocks=" + std::to_string(config.num_blocks) + " must be >= 1";
    if (config.num_threads < kWarpLanes || config.num_threads > kMaxThreads ||
        config.num_threads % kWarpLanes != 0) {
        return "num_threads=" + std::to_string(config.num_threads) +
               " must be a multiple of 32 up to " + std::to_string(kMaxThreads);
    }
    if (config.shared_bytes > kMaxSharedBytes) {
        return "shared_bytes=" + std::to_string(config.shared_bytes) + " must be <= 227 KB (" +
               std::to_string(kMaxSharedBytes) + "); use fewer or smaller stages";
    }
    if (config.registers_per_thread * config.num_threads > kRegistersPerMultiprocessor) {
        return "registers_per_thread=" + std::to_string(config.registers_per_thread) + " times " +
               std::to_string(config.num_threads) + " threads exceeds 64 K registers";
    }
    return {};
}

}  // namespace

LaunchReport launch(const LaunchConfig& config, const std::function<void()>& kernel) {
    LaunchReport report;
    report.error = check(config);
    if (!report.error.empty()) return report;
    std::atomic<int> next{0};
    std::atomic<bool> failed{false};
    std::mutex merging;
    GlobalMemory global(config.global_ranges);
    const auto work = [&] {
        Stacks stacks(static_cast<std::size_t>(config.num_threads));
        for (int block = next++; block < config.num_blocks && !failed; block = next++) {
            Cta cta(config, global, block, kernel, stacks);
            const bool fine = cta.run();
            const std::lock_guard<std::mutex> guard(merging);
            report.history += cta.history;
            for (int i = 0; i < kNumInstructions; ++i) report.counts[i] += cta.counts[i];
            if (!fine && !failed.exchange(true)) report.error = cta.error;
        }
    };
    const int num_workers = std::clamp(config.host_threads, 1, config.num_blocks);
    std::vector<std::thread> workers;
    for (int i = 1; i < num_workers; ++i) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
    return report;
}

}  // namespace mcp::emulator
