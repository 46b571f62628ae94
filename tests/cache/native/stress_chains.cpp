// Chains proposed for batches of requests, beside drafts of one request after the other.
#include "stress_chains.hpp"

#include <array>
#include <chrono>
#include <deque>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>

#include "index/suffix_index.hpp"

using namespace agentspec;
using Clock = std::chrono::steady_clock;

namespace {

double total_expected(std::span<const ChainTurn> turns) {
    return std::transform_reduce(turns.begin(), turns.end(), 0.0, std::plus{},
                                 [](const ChainTurn& turn) { return turn.chain->expected(); });
}

/// No other number of the likeliest tokens has more expected tokens per second.
void check_goodput(std::span<const ChainTurn> turns, std::size_t proposed, const StepCost& cost) {
    std::vector<double> gains;
    for (const ChainTurn& turn : turns) {
        const auto acceptance = turn.chain->acceptance();
        for (const double likely : acceptance.first(std::min(acceptance.size(), turn.limit)))
            gains.push_back(turn.factor * likely);
    }
    std::ranges::sort(gains, std::ranges::greater{});
    double gain = static_cast<double>(turns.size());
    const double reached = (gain + total_expected(turns)) / cost.at(static_cast<double>(turns.size() + proposed));
    for (std::size_t taken = 0; taken <= gains.size(); ++taken) {
        if (taken > 0) gain += gains[taken - 1];
        require(reached >= (1.0 - kRounding) * gain / cost.at(static_cast<double>(turns.size() + taken)),
                "fewer tokens per second than there might be");
    }
}

/// Texts of one index that are much alike, and how long each is.
struct Shelf {
    SuffixIndex index;
    std::map<SequenceId, std::size_t> lengths;

    Shelf(Random& random) : index(1 + random() % 20, 1 + random() % 4, random() % 2 == 0) {}

    void change(Random& random, const Tokens& tokens) {
        const auto kind = random() % 10;
        const auto any = std::next(lengths.begin(), static_cast<std::ptrdiff_t>(random() % (lengths.size() + 1)));
        if (kind < 4 || any == lengths.end()) {
            const SequenceId id = lengths.empty() ? 0 : lengths.rbegin()->first + 1;
            index.append(id, tokens);
            lengths[id] = tokens.size();
        } else if (kind < 6) {
            index.append(any->first, tokens);
            any->second += tokens.size();
        } else if (kind < 7) {
            index.truncate(any->first, any->second = random() % (any->second + 1));
        } else if (kind < 8) {
            index.remove(std::vector<SequenceId>{any->first});
            lengths.erase(any);
        } else {
            index.merge_step();
        }
    }
};

/// A part of `book`, up to `most` tokens long, with a misprint here and there.
Tokens excerpt(Random& random, const Tokens& book, std::size_t most, int vocabulary) {
    const std::size_t length = 1 + random() % most, begin = random() % (book.size() - length);
    Tokens out(book.begin() + begin, book.begin() + begin + length);
    for (Token& token : out)
        if (random() % 24 == 0) token = static_cast<Token>(random() % vocabulary);
    return out;
}

/// A batch of chains as it is asked for, and what each chain must then be.
struct Batch {
    static constexpr std::array<Token, 3> kBefore{1, 2, 3};  // what each chain holds at first
    std::deque<Chain> chains;
    std::deque<Tokens> contexts;
    std::vector<ChainTurn> turns;
    std::vector<Tokens> tokens;
    std::vector<std::vector<double>> acceptance;

