// Drafting: blend the levels of a context into calibrated next-token probabilities and grow a tree, most likely path
// first.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <span>
#include <vector>

#include "drafting/depth_rates.hpp"
#include "drafting/levels.hpp"

namespace agentspec {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // none: as long as it takes

struct DraftTree {
    std::vector<Token> tokens, parents, match_length;
    std::vector<float> probabilities;
    std::vector<std::uint8_t> sources;
};

/// Makes drafts, and learns how reliable each kind of level is. Safe to use from several threads at once.
class Drafter {
public:
    explicit Drafter(std::uint32_t scan_limit) : scan_limit_(scan_limit) {}

    /// A tree of at most `max_tokens` nodes that continues `context`; no path probability is below `min_probability`.
    /// At equal match length an earlier index goes first. In a `chain` each node has at most one child, the likeliest.
    /// A draft that is not complete at the deadline is what there is of it. Throws std::invalid_argument for an index
    /// given twice or an unknown source.
    DraftTree draft(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::size_t max_tokens,
                    double min_probability, bool chain = false, const Deadline& until = {}) const;

    /// Learn that `tokens` followed `context`; call before adding them to any index. Best called with the tokens
    /// committed after one draft: their depths then tell the hard tokens at a draft's start from easier later ones.
    void observe(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::span<const Token> tokens);

    /// Learn that an output ended with `token`.
    void observe_end(Token token);

    /// The learned state, as plain numbers for `restore`, which throws std::invalid_argument for impossible numbers.
    std::vector<double> state() const;
    void restore(std::span<const double> state);

    /// Grows with every change of the learned state.
    std::uint64_t version() const { return version_.load(std::memory_order_relaxed); }
    /// Bytes that this drafter takes: little until it has learned something.
    std::size_t memory_bytes() const;

    /// `observe` in two steps: what the indexes held, which leaves everything as it is, and learning from it.
    class Lesson;
    Lesson look_back(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                     std::span<const Token> tokens) const;
    void learn(const Lesson& lesson);

private:
    std::uint32_t scan_limit_;
    mutable std::shared_mutex mutex_;
    HitRates rates_;
    DepthRates depths_, leads_;  // of a level's hit rate, and of its leading symbol's share once it is hit
    EndRates ends_;
    std::atomic<std::uint64_t> version_{0};
};

class Drafter::Lesson {
    friend class Drafter;
    struct Outcome {
        LevelKey key;
        int depth;
        bool hit;
        double lead;  // share of the leading one of several symbols, 1 for a single one
        bool led;  // the hit was that one
    };
    struct Hits {
        SuffixIndex* index;
        std::uint64_t generation;
        std::vector<Position> positions;
    };

    std::vector<Outcome> outcomes_;
    std::vector<Token> tokens_;  // that came after others
    std::vector<Hits> hits_;  // of each index
};

}  // namespace agentspec
