#include "drafting/chains.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace agentspec {

void Chain::advance(std::span<const Token> fresh) {
    const auto count = static_cast<std::ptrdiff_t>(fresh.size());
    const auto equal = std::mismatch(fresh.begin(), fresh.end(), tokens_.begin(), tokens_.end()).first - fresh.begin();
    accepted_ = under_way_ ? std::min<std::size_t>(equal, drafted_) : 0;
    if (count == 0) return;
    under_way_ = false;
    if (equal < count || fresh.size() == tokens_.size()) return clear();
    const double reached = acceptance_[count - 1];
    if (!(reached > 0)) return clear();  // what came was not expected: nothing is known of what follows
    tokens_.erase(tokens_.begin(), tokens_.begin() + count);
    acceptance_.erase(acceptance_.begin(), acceptance_.begin() + count);
    for (double& likely : acceptance_) likely /= reached;
}

void Chain::replace(std::vector<Token> tokens, std::vector<double> acceptance) {
    if (tokens.size() != acceptance.size()) throw std::invalid_argument("a chain needs the acceptance of each token");
    tokens_ = std::move(tokens);
    acceptance_ = std::move(acceptance);
}

void Chain::cut(Token vocabulary) {
    const auto unknown = std::ranges::find_if(tokens_, [&](Token token) { return token >= vocabulary; });
    acceptance_.resize(unknown - tokens_.begin());
    tokens_.resize(acceptance_.size());
}

std::span<const Token> Chain::propose(std::size_t count, double factor) {
    drafted_ = count;
    accepted_ = 0;
    under_way_ = true;
    expected_ = factor * std::accumulate(acceptance_.begin(), acceptance_.begin() + count, 0.0);
    return tokens().first(count);
}

void StepCost::require_points() const {
    if (tokens.empty() || tokens.size() != seconds.size()) {
        throw std::invalid_argument("a step's cost needs seconds for each number of tokens");
    }
}

double StepCost::at(double count) const {
    const auto behind =
        static_cast<std::size_t>(std::upper_bound(tokens.begin(), tokens.end(), count) - tokens.begin());
    if (behind == 0) return seconds.front();
    if (behind == tokens.size()) return seconds.back();
    const double slope = (seconds[behind] - seconds[behind - 1]) / (tokens[behind] - tokens[behind - 1]);
    return seconds[behind - 1] + slope * (count - tokens[behind - 1]);
}

namespace {

struct Node {
    double acceptance;
    std::size_t turn;
};

/// All tokens that may be verified, the most probable first.
std::vector<Node> descending(std::span<const ChainTurn> turns) {
    std::vector<Node> nodes;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
        const auto acceptance = turns[turn].chain->acceptance();
        for (const double likely : acceptance.first(std::min(acceptance.size(), turns[turn].limit))) {
            nodes.push_back({turns[turn].factor * likely, turn});
        }
    }
    std::ranges::stable_sort(nodes, std::ranges::greater{}, &Node::acceptance);
    return nodes;
}

/// The turns that require more than the token which each gains in any case, the largest need first.
std::vector<std::size_t> neediest(std::span<const ChainTurn> turns) {
    std::vector<std::size_t> found;
    for (std::size_t turn = 0; turn < turns.size(); ++turn) {
        if (turns[turn].required > 1.0) found.push_back(turn);
    }
    std::ranges::stable_sort(found, std::ranges::greater{}, [&](std::size_t turn) { return turns[turn].required; });
    return found;
}

/// Move the nodes that requests need to the front of the descending `nodes`, and return how many they are. A need ends
/// where another node would not make the request itself faster.
std::size_t serve_needs(std::vector<Node>& nodes, std::span<const ChainTurn> turns, std::size_t requests,
                        const StepCost& cost) {
    std::size_t taken = 0;
    for (const std::size_t turn : neediest(turns)) {
        double gain = 1.0;
        for (std::size_t next = taken; next < nodes.size() && gain < turns[turn].required; ++next) {
            if (nodes[next].turn != turn) continue;
            const double slower =
                cost.at(static_cast<double>(requests + taken + 1)) / cost.at(static_cast<double>(requests + taken));
            const double further = gain + nodes[next].acceptance;
            if (further <= gain * slower) break;
            gain = further;
            std::rotate(nodes.begin() + taken, nodes.begin() + next, nodes.begin() + next + 1);
            ++taken;
        }
    }
    return taken;
}

}  // namespace

std::vector<std::size_t> allocate(std::span<const ChainTurn> turns, std::size_t requests, const StepCost& cost) {
    std::vector<Node> nodes = descending(turns);
    const std::size_t needed = serve_needs(nodes, turns, requests, cost);
    double gain = static_cast<double>(requests);
    double highest = 0.0;
    std::size_t best = needed;
    for (std::size_t taken = 0; taken <= nodes.size(); ++taken) {
        if (taken > 0) gain += nodes[taken - 1].acceptance;
        const double goodput = gain / cost.at(static_cast<double>(requests + taken));
        if (taken == needed || (taken > needed && goodput > highest)) highest = goodput, best = taken;
    }
    std::vector<std::size_t> counts(turns.size());
    for (std::size_t taken = 0; taken < best; ++taken) ++counts[nodes[taken].turn];
    return counts;
}

std::vector<std::vector<Token>> propose_chains(std::span<const ChainTurn> turns, std::size_t requests,
                                               const StepCost& cost, double floor, Token vocabulary,
                                               const Deadline& until) {
    cost.require_points();
    std::vector<DraftJob> jobs;
    std::vector<Chain*> searched;
    for (const ChainTurn& turn : turns) {
        if (turn.drafter == nullptr) continue;
        const double least = turn.required > 1.0 ? floor / static_cast<double>(requests) : floor;
        jobs.push_back({turn.drafter, turn.indexes, turn.context, turn.limit, least, true});
        searched.push_back(turn.chain);
    }
    std::vector<DraftTree> trees = draft_batch(jobs, until);
    const bool late = until && std::chrono::steady_clock::now() >= *until;
    for (std::size_t i = 0; i < trees.size(); ++i) {
        if (late && trees[i].tokens.size() < searched[i]->tokens().size()) continue;  // more was known before
        searched[i]->replace(std::move(trees[i].tokens),
                             {trees[i].probabilities.begin(), trees[i].probabilities.end()});
    }
    for (const ChainTurn& turn : turns) turn.chain->cut(vocabulary);
    const std::vector<std::size_t> counts = allocate(turns, requests, cost);
    std::vector<std::vector<Token>> proposed;
    for (std::size_t i = 0; i < turns.size(); ++i) {
        const auto chain = turns[i].chain->propose(counts[i], turns[i].factor);
        proposed.emplace_back(chain.begin(), chain.end());
    }
    return proposed;
}

}  // namespace agentspec
