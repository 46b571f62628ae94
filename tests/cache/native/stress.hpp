// What the parts of the stress program share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "drafting/draft_batch.hpp"
#include "index/log_view.hpp"

using Tokens = std::vector<agentspec::Token>;
using Random = std::mt19937_64;

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "stress: %s\n", what);
    std::abort();
}

/// Of a request's tokens; some batches have enough of them for several threads.
inline std::size_t random_limit(Random& random) { return random() % 2 == 0 ? random() % 8 : random() % 250; }

/// The acceptance of a chain's tokens falls from at most 1 to at least 0, and it has at most as many as asked for.
void check_chain(const agentspec::DraftJob& job, const agentspec::DraftTree& chain);
/// One thread: batches of chains are the drafts of one request after the other, whatever was done to the indexes.
void draft_alone(std::uint64_t seed, int batches);
/// Threads that draft chains from indexes which others append to, truncate, remove from and merge: no chain holds
/// what was never written or is gone, and what was written is found.
void draft_beside_changes(std::uint64_t seed, int outputs);
