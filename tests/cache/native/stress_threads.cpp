// Chains drafted by several threads, while others change the indexes that they search.
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "index/suffix_index.hpp"
#include "stress.hpp"

using namespace agentspec;
using Clock = std::chrono::steady_clock;

namespace {

constexpr double kRounding = 1e-6;  // of a probability that was reported in single precision
constexpr Token kLength = 120;      // of an output of the threads
constexpr int kVersions = 4;        // of an output, each of which goes on where the one before was cut

/// An output that no other has a token of: each tells the output, its version and its place.
struct Output {
    std::array<std::atomic<int>, kVersions> starts{};
    std::atomic<int> version{0};  // begun
    std::atomic<int> settled{0};  // begun, and what was cut is gone
    std::atomic<int> state{0};    // 1: complete; 2: being removed; 3: removed

    /// The version of the token at `place`, as the text was when `latest` was the version.
    int at(int place, int latest) const {
        while (starts[latest] > place) --latest;
        return latest;
    }
};

struct Spot {
    int output, version, place;
};

Spot spot_of(Token token) { return {token / (kVersions * kLength), token / kLength % kVersions, token % kLength}; }

class Library {
public:
    explicit Library(std::uint64_t seed, int outputs) : seed_(seed), outputs_(outputs) {}

    void run() {
        std::vector<std::thread> writers, others;
        for (int i = 0; i < 2; ++i) writers.emplace_back([this, i] { write(i); });
        for (int i = 0; i < 3; ++i) others.emplace_back([this, i] { draft(i); });
        others.emplace_back([this] { remove(); });
        others.emplace_back([this] { merge(); });
        for (std::thread& writer : writers) writer.join();
        done_ = true;
        for (std::thread& other : others) other.join();
        for (SuffixIndex& index : indexes_) {
            while (index.merge_step()) {
            }
            index.check_integrity();
        }
    }

private:
    Tokens text(int output, int begin, int end, int version) const {
        Tokens out;
        for (int place = begin; place < end; ++place)
            out.push_back((output * kVersions + outputs_[output].at(place, version)) * kLength + place);
        return out;
    }

    /// Outputs of every second number, some at a time, each of which learns from the other outputs.
    void write(int half) {
        Random random(seed_ + half);
        std::map<int, int> open;  // length of each output
        for (int next = half; next < static_cast<int>(outputs_.size()) || !open.empty();) {
            while (open.size() < 6 && next < static_cast<int>(outputs_.size())) {
                open[next] = 0;
                begun_[half] = next;
                next += 2;
            }
            extend(random, half, open);
            for (auto& [output, length] : open) {
                if (random() % 8 == 0) cut(random, half, output, length);
            }
            std::erase_if(open, [&](const auto& output) {
                if (output.second < kLength) return false;
                outputs_[output.first].state = 1;
                return true;
            });
        }
    }

    void extend(Random& random, int half, std::map<int, int>& open) {
        for (auto& [output, length] : open) {
            const int version = outputs_[output].version, end = std::min<int>(kLength, length + random() % 40);
            const Tokens before = text(output, 0, length, version), fresh = text(output, length, end, version);
            const std::array<SourcedIndex, 1> searched{{{&indexes_[1 - half], half}}};
            if (random() % 3) drafters_[output % 3 == 0].observe(searched, before, fresh);
            indexes_[half].append(output, fresh);
            length = end;
        }
        if (random() % 4 == 0) drafters_[0].observe_end(static_cast<Token>(random() % 1000));
        if (random() % 8 == 0) drafters_[1].keep_ends(Tokens{static_cast<Token>(random() % 1000)});
    }

    void cut(Random& random, int half, int output, int& length) {
        Output& cut = outputs_[output];
        if (cut.version == kVersions - 1) return;
        length = static_cast<int>(random() % (length + 1));
        cut.starts[cut.version + 1] = length;
        ++cut.version;
        indexes_[half].truncate(output, length);
        cut.settled = cut.version.load();
    }

    void remove() {
        Random random(seed_ + 10);
        while (!done_) {
            const int half = static_cast<int>(random() % 2);
            std::vector<SequenceId> gone;
            for (auto n = random() % 4; n > 0; --n) {
                const int output = any(random, half);
                int complete = 1;
                if (outputs_[output].state.compare_exchange_strong(complete, 2)) gone.push_back(output);
            }
            indexes_[half].remove(gone);
            for (const SequenceId output : gone) outputs_[output].state = 3;
            std::this_thread::yield();
        }
    }

