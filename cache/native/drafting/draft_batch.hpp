// Drafts for many requests in one call, over several threads where that pays.
#pragma once

#include <span>
#include <vector>

#include "drafting/drafter.hpp"

namespace agentspec {

/// The arguments of one `Drafter::draft`.
struct DraftJob {
    const Drafter* drafter;
    std::vector<SourcedIndex> indexes;
    std::span<const Token> context;
    std::size_t max_tokens;
    double min_probability;
    bool chain = false;
};

/// The tree of each job, as `Drafter::draft` returns it. Throws as `Drafter::draft`, for the first job found invalid.
std::vector<DraftTree> draft_batch(std::span<const DraftJob> jobs, const Deadline& until = {});

}  // namespace agentspec
