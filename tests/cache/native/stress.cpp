// Random work on suffix indexes, checked against a naive model and run by several threads. Built with a sanitizer by
// tests/cache/native/test_stress.py, or by CMake with -DAGENTSPEC_STRESS=ON. Arguments: a seed, the number of
// operations of one thread on small indexes, and the number of outputs that threads write beside readers.
#include "stress.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "drafting/draft_batch.hpp"
#include "drafting/drafter.hpp"
#include "index/suffix_index.hpp"

using namespace agentspec;

namespace {

/// How many allocations of this thread succeed before one fails, and whether all later ones fail too.
struct Memory {
    std::uint64_t left = ~std::uint64_t{0};
    bool for_good = false;

    bool is_out() {
        if (left > 0) return --left, false;
        if (!for_good) *this = {};
        return true;
    }
};
thread_local Memory memory;

}  // namespace

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    return memory.is_out() ? nullptr : std::malloc(std::max<std::size_t>(size, 1));
}
void* operator new(std::size_t size) {
    void* const found = operator new(size, std::nothrow);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}
void* operator new[](std::size_t size) { return operator new(size); }
void operator delete(void* old) noexcept { std::free(old); }
void operator delete(void* old, std::size_t) noexcept { std::free(old); }
void operator delete[](void* old) noexcept { std::free(old); }
void operator delete[](void* old, std::size_t) noexcept { std::free(old); }

// Linked with --wrap=mmap.
extern "C" void* __real_mmap(void*, std::size_t, int, int, int, off_t);
extern "C" void* __wrap_mmap(void* at, std::size_t size, int protection, int flags, int file, off_t offset) {
    if (at == nullptr && memory.is_out()) return MAP_FAILED;
    return __real_mmap(at, size, protection, flags, file, offset);
}

namespace {

/// Sequences as they are, searched token by token.
struct Model {
    struct Text {
        Tokens before, tokens;
    };
    std::map<SequenceId, Text> texts;

