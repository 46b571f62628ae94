#include "index/token_log.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kBlocks = kChunk / kBlock;
constexpr std::uint16_t kNoBlocks[kBlocks] = {};  // of a chunk of which nothing is left
constexpr std::size_t kOneChunk = sizeof(ChunkView) + sizeof(LogChunk) + sizeof(std::shared_ptr<LogChunk>);

/// The room of a first chunk that holds `needed` tokens: it grows, while all others are there at once.
std::size_t roomy(std::size_t needed) {
    return 2 * needed <= kChunk ? std::min(kChunk, needed + needed / 8 + 32) : kChunk;
}

}  // namespace

LogChunk::LogChunk(std::size_t capacity, bool padded)
    : capacity_(capacity),
      present_(capacity),
      before_(padded ? kPadding : 0),
      marks_(std::make_shared<std::uint64_t[]>(words())) {
    room_.reserve(before_ + capacity);
    tokens_ = room_.data() + before_;
}

LogChunk::LogChunk(std::shared_ptr<const Mapping> file, const Token* tokens, bool padded)
    : file_(std::move(file)),
      capacity_(kChunk),
      present_(kChunk),
      before_(padded ? kPadding : 0),
      marks_(std::make_shared<std::uint64_t[]>(words())),
      tokens_(tokens) {}

LogChunk::LogChunk(const LogChunk& from, const std::vector<bool>& needed)
    : capacity_(kChunk),
      present_(kBlock * static_cast<std::size_t>(std::count(needed.begin(), needed.end(), true))),
      before_(kPadding),
      blocks_(kNoBlocks) {
    room_.reserve(kPadding + std::max(present_, kBlock));
    tokens_ = room_.data() + kPadding;
    room_.resize(kPadding + (present_ > 0 ? 0 : kBlock));
    if (present_ == 0) return;
    table_.resize(kBlocks);
    blocks_ = table_.data();
    marks_ = from.marks_;
    room_.resize(kPadding);
    std::copy(from.tokens_ - from.before_, from.tokens_, room_.end() - static_cast<std::ptrdiff_t>(from.before_));
    const ChunkView old = from.view().nth(0);
    for (std::size_t block = 0, next = 0; block < kBlocks; ++block) {
        if (!needed[block]) continue;
        const Token* const text = old.at(block * kBlock);
        room_.insert(room_.end(), text, text + kBlock);
        table_[block] = static_cast<std::uint16_t>(next++);
    }
}

LogChunk::~LogChunk() {
    if (file_) give_back(tokens_, tokens_ + capacity_);  // other processes may still use them
}

std::size_t LogChunk::memory_bytes() const {
    const std::size_t tokens = file_ ? capacity_ * sizeof(Token) : bytes_of(room_, room_.size());
    return tokens + table_.capacity() * sizeof(table_[0]) + (marks_ ? words() * sizeof(marks_[0]) : 0);
}

void LogChunk::append(std::size_t size, std::span<const Token> tokens) {
    assert(!file_ && !blocks_ && size + tokens.size() <= capacity_);
    room_.resize(before_ + size);  // without what was taken back
    room_.insert(room_.end(), tokens.begin(), tokens.end());
}

void LogChunk::bury(std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end;) {
        const std::size_t first = at % 64, count = std::min(64 - first, end - at);
        const std::uint64_t bits = (count == 64 ? ~0ull : (1ull << count) - 1) << first;
        __atomic_fetch_or(&marks_[at / 64], bits, __ATOMIC_RELAXED);
        at += count;
    }
}

void LogChunk::take_marks(const LogChunk& other) { std::copy_n(&other.marks_[0], other.words(), &marks_[0]); }

TokenLog::TokenLog(const std::shared_ptr<const Mapping>& file, std::size_t offset, std::size_t size) {
    const auto* const tokens = reinterpret_cast<const Token*>(file->data() + offset);
    for (std::size_t nth = 0; nth < size / kChunk; ++nth) {
        set(nth, std::make_shared<LogChunk>(file, tokens + nth * kChunk, nth > 0));
    }
    size_ = chunks_.size() * kChunk;
    const std::size_t rest = size - size_;
    if (rest == 0) return;
    set(chunks_.size(), std::make_shared<LogChunk>(size_ > 0 ? kChunk : roomy(rest), size_ > 0));
    append({tokens + size_, rest});
}

std::shared_ptr<TokenLog> TokenLog::with_room(std::size_t more) const {
    auto larger = std::make_shared<TokenLog>(*this);
    const std::size_t needed = size_ + more;
    if (capacity() < std::min(needed, kChunk)) {  // the first chunk is not there, or not full-grown
        auto first = std::make_shared<LogChunk>(roomy(needed), false);
        if (!chunks_.empty()) {
            first->append(0, {chunks_[0]->view().tokens, size_});
            first->take_marks(*chunks_[0]);
        }
        larger->set(0, std::move(first));
    }
    while (larger->capacity() < needed) larger->set(larger->chunks_.size(), std::make_shared<LogChunk>(kChunk, true));
    return larger;
}

std::shared_ptr<TokenLog> TokenLog::with_chunk(std::size_t nth, std::shared_ptr<LogChunk> chunk) const {
    auto other = std::make_shared<TokenLog>(*this);
    other->set(nth, std::move(chunk));
    return other;
}

void TokenLog::set(std::size_t nth, std::shared_ptr<LogChunk> chunk) {
    if (nth == chunks_.size()) {
        chunks_.emplace_back();
        views_.emplace_back();
    }
    views_[nth] = chunk->view().nth(nth);
    chunks_[nth] = std::move(chunk);
}

std::size_t TokenLog::capacity() const {
    return chunks_.empty() ? 0 : (chunks_.size() - 1) * kChunk + chunks_.back()->capacity();
}

std::size_t TokenLog::memory_bytes() const {
    return sum([](const LogChunk& chunk) { return kOneChunk + chunk.memory_bytes(); });
}

std::size_t TokenLog::discarded() const {
    return sum([](const LogChunk& chunk) { return chunk.capacity() - chunk.present(); });
}

std::size_t TokenLog::mapped_bytes() const {
    return sum([](const LogChunk& chunk) { return chunk.is_mapped() ? chunk.memory_bytes() : 0; });
}

void TokenLog::append(std::span<const Token> tokens) {
    assert(size_ + tokens.size() <= capacity());
    while (!tokens.empty()) {
        const std::size_t nth = size_ / kChunk, offset = size_ % kChunk;
        const std::size_t some = std::min(tokens.size(), kChunk - offset);
        LogChunk& chunk = *chunks_[nth];
        if (offset == 0 && nth > 0) chunk.pad(view() + size_);
        chunk.append(offset, tokens.first(some));
        size_ += some;
        tokens = tokens.subspan(some);
    }
}

void TokenLog::bury(std::size_t begin, std::size_t end) {
    while (begin < end) {
        const std::size_t offset = begin % kChunk, some = std::min(end - begin, kChunk - offset);
        chunks_[begin / kChunk]->bury(offset, offset + some);
        begin += some;
    }
    __atomic_store_n(&any_dead_, true, __ATOMIC_RELEASE);
}

}  // namespace agentspec
