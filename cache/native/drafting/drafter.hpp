// Drafting: blend the levels of a context into calibrated next-token probabilities and grow a tree, most likely path
// first.
#pragma once

#include <shared_mutex>
#include <span>
#include <vector>

#include "drafting/depth_rates.hpp"
#include "drafting/levels.hpp"

namespace agentspec {

struct DraftTree {
    std::vector<Token> tokens, parents, match_length;
    std::vector<float> probabilities;
    std::vector<std::uint8_t> sources;
};

/// Holds what was learned about the levels' confidence; safe to use from several threads at once.
class Drafter {
public:
    explicit Drafter(std::uint32_t scan_limit) : scan_limit_(scan_limit) {}

    /// A tree of at most `max_tokens` nodes continuing `context`, none with a path probability below `min_probability`.
    /// At equal match lengths an earlier index goes before a later one. As a `chain` each node has one child, the
    /// likeliest. An index that cannot be read before the deadline is left out. Throws std::invalid_argument for an
    /// index given twice or an unknown source.
    DraftTree draft(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::size_t max_tokens,
                    double min_probability, bool chain = false, const Deadline& until = {}) const;

    /// Learn from `tokens`, which turned out to follow `context`; call before adding them to any index. Best called
    /// with what was committed after one draft, which tells what is hard where a draft begins from what is easy further
    /// on.
    void observe(std::span<const SourcedIndex> indexes, std::span<const Token> context, std::span<const Token> tokens);

    /// Learn that an output ended with `token`.
    void observe_end(Token token);

    /// What was learned, as plain numbers for `restore`, which throws std::invalid_argument for impossible ones.
    std::vector<double> state() const;
    void restore(std::span<const double> state);

private:
    struct Outcome {
        LevelKey key;
        int depth;
        bool hit;
        double lead;  // share of the leading one of several symbols, 1 for a single one
        bool led;  // the hit was that one
    };
    std::vector<Outcome> look_back(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                                   std::span<const Token> tokens) const;

    std::uint32_t scan_limit_;
    mutable std::shared_mutex mutex_;
    HitRates rates_;
    DepthRates depths_, leads_;  // of a level's hit rate, and of its leading symbol's share once it is hit
    EndRates ends_;
};

}  // namespace agentspec
