#include "index/token_log.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kOneChunk = sizeof(ChunkView) + sizeof(LogChunk) + sizeof(ChunkMarks);

/// The room of a first chunk that holds `needed` tokens: it grows, while all others are there at once.
std::size_t roomy(std::size_t needed) { return 2 * needed <= kChunk ? needed + needed / 8 + 32 : kChunk; }

}  // namespace

TokenLog::TokenLog(std::shared_ptr<Account> account) : account_(std::move(account)), charge_(account_, 0) {}

TokenLog::TokenLog(const std::shared_ptr<const Mapping>& file, std::size_t offset, std::size_t size,
                   std::shared_ptr<Account> account)
    : TokenLog(std::move(account)) {
    const auto* const tokens = reinterpret_cast<const Token*>(file->data() + offset);
    for (std::size_t nth = 0; nth < size / kChunk; ++nth) {
        set(nth, std::make_shared<LogChunk>(file, tokens + nth * kChunk, kChunk, nth > 0, account_));
    }
    size_ = chunks_.size() * kChunk;
    const std::size_t rest = size - size_;
    if (rest == 0) return;
    const std::size_t room = chunks_.empty() ? std::min(kChunk, roomy(rest)) : kChunk;
    set(chunks_.size(), std::make_shared<LogChunk>(room, size_ > 0, account_));
    append({tokens + size_, rest});
}

TokenLog::TokenLog(const TokenLog& other)
    : account_(other.account_),
      chunks_(other.chunks_),
      views_(other.views_),
      size_(other.size_),
      discarded_(other.discarded_),
      bytes_(other.memory_bytes()),
      any_dead_(other.any_dead()),
      charge_(account_, chunks_.size() * kOneChunk) {}

std::shared_ptr<TokenLog> TokenLog::with_room(std::size_t more) const {
    std::shared_ptr<TokenLog> larger(new TokenLog(*this));
    const std::size_t needed = size_ + more;
    if (chunks_.size() < 2 && capacity() < needed) larger->grow_first(std::min(kChunk, roomy(needed)));
    while (larger->capacity() < needed) {
        larger->set(larger->chunks_.size(), std::make_shared<LogChunk>(kChunk, true, account_));
    }
    return larger;
}

std::shared_ptr<TokenLog> TokenLog::with_chunk(std::size_t nth, std::shared_ptr<LogChunk> chunk) const {
    std::shared_ptr<TokenLog> other(new TokenLog(*this));
    other->set(nth, std::move(chunk));
    return other;
}

/// Copy the first chunk, if it is there and not full-grown, to a larger one.
void TokenLog::grow_first(std::size_t capacity) {
    if (!chunks_.empty() && chunks_[0]->capacity() == kChunk) return;
    auto larger = std::make_shared<LogChunk>(capacity, false, account_);
    if (!chunks_.empty()) {
        larger->write(0, {chunks_[0]->view().tokens, size_});
        larger->marks().take(chunks_[0]->marks());
    }
    set(0, std::move(larger));
}

void TokenLog::set(std::size_t nth, std::shared_ptr<LogChunk> chunk) {
    if (nth == chunks_.size()) {
        chunks_.emplace_back();
        views_.emplace_back();
        charge_.set(chunks_.size() * kOneChunk);
        bytes_ += kOneChunk;
    }
    if (const LogChunk* old = chunks_[nth].get()) {
        bytes_ -= old->memory_bytes();
        if (nth + 1 < chunks_.size()) discarded_ += old->present() - chunk->present();
    }
    bytes_ += chunk->memory_bytes();
    views_[nth] = chunk->view().nth(nth);
    chunks_[nth] = std::move(chunk);
}

std::size_t TokenLog::capacity() const {
    return chunks_.empty() ? 0 : (chunks_.size() - 1) * kChunk + chunks_.back()->capacity();
}

std::size_t TokenLog::mapped_bytes() const {
    std::size_t total = 0;
    for (const auto& chunk : chunks_) total += chunk->is_mapped() ? chunk->memory_bytes() : 0;
    return total;
}

void TokenLog::append(std::span<const Token> tokens) {
    assert(size_ + tokens.size() <= capacity());
    while (!tokens.empty()) {
        const std::size_t nth = size_ / kChunk, offset = size_ % kChunk;
        LogChunk& chunk = *chunks_[nth];
        const std::size_t before = chunk.memory_bytes(), some = std::min(tokens.size(), kChunk - offset);
        if (offset == 0 && nth > 0) chunk.pad(view() + size_);
        chunk.write(offset, tokens.first(some));
        bytes_ += chunk.memory_bytes() - before;
        size_ += some;
        tokens = tokens.subspan(some);
    }
}

void TokenLog::make_marks(std::size_t begin, std::size_t end) {
    for (std::size_t nth = begin / kChunk; nth * kChunk < end; ++nth) {
        const std::size_t before = chunks_[nth]->memory_bytes();
        chunks_[nth]->marks().make();
        bytes_ += chunks_[nth]->memory_bytes() - before;
    }
}

void TokenLog::bury(std::size_t begin, std::size_t end) {
    make_marks(begin, end);
    while (begin < end) {
        const std::size_t offset = begin % kChunk, some = std::min(end - begin, kChunk - offset);
        chunks_[begin / kChunk]->marks().set(offset, offset + some);
        begin += some;
    }
    any_dead_.store(true, std::memory_order_release);
}

}  // namespace agentspec