    void add(Random& random, const Drafter* drafter, std::vector<SourcedIndex> indexes, Tokens context, double needed) {
        const std::size_t limit = random_limit(random);
        Chain& chain = chains.emplace_back();
        chain.replace({kBefore.begin(), kBefore.end()}, {0.75, 0.5, 0.25});
        turns.push_back({&chain, drafter, std::move(indexes), contexts.emplace_back(std::move(context)), limit,
                         static_cast<double>(random() % 5) / 4.0, needed});
    }
    /// Draft for one request after the other.
    void expect(double floor, Token vocabulary) {
        for (const ChainTurn& turn : turns) {
            Tokens found(kBefore.begin(), kBefore.end());
            std::vector<double> likely{0.75, 0.5, 0.25};
            if (turn.drafter) {
                const double least = turn.required > 1.0 ? floor / static_cast<double>(turns.size()) : floor;
                DraftTree tree = turn.drafter->draft(turn.indexes, turn.context, turn.limit, least, true);
                found = std::move(tree.tokens);
                likely.assign(tree.probabilities.begin(), tree.probabilities.end());
            }
            found.erase(std::ranges::find_if(found, [&](Token token) { return token >= vocabulary; }), found.end());
            likely.resize(found.size());
            tokens.push_back(std::move(found));
            acceptance.push_back(std::move(likely));
        }
    }
    /// Propose, and return how many tokens in all.
    std::size_t propose(const StepCost& cost, double floor, Token vocabulary, const Deadline& until = {}) {
        const auto proposed = propose_chains(turns, turns.size(), cost, floor, vocabulary, until);
        require(proposed.size() == turns.size(), "another number of chains than of requests");
        std::size_t total = 0;
        for (std::size_t i = 0; i < turns.size(); ++i) {
            check_chain(turns[i], proposed[i], until.has_value());
            total += proposed[i].size();
        }
        return total;
    }
    /// Chains are what they must be; those searched for, only as far as they go where time was up, or as before.
    void check(bool whole) const {
        for (std::size_t i = 0; i < turns.size(); ++i) {
            if (!whole && std::ranges::equal(chains[i].tokens(), kBefore)) continue;
            const std::size_t size = whole || !turns[i].drafter ? tokens[i].size() : chains[i].tokens().size();
            require(size <= tokens[i].size(), "a chain that goes on after its deadline");
            require(std::ranges::equal(chains[i].tokens(), std::span(tokens[i]).first(size)), "another chain");
            require(std::ranges::equal(chains[i].acceptance(), std::span(acceptance[i]).first(size)),
                    "another acceptance");
        }
    }
    /// With requests that cannot be served, nothing is done for any.
    void refuse(Random& random, const StepCost& cost) {
        for (auto faults = 1 + random() % 2; faults > 0; --faults) {
            ChainTurn& turn = turns[random() % turns.size()];
            if (turn.indexes.empty() || turn.drafter == nullptr) return;
            turn.indexes.push_back(turn.indexes.front());
        }
        try {
            propose_chains(turns, turns.size(), cost, 0.0, kMostToken);
            require(false, "an index is searched twice");
        } catch (const std::invalid_argument&) {
        }
        check(true);
    }
};

}  // namespace

void propose_alone(std::uint64_t seed, int batches) {
    Random random(seed);
    Drafter drafter(64);
    std::array<Shelf, 2> shelves{Shelf(random), Shelf(random)};
    const int vocabulary = 20 + static_cast<int>(random() % 100);
    Tokens book(500);
    for (Token& token : book) token = static_cast<Token>(random() % vocabulary);
    for (int i = 0; i < batches; ++i) {
        for (int n = 0; n < 8; ++n) shelves[random() % 2].change(random, excerpt(random, book, 150, vocabulary));
        const std::vector<SourcedIndex> indexes{{&shelves[0].index, 0}, {&shelves[1].index, 1}};
        Batch batch;
        const bool needs = random() % 2 == 0;
        for (auto n = random() % 30; n > 0; --n) {
            const double needed = needs && random() % 3 == 0 ? static_cast<double>(random() % 8) : 0.0;
            batch.add(random, random() % 5 ? &drafter : nullptr, indexes, excerpt(random, book, 80, vocabulary),
                      needed);
        }
        const RandomCost cost(random);
        const double floor = random() % 2 == 0 ? 0.0 : 0.05;
        const Token known = random() % 3 ? kMostToken : vocabulary / 2;
        batch.expect(floor, known);
        batch.propose(cost.get(), floor, known, Clock::now() + std::chrono::microseconds(random() % 400));
        batch.check(false);
        const std::size_t proposed = batch.propose(cost.get(), floor, known);
        batch.check(true);
        if (!needs) check_goodput(batch.turns, proposed, cost.get());
        if (!batch.turns.empty()) batch.refuse(random, cost.get());
        drafter.observe(indexes, excerpt(random, book, 80, vocabulary), excerpt(random, book, 20, vocabulary));
    }
}
