#include "drafting/draft_batch.hpp"

#include <algorithm>
#include <thread>

#include "drafting/workers.hpp"

namespace agentspec {
namespace {

constexpr std::size_t kTokensPerThread = 256;  // drafting these takes several times as long as waking a thread

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
    share_out(jobs.size(), threads_for(jobs.size(), tokens), draft);
    return trees;
}

}  // namespace agentspec
