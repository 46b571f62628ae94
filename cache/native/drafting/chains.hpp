// Draft chains for the requests of a server: what may follow each, and how much of it a step verifies.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "drafting/draft_batch.hpp"

namespace agentspec {

/// Tokens that may follow a request, with the probability that all tokens up to each are accepted, and how many of them
/// the step that runs now verifies. For one thread at a time.
class Chain {
public:
    /// Follow further tokens of the request: counts those that were drafted, and keeps what of the continuation is
    /// behind them; nothing, where they differ from it.
    void advance(std::span<const Token> fresh);
    /// Have `tokens` follow, with the `acceptance` of each.
    void replace(std::vector<Token> tokens, std::vector<double> acceptance);
    void clear() { replace({}, {}); }
    /// Forget what follows from the first token on that is not below `vocabulary`.
    void cut(Token vocabulary);
    /// Verify the first `count` tokens, each of which is accepted `factor` times as often as expected.
    std::span<const Token> propose(std::size_t count, double factor);

    std::span<const Token> tokens() const { return tokens_; }
    std::span<const double> acceptance() const { return acceptance_; }
    std::size_t drafted() const { return drafted_; }  // tokens verified last
    std::size_t accepted() const { return accepted_; }  // of them, by the tokens followed since
    double expected() const { return expected_; }  // number of them that would be

private:
    std::vector<Token> tokens_;
    std::vector<double> acceptance_;
    std::size_t drafted_ = 0, accepted_ = 0;
    bool under_way_ = false;  // nothing was followed since the last proposal
    double expected_ = 0.0;
};

/// Seconds of a step by its tokens: straight lines between points, level beyond them.
struct StepCost {
    std::span<const double> tokens, seconds;  // ascending, as many of each

    /// Throws std::invalid_argument without points or with other numbers of both.
    void require_points() const;
    double at(double count) const;
};

/// A chain's part in a step. Without a drafter the chain goes on as it is.
struct ChainTurn {
    Chain* chain;
    const Drafter* drafter;
    std::vector<SourcedIndex> indexes;
    std::span<const Token> context;
    std::size_t limit;  // most tokens to verify
    double factor;  // acceptance in proportion to the chain's
    double required = 0.0;  // tokens that the request must gain; at most 1 needs no draft
};

/// How many tokens of each chain a step of `requests` requests verifies, so that its expected tokens per second are
/// maximal: goodput as in TurboSpec (Liu et al. 2024). What requests require is served before, the largest need first
/// (AdaServe, Li et al. 2025). As `allocate_budget` of agentspec/speculation/governor.py.
std::vector<std::size_t> allocate(std::span<const ChainTurn> turns, std::size_t requests, const StepCost& cost);

/// Search for what follows where a turn asks for it, down to a probability of `floor` (for a request that requires more
/// than one token, of `floor / requests`), and have each chain propose what pays. Returns the proposed tokens. Throws
/// as `draft_batch`, before any chain is changed.
std::vector<std::vector<Token>> propose_chains(std::span<const ChainTurn> turns, std::size_t requests,
                                               const StepCost& cost, double floor, Token vocabulary,
                                               const Deadline& until = {});

}  // namespace agentspec
