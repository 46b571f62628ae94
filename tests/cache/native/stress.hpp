// What the parts of the stress program share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "index/log_view.hpp"

using Tokens = std::vector<agentspec::Token>;
using Random = std::mt19937_64;

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "stress: %s\n", what);
    std::abort();
}

/// One thread: batches of chains are the drafts of one request after the other, whatever was done to the indexes.
void propose_alone(std::uint64_t seed, int batches);
/// Threads that propose chains over indexes which others append to, truncate, remove from and merge: no chain holds
/// what was never written or is gone, and what was written is found.
void propose_beside_changes(std::uint64_t seed, int outputs);
