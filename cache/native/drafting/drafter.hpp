// Drafting: blend the levels of a context into calibrated next-token probabilities and grow a tree, most likely path
// first.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
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

/// How many tokens of `output`, from the first on, lie on a path of the tree of these tokens and parents.
std::size_t path_length(std::span<const Token> tokens, std::span<const Token> parents, std::span<const Token> output);

/// What drafts go by besides the text.
struct Learned {
    HitRates rates;
    RestRates rests;
    DepthRates depths[2];  // of the hit rate of a level: of other text, and of the session's own
    DepthRates leads;      // of the share of a level's leading symbol, once the level is hit
    EndRates ends;

    std::array<std::span<Tally>, 5> tallies() {
        return {rates.tallies(), rests.tallies(), depths[0].tallies(), depths[1].tallies(), leads.tallies()};
    }
};

/// Makes drafts, and learns how reliable each kind of level is. Safe to use from several threads at once. Neither waits
/// for the other: what is to be learned while drafts are made is put off, until the next call that can.
class Drafter {
public:
    /// As long as it lives, nothing is learned: a draft holds one.
    class Reading;

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

    /// Of the tokens that ended an output keep only these.
    void keep_ends(std::span<const Token> tokens);
    /// All tokens that ended an output.
    std::vector<Token> ends() const;

    /// All that was learned, as bytes that mostly hold small numbers: drafts from it alone are the same.
    std::vector<std::uint8_t> state();
    /// Go on from such a state. Throws std::domain_error, with nothing changed, for one of another length.
    void restore(std::span<const std::uint8_t> state);

    /// Bytes that this drafter takes.
    std::size_t memory_bytes() const;

private:
    static constexpr std::size_t kMostWaiting = std::size_t{1} << 18;  // bytes; who brings more waits for drafts

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
    /// What the indexes held, to be learned from.
    struct Lesson {
        std::vector<Outcome> outcomes;
        std::vector<Token> tokens;  // that came after others
        std::optional<Token> end;
        std::vector<Hits> hits;  // of each index; not kept while a lesson waits

        std::size_t bytes() const {
            return sizeof(*this) + outcomes.capacity() * sizeof(Outcome) + tokens.capacity() * sizeof(Token);
        }
    };

    Lesson look_back(std::span<const SourcedIndex> indexes, std::span<const Token> context,
                     std::span<const Token> tokens) const;
    void learn(Lesson lesson);
    void take_in(bool wait);
    void take_in(const Lesson& lesson);
    std::size_t take_in_rest(std::span<const Outcome> outcomes, std::size_t nth);

    std::uint32_t scan_limit_;
    mutable std::shared_mutex mutex_;
    std::mutex arriving_;  // held to add to the next two, or to take them
    std::vector<Lesson> waiting_;  // put off, the oldest first
    std::atomic<std::size_t> waiting_bytes_{0};
    Learned learned_;
};

class Drafter::Reading {
public:
    explicit Reading(const Drafter& drafter) : lock_(drafter.mutex_) {}

private:
    std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace agentspec
