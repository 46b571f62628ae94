// Steps with chains at random, and what holds for every chain that they propose.
#pragma once

#include <algorithm>
#include <functional>

#include "drafting/chains.hpp"
#include "stress.hpp"

inline constexpr double kRounding = 1e-6;  // of a probability that was reported in single precision

/// Seconds of steps that grow with their tokens, now less and now more.
struct RandomCost {
    std::vector<double> tokens, seconds;

    explicit RandomCost(Random& random) {
        double at = 1.0, cost = 1.0;
        for (auto points = 1 + random() % 5; points > 0; --points) {
            tokens.push_back(at += 1.0 + static_cast<double>(random() % 40));
            seconds.push_back(cost += static_cast<double>(random() % 100) / 50.0);
        }
    }
    agentspec::StepCost get() const { return {tokens, seconds}; }
};

/// Of a request's tokens; some batches have enough of them for several threads.
inline std::size_t random_limit(Random& random) { return random() % 2 == 0 ? random() % 8 : random() % 250; }

/// The acceptance of a chain's tokens falls from at most 1 to at least 0; the first of them are proposed. Where a
/// search had a deadline, a chain may be what it was before.
inline void check_chain(const agentspec::ChainTurn& turn, std::span<const agentspec::Token> proposed, bool deadline) {
    const auto tokens = turn.chain->tokens();
    const auto acceptance = turn.chain->acceptance();
    require(tokens.size() == acceptance.size(), "a chain without the acceptance of each token");
    require(std::ranges::is_sorted(acceptance, std::ranges::greater{}), "acceptance that rises along a chain");
    require(acceptance.empty() || (acceptance.front() <= 1.0 && acceptance.back() >= 0.0), "acceptance out of bounds");
    require(turn.drafter == nullptr || deadline || tokens.size() <= turn.limit, "a chain over its limit");
    require(proposed.size() <= std::min(turn.limit, tokens.size()), "a proposal over its limit");
    require(std::equal(proposed.begin(), proposed.end(), tokens.begin()), "a proposal that is not of the chain");
    require(turn.chain->drafted() == proposed.size() && turn.chain->accepted() == 0, "a proposal counted wrongly");
}
