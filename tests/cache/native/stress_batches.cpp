// Batches of draft chains, beside drafts of one request after the other.
#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>

#include "index/suffix_index.hpp"
#include "stress.hpp"

using namespace agentspec;
using Clock = std::chrono::steady_clock;

void check_chain(const DraftJob& job, const DraftTree& chain) {
    const auto& likely = chain.probabilities;
    require(chain.tokens.size() == likely.size(), "a chain without the acceptance of each token");
    require(std::ranges::is_sorted(likely, std::ranges::greater{}), "acceptance that rises along a chain");
    require(likely.empty() || (likely.front() <= 1.0 && likely.back() >= 0.0), "acceptance out of bounds");
    require(chain.tokens.size() <= job.max_tokens, "a chain over its limit");
}

namespace {

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

/// With a job that cannot be done, nothing is done for any.
void refuse(Random& random, std::vector<DraftJob> jobs) {
    DraftJob& job = jobs[random() % jobs.size()];
    job.indexes.push_back(job.indexes.front());
    try {
        draft_batch(jobs);
        require(false, "an index is searched twice");
    } catch (const std::invalid_argument&) {
    }
}

/// The chains are those of one request after the other; with `until`, only as far as they go when time is up.
void compare(std::span<const DraftJob> jobs, const Deadline& until) {
    const std::vector<DraftTree> drafted = draft_batch(jobs, until);
    require(drafted.size() == jobs.size(), "another number of drafts than of jobs");
    for (std::size_t i = 0; i < jobs.size(); ++i) {
        check_chain(jobs[i], drafted[i]);
        const auto& [drafter, indexes, context, most, least, chain] = jobs[i];
        const DraftTree whole = drafter->draft(indexes, context, most, least, chain);
        const std::size_t size = until ? drafted[i].tokens.size() : whole.tokens.size();
        require(size <= whole.tokens.size(), "a chain that goes on after its deadline");
        require(std::ranges::equal(drafted[i].tokens, std::span(whole.tokens).first(size)), "another chain");
        require(std::ranges::equal(drafted[i].probabilities, std::span(whole.probabilities).first(size)),
                "another acceptance");
    }
}

}  // namespace

void draft_alone(std::uint64_t seed, int batches) {
    Random random(seed);
    Drafter drafter(64);
    std::array<Shelf, 2> shelves{Shelf(random), Shelf(random)};
    const int vocabulary = 20 + static_cast<int>(random() % 100);
    Tokens book(500);
    for (Token& token : book) token = static_cast<Token>(random() % vocabulary);
    for (int i = 0; i < batches; ++i) {
        for (int n = 0; n < 8; ++n) shelves[random() % 2].change(random, excerpt(random, book, 150, vocabulary));
        const std::vector<SourcedIndex> indexes{{&shelves[0].index, 0}, {&shelves[1].index, 1}};
        std::deque<Tokens> contexts;
        std::vector<DraftJob> jobs;
        for (auto n = random() % 30; n > 0; --n) {
            const Tokens& context = contexts.emplace_back(excerpt(random, book, 80, vocabulary));
            jobs.push_back({&drafter, indexes, context, random_limit(random), random() % 2 == 0 ? 0.0 : 0.05, true});
        }
        compare(jobs, Clock::now() + std::chrono::microseconds(random() % 400));
        compare(jobs, {});
        if (!jobs.empty()) refuse(random, jobs);
        drafter.observe(indexes, excerpt(random, book, 80, vocabulary), excerpt(random, book, 20, vocabulary));
    }
}