    void merge() {
        while (!done_) {
            bool worked = false;
            for (SuffixIndex& index : indexes_) worked = index.merge_step() || worked;
            if (!worked) std::this_thread::yield();
        }
    }

    /// The number of an output that was begun, one of the latest more often than not.
    int any(Random& random, int half) const {
        const int among = begun_[half] / 2 + 1;
        const int recent = random() % 3 ? std::min(among, 12) : among;
        return 2 * (among - 1 - static_cast<int>(random() % recent)) + half;
    }

    void draft(int reader) {
        Random random(seed_ + 20 + reader);
        std::vector<Tokens> contexts(20);
        for (bool last = false; !last; last = done_) step(random, contexts);
    }

    Tokens renewed(Random& random) const {
        const int output = any(random, static_cast<int>(random() % 2)), version = outputs_[output].version;
        const int end = 1 + static_cast<int>(random() % kLength);
        return text(output, end - std::min<int>(end, 1 + random() % 70), end, version);
    }

    void step(Random& random, std::span<Tokens> contexts) const {
        std::vector<DraftJob> jobs;
        std::vector<std::array<int, 2>> before;
        const double least = random() % 2 == 0 ? 0.0 : 0.1;
        for (Tokens& context : contexts.first(1 + random() % contexts.size())) {
            if (context.empty() || random() % 3 == 0) context = renewed(random);
            const auto first = random() % 2;
            jobs.push_back({&drafters_[random() % 2],
                            {{&indexes_[first], 0}, {&indexes_[1 - first], 1}},
                            context,
                            random_limit(random),
                            least,
                            true});
            const Output& output = outputs_[spot_of(context.back()).output];
            before.push_back({output.state, output.settled});
        }
        Deadline until;
        if (random() % 4 == 0) until = Clock::now() + std::chrono::microseconds(random() % 1000);
        const std::vector<DraftTree> chains = draft_batch(jobs, until);
        for (std::size_t i = 0; i < jobs.size(); ++i) {
            check_chain(jobs[i], chains[i]);
            check_known(jobs[i], chains[i].tokens);
            check_current(jobs[i], chains[i], before[i], least == 0.0 && !until);
        }
        for (std::size_t i = 0; i < jobs.size(); ++i) {  // go on with some of what was drafted
            const auto& tokens = chains[i].tokens;
            const auto count = static_cast<std::ptrdiff_t>(random() % (tokens.size() + 1));
            contexts[i].insert(contexts[i].end(), tokens.begin(), tokens.begin() + count);
        }
    }

    /// What follows a context did so in a text that there was.
    void check_known(const DraftJob& job, std::span<const Token> chain) const {
        if (chain.empty()) return;
        const Spot last = spot_of(chain.back());
        require(last.version <= outputs_[last.output].version, "a text that was not written yet");
        const int begin = last.place - static_cast<int>(chain.size());
        require(begin >= 0, "a chain that is longer than its text");
        const Tokens known = text(last.output, begin, last.place + 1, last.version);
        require(known.front() == job.context.back(), "a chain that follows something else");
        require(std::equal(chain.begin(), chain.end(), known.begin() + 1), "a chain that no text ever held");
    }

    /// What was gone before the search is not found, what was there all the time is if `complete`.
    void check_current(const DraftJob& job, const DraftTree& chain, std::array<int, 2> before, bool complete) const {
        const auto [state, settled] = before;
        const Spot from = spot_of(job.context.back());
        const Output& output = outputs_[from.output];
        require(state != 3 || chain.tokens.empty(), "a removed text is in a chain");
        for (const Token token : chain.tokens) {
            const Spot spot = spot_of(token);
            require(spot.version > settled || output.at(spot.place, settled) == spot.version, "cut text is in a chain");
        }
        const auto& likely = chain.probabilities;
        require(likely.empty() || likely.back() >= (1.0 - kRounding) * job.min_probability, "below the least");
        const bool there = state == 1 && output.state == 1 && from.place + 1 < kLength;
        if (!complete || !there || job.max_tokens == 0 || output.at(from.place, settled) != from.version) return;
        require(!chain.tokens.empty(), "a text that is there is in no chain");
    }

    const std::uint64_t seed_;
    std::vector<Output> outputs_;
    std::array<std::atomic<int>, 2> begun_{0, 1};
    std::atomic<bool> done_{false};
    mutable std::array<SuffixIndex, 2> indexes_{SuffixIndex(32, 2, true), SuffixIndex(16, 3, true)};
    std::array<Drafter, 2> drafters_{Drafter(64), Drafter(64)};
};

}  // namespace

void draft_beside_changes(std::uint64_t seed, int outputs) { Library(seed, outputs).run(); }