    std::int64_t count(const Tokens& context) const {
        std::int64_t total = 0;
        for (const auto& [id, text] : texts) {
            Tokens all(text.before);
            all.insert(all.end(), text.tokens.begin(), text.tokens.end());
            for (std::size_t at = text.before.size(); at < all.size(); ++at) {
                total += at >= context.size() &&
                         std::equal(context.begin(), context.end(), all.begin() + at - context.size());
            }
        }
        return total;
    }
};

std::int64_t count(const SuffixIndex& index, const Tokens& context) {
    const std::vector<std::int64_t> counts = index.successors(context).counts;
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

Tokens random_text(Random& random, std::size_t most, int vocabulary) {
    Tokens out(random() % (most + 1));
    const int used = 1 + static_cast<int>(random() % vocabulary);
    for (Token& token : out)
        token = static_cast<Token>(random() % used) + (random() % 50 == 0 ? kMostToken - vocabulary : 0);
    return out;
}

std::unique_ptr<SuffixIndex> reloaded(const SuffixIndex& index, const std::vector<SequenceId>& kept, bool deferred) {
    const Frozen frozen = index.freeze(kept);
    std::FILE* file = std::tmpfile();
    require(file != nullptr, "no temporary file");
    const FrozenLayout layout{0, {frozen.sequences.size(), frozen.pieces.size(), frozen.run.size(), frozen.log.size()}};
    const auto write = [&](const auto* items, std::size_t count) {
        const auto bytes = std::as_bytes(std::span(items, count));
        require(bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, file) == 1, "nothing written");
    };
    write(frozen.sequences.data(), frozen.sequences.size());
    write(frozen.pieces.data(), frozen.pieces.size());
    write(frozen.run.data(), frozen.run.size());
    write(frozen.log.data(), frozen.log.size());
    std::fflush(file);
    auto loaded = SuffixIndex::load(fileno(file), layout, deferred);
    std::fclose(file);
    return loaded;
}

/// One thread: every answer is that of the model, whatever was done before and merged or not. Where memory is `scarce`,
/// a change that it runs out for was not done, and is done again.
void compare(std::uint64_t seed, int operations, bool scarce) {
    Random random(seed);
    const auto change = [&](const SuffixIndex& index, auto&& operation) {
        while (scarce && random() % 4 > 0) {
            memory = {random() % 12, random() % 2 == 0};
            try {
                operation();
                memory = {};
                return;
            } catch (const std::bad_alloc&) {
                memory = {};
                index.check_integrity();
            }
        }
        operation();
    };
    const bool deferred = random() % 2 == 0;
    auto index = std::make_unique<SuffixIndex>(1 + random() % 20, 1 + random() % 4, deferred);
    Model model;
    Drafter drafter(64);
    SequenceId next = 0;
    const auto any = [&] {
        auto found = model.texts.begin();
        std::advance(found, random() % model.texts.size());
        return found;
    };
    for (int i = 0; i < operations; ++i) {
        const auto kind = random() % 100;
        if (kind < 30 || model.texts.empty()) {
            const Tokens before = random_text(random, 70, 5), tokens = random_text(random, 300, 5);
            change(*index, [&] { index->append(next, tokens, before); });
            model.texts[next++] = {{before.end() - std::min<std::ptrdiff_t>(before.size(), kDepth), before.end()},
                                   tokens};
        } else if (kind < 50) {
            const auto text = any();
            const Tokens tokens = random_text(random, 40, 5);
            change(*index, [&] { index->append(text->first, tokens); });
            text->second.tokens.insert(text->second.tokens.end(), tokens.begin(), tokens.end());
        } else if (kind < 60) {
            const auto text = any();
            const std::size_t length = random() % (text->second.tokens.size() + 1);
            change(*index, [&] { index->truncate(text->first, length); });
            text->second.tokens.resize(length);
        } else if (kind < 72) {
            std::vector<SequenceId> gone;
            for (std::size_t n = random() % 4 + (random() % 20 == 0 ? model.texts.size() / 2 : 0); n > 0; --n)
                gone.push_back(any()->first);
            change(*index, [&] { index->remove(gone); });
            for (const SequenceId id : gone) model.texts.erase(id);
        } else if (kind < 85) {
            for (auto steps = random() % 3; steps > 0; --steps) change(*index, [&] { index->merge_step(); });
        } else if (kind < 87) {
            std::vector<SequenceId> kept;
            for (auto text = model.texts.begin(); text != model.texts.end();) {
                if (random() % 5 > 0) {
                    kept.push_back(text++->first);
                } else {
                    text = model.texts.erase(text);
                }
            }
            index = reloaded(*index, kept, deferred);
        }
        if (random() % 8 == 0) index->check_integrity();
        Tokens context = random_text(random, 6, 5);
        if (!model.texts.empty() && random() % 2 == 0) {
            const auto& tokens = any()->second.tokens;
            const std::size_t end = tokens.empty() ? 0 : random() % tokens.size();
            context.assign(tokens.begin() + end - std::min<std::size_t>(end, random() % 70), tokens.begin() + end);
        }
        if (context.empty()) continue;
        const Tokens matched(context.end() - std::min<std::ptrdiff_t>(context.size(), kDepth), context.end());
        require(count(*index, context) == model.count(matched), "another count than the model's");
        const std::array<SourcedIndex, 1> indexes{{{index.get(), 0}}};
        const DraftTree tree = drafter.draft(indexes, context, 8, 0.0);
        for (std::size_t node = 0; node < tree.tokens.size(); ++node) {
            if (tree.parents[node] >= 0) continue;
            bool known = false;
            const Tokens one{context.back(), tree.tokens[node]};
            for (const auto& [id, text] : model.texts) {
                Tokens all(text.before);
                all.insert(all.end(), text.tokens.begin(), text.tokens.end());
                known = known || std::search(all.begin(), all.end(), one.begin(), one.end()) != all.end();
            }
            require(known, "a draft of what no text holds");
        }
        if (random() % 3 == 0) drafter.observe(indexes, context, random_text(random, 5, 5));
    }
    while (index->merge_step()) {
    }
    index->check_integrity();
}

constexpr Token kLength = 200;  // of an output of the threads; its tokens count up, and no other output has them

/// Threads that write, remove, merge, save and read one index: what is removed is never drafted, what is written is.
void race(std::uint64_t seed, int outputs) {
    SuffixIndex index(32, 2, true);
    Drafter drafter(64);
    std::vector<std::atomic<int>> state(outputs);  // 1: written; 2: being removed; 3: removed
    std::atomic<bool> done{false};
    std::atomic<int> written{0};
    const auto write = [&] {
        for (int number; (number = written.fetch_add(1)) < outputs;) {
            Tokens text(kLength);
            for (Token i = 0; i < kLength; ++i) text[i] = number * kLength + i;
            index.append(number, std::span(text).first(kLength / 2), Tokens{kMostToken, kMostToken - 1});
            index.append(number, std::span(text).last(kLength / 2));
            state[number].store(1);
        }
    };
    const auto forget = [&](SequenceId number) {
        state[number].store(2);
        index.remove(std::vector<SequenceId>{number});
        state[number].store(3);
    };
    const auto remove = [&] {
        Random random(seed);
        while (!done) {
            const int number = static_cast<int>(random() % outputs);
            if (state[number] != 1) continue;
            if (random() % 3 > 0) {
                forget(number);
            } else {
                for (const SequenceId id : index.oldest(kLength)) {
                    if (state[id] != 1) continue;
                    forget(id);
                }
            }
            if (random() % 16 == 0) std::this_thread::yield();
        }
    };
    const auto merge = [&] {
        while (!done) {
            if (!index.merge_step()) std::this_thread::yield();
        }
    };
    const auto read = [&](std::uint64_t reader) {
        Random random(seed + reader);
        std::array<SourcedIndex, 1> indexes{{{&index, 1}}};
        for (bool last = false; !last; last = done) {
            const int number = static_cast<int>(random() % outputs), before = state[number];
            const Token at = static_cast<Token>(random() % (kLength - 1)), token = number * kLength + at;
            const DraftTree tree = drafter.draft(indexes, Tokens{token}, 4, 0.0);
            for (std::size_t i = 0; i < tree.tokens.size(); ++i) {
                require(tree.tokens[i] == token + 1 + static_cast<Token>(i), "a torn text");
            }
            const int after = state[number];
            require(before != 3 || tree.tokens.empty(), "a removed text was drafted");
            require(before != 1 || after != 1 || !tree.tokens.empty(), "a written text is lost");
            if (random() % 4 == 0) drafter.observe(indexes, Tokens{token}, Tokens{token + 1});
            if (random() % 64 == 0) drafter.observe_end(token);
            if (random() % 256 == 0) drafter.keep_ends(Tokens{token});
        }
    };
    const auto look = [&] {
        while (!done) {
            const std::vector<SequenceId> sequences = index.oldest(~std::size_t{0});
            const Frozen frozen = index.freeze(sequences);
            require(index.memory_bytes() > 0 && frozen.log.size() >= frozen.run.size(), "sizes");
            if (!sequences.empty()) {
                try {
                    index.tokens(sequences[0]);
                } catch (const std::out_of_range&) {  // removed meanwhile
                }
            }
            index.check_integrity();
        }
    };
    std::vector<std::thread> writers, others;
    for (int i = 0; i < 2; ++i) writers.emplace_back(write);
    others.emplace_back(remove);
    others.emplace_back(merge);
    others.emplace_back(look);
    for (std::uint64_t i = 1; i <= 3; ++i) others.emplace_back(read, i);
    for (std::thread& writer : writers) writer.join();
    done = true;
    for (std::thread& other : others) other.join();
    while (index.merge_step()) {
    }
    index.check_integrity();
    for (int number = 0; number < outputs; ++number) {
        require(count(index, {number * kLength}) == (state[number] == 1 ? 1 : 0), "a text is lost, or there again");
    }
}

/// What a reader finds in a snapshot: every position with the tokens at it and before it, as far as its piece reaches.
std::uint64_t digest(const Snapshot& seen) {
    std::uint64_t sum = 0;
    const auto add = [&](Position position) {
        for (Position at = position; at >= position - kDepth; --at) {
            sum = 31 * sum + static_cast<std::uint64_t>((*seen.log)[at]);
            if ((*seen.log)[at] == kBoundary) break;
        }
        sum = 31 * sum + position;
    };
    for (const auto& run : *seen.runs) {
        for (const RunPart& part : run->parts()) std::for_each(part.positions().begin(), part.positions().end(), add);
    }
    return sum;
}

/// A snapshot stays what it is, however much is merged, removed and given back while it is held. Merge steps wait for
/// it sooner or later; appends to an index that leaves nothing to them do not.
void hold(std::uint64_t seed, int outputs) {
    Random random(seed);
    SuffixIndex index(32, 2, random() % 2 == 0);
    std::vector<std::pair<std::shared_ptr<const Snapshot>, std::uint64_t>> held;
    for (int number = 0; number < outputs; ++number) {
        Tokens text(kLength);
        for (Token& token : text) token = static_cast<Token>(random() % 5000);
        const std::size_t step = 1 + random() % kLength;  // a text may lie in several runs
        for (std::size_t at = 0; at < text.size(); at += step) {
            index.append(number, std::span(text).subspan(at, std::min(step, text.size() - at)));
        }
        if (random() % 2 == 0) index.remove(index.oldest(random() % (2 * kLength)));
        for (auto steps = random() % 8; steps > 0 && index.merge_step(); --steps) {
        }
        if (random() % 8 == 0) held.emplace_back(index.snapshot(), digest(*index.snapshot()));
        if (held.size() < 2 || random() % 8 > 0) continue;
        const auto one = held.begin() + static_cast<std::ptrdiff_t>(random() % held.size());
        require(digest(*one->first) == one->second, "a snapshot has changed");
        held.erase(one);
    }
    for (const auto& [seen, before] : held) require(digest(*seen) == before, "a snapshot has changed");
    index.check_integrity();
}

}  // namespace

int main(int count, char** arguments) {
    require(count == 4, "usage: stress SEED OPERATIONS OUTPUTS");
    const auto seed = std::strtoull(arguments[1], nullptr, 10);
    const int operations = std::atoi(arguments[2]), outputs = std::atoi(arguments[3]);
    for (std::uint64_t part = 0; part < 10; ++part) {
        compare(10 * seed + part, operations / 20, false);
        compare(10 * seed + part, operations / 20, true);
    }
    hold(seed, outputs);
    race(seed, outputs);
    draft_alone(seed, operations / 40);
    draft_beside_changes(seed, outputs / 6);
    std::printf("as the model says\n");
}
