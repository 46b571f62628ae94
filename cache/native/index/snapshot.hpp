// What readers see of an index: parts that only grow behind what they see, and are replaced rather than changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "index/run.hpp"
#include "index/start_set.hpp"
#include "index/token_log.hpp"

namespace agentspec {

struct Snapshot {
    std::shared_ptr<const TokenLog> log;
    std::shared_ptr<const Runs> runs;
    std::shared_ptr<const StartSet> starts;
    std::uint64_t generation;  // of the log: positions of another mean other tokens
    std::uint64_t number;      // of this snapshot, among those of all indexes

    /// What its parts take, to the thread that changes the index.
    std::size_t memory_bytes() const {
        std::size_t total = log->memory_bytes() + (starts ? starts->memory_bytes() : 0);
        for (const auto& run : *runs) total += run->memory_bytes();
        return total;
    }
};

}  // namespace agentspec
