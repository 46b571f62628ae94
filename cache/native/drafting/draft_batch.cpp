#include "drafting/draft_batch.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

namespace agentspec {
namespace {

constexpr std::size_t kTokensPerThread = 256;  // drafting these takes several times as long as starting a thread

/// Jobs taken one by one by whichever thread is free.
class Batch {
public:
    Batch(std::span<const DraftJob> jobs, const Deadline& until)
        : jobs_(jobs), until_(until), trees_(jobs.size()), failures_(jobs.size()) {}

    void work() noexcept {
        for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < jobs_.size();) {
            const auto& [drafter, indexes, context, max_tokens, min_probability, chain] = jobs_[i];
            try {
                trees_[i] = drafter->draft(indexes, context, max_tokens, min_probability, chain, until_);
            } catch (...) {
                failures_[i] = std::current_exception();
            }
        }
    }

    std::vector<DraftTree> result() {
        for (const std::exception_ptr& failure : failures_) {
            if (failure) std::rethrow_exception(failure);
        }
        return std::move(trees_);
    }

private:
    std::span<const DraftJob> jobs_;
    Deadline until_;
    std::vector<DraftTree> trees_;
    std::vector<std::exception_ptr> failures_;
    std::atomic<std::size_t> next_{0};
};

std::size_t thread_count(std::span<const DraftJob> jobs) {
    std::size_t tokens = 0;
    for (const DraftJob& job : jobs) tokens += std::min(job.max_tokens, kTokensPerThread) / (job.chain ? 2 : 1);
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());  // slow to ask for
    return std::min({cores, jobs.size(), std::max<std::size_t>(1, tokens / kTokensPerThread)});
}

}  // namespace

std::vector<DraftTree> draft_batch(std::span<const DraftJob> jobs, const Deadline& until) {
    Batch batch(jobs, until);
    const std::size_t threads = thread_count(jobs);
    std::vector<std::thread> others;  // std::jthread is missing from the libc++ of current Xcode
    others.reserve(threads);          // nothing below but starting a thread may throw
    try {
        for (std::size_t i = 1; i < threads; ++i) others.emplace_back([&batch] { batch.work(); });
    } catch (const std::system_error&) {
        // No more threads are to be had: those there are do the work.
    }
    batch.work();
    for (std::thread& other : others) other.join();
    return batch.result();
}

}  // namespace agentspec
