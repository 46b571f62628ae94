#include "drafting/draft_batch.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>

namespace agentspec {
namespace {

constexpr std::size_t kTokensPerThread = 256;  // drafting these takes several times as long as starting a thread

/// Work on items, taken one by one by whichever of some threads is free. What the first of them throws is thrown.
template <class Work>
class Batch {
public:
    Batch(std::size_t count, const Work& work) : count_(count), work_(work), failures_(count) {}

    void run(std::size_t threads) {
        std::vector<std::thread> others;  // std::jthread is missing from the libc++ of current Xcode
        others.reserve(threads);          // nothing below but starting a thread may throw
        try {
            for (std::size_t i = 1; i < threads; ++i) others.emplace_back([this] { take(); });
        } catch (const std::system_error&) {
            // No more threads are to be had: those there are do the work.
        }
        take();
        for (std::thread& other : others) other.join();
        for (const std::exception_ptr& failure : failures_) {
            if (failure) std::rethrow_exception(failure);
        }
    }

private:
    void take() noexcept {
        for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
            try {
                work_(i);
            } catch (...) {
                failures_[i] = std::current_exception();
            }
        }
    }

    const std::size_t count_;
    const Work& work_;
    std::vector<std::exception_ptr> failures_;
    std::atomic<std::size_t> next_{0};
};

std::size_t threads_for(std::size_t jobs, std::size_t tokens) {
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());  // slow to ask for
    return std::min({cores, jobs, std::max<std::size_t>(1, tokens / kTokensPerThread)});
}

}  // namespace

std::vector<DraftTree> draft_batch(std::span<const DraftJob> jobs, const Deadline& until) {
    std::vector<DraftTree> trees(jobs.size());
    std::size_t tokens = 0;
    for (const DraftJob& job : jobs) tokens += std::min(job.max_tokens, kTokensPerThread) / (job.chain ? 2 : 1);
    const auto draft = [&](std::size_t i) {
        const auto& [drafter, indexes, context, max_tokens, min_probability, chain] = jobs[i];
        trees[i] = drafter->draft(indexes, context, max_tokens, min_probability, chain, until);
    };
    Batch(jobs.size(), draft).run(threads_for(jobs.size(), tokens));
    return trees;
}

void extend_batch(std::span<const ExtendJob> jobs) {
    std::vector<std::optional<Drafter::Lesson>> lessons(jobs.size());
    std::size_t tokens = 0;
    for (const ExtendJob& job : jobs) tokens += job.drafter ? job.tokens.size() : 0;
    const auto look_back = [&](std::size_t i) {
        const ExtendJob& job = jobs[i];
        require_tokens(job.tokens);
        if (job.drafter) lessons[i] = job.drafter->look_back(job.indexes, job.context, job.tokens);
    };
    Batch(jobs.size(), look_back).run(threads_for(jobs.size(), 4 * tokens));  // a token takes as long as four drafted
    for (std::size_t i = 0; i < jobs.size(); ++i) {
        const ExtendJob& job = jobs[i];
        if (lessons[i]) job.drafter->learn(*lessons[i]);
        if (job.into) job.into->append(job.sequence, job.tokens, job.before);
    }
}

}  // namespace agentspec
