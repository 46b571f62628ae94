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

/// Tokens that an output went on with, and the sequence that they are added to.
struct ExtendJob {
    Drafter* drafter;  // learns from the tokens first; nullptr: nobody does
    std::vector<SourcedIndex> indexes;
    std::span<const Token> context, tokens;
    SuffixIndex* into;  // nullptr: they are added to none
    SequenceId sequence;
    std::span<const Token> before;  // the context of a new sequence
};

/// Learn from all jobs and add their tokens, as if one after the other. No two may name one sequence, nor may a job
/// search what another adds to. Throws as `Drafter::observe` before anything is done, and as `SuffixIndex::append`.
void extend_batch(std::span<const ExtendJob> jobs);

/// The tree of each job, as `Drafter::draft` returns it. Throws as `Drafter::draft`, for the first job found invalid.
std::vector<DraftTree> draft_batch(std::span<const DraftJob> jobs, const Deadline& until = {});

}  // namespace agentspec
