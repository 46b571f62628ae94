#include "index/log_chunk.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kOwnPages = std::size_t{1} << 15;  // bytes of an array that leaves nothing in the heap
const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

constexpr std::size_t kBlocks = kChunk / kBlock;
constexpr std::uint16_t kNoBlocks[kBlocks] = {};  // of a chunk of which nothing is left
constexpr Token kNoTokens[kPadding + kBlock] = {};

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::uint64_t* ChunkMarks::make() {
    std::uint64_t* marks = marks_.load(std::memory_order_relaxed);
    if (marks == nullptr) {
        marks = new std::uint64_t[words()]();
        marks_.store(marks, std::memory_order_release);
        charge_.set(words() * sizeof(std::uint64_t));
    }
    return marks;
}

void ChunkMarks::set(std::size_t begin, std::size_t end) {
    std::uint64_t* marks = make();
    for (std::size_t at = begin; at < end;) {
        const std::size_t first = at % 64, count = std::min(64 - first, end - at);
        const std::uint64_t bits = (count == 64 ? ~0ull : (1ull << count) - 1) << first;
        __atomic_fetch_or(marks + at / 64, bits, __ATOMIC_RELAXED);
        at += count;
    }
}

void ChunkMarks::take(const ChunkMarks& other) {
    assert(other.size_ <= size_);
    if (const std::uint64_t* marks = other.marks_.load()) std::copy_n(marks, other.words(), make());
}

LogChunk::LogChunk(std::size_t capacity, bool padded, const std::shared_ptr<Account>& account)
    : before_(padded ? kPadding : 0),
      capacity_(capacity),
      present_(capacity),
      marks_(std::make_shared<ChunkMarks>(capacity, account)),
      charge_(account, 0) {
    take((before_ + capacity) * sizeof(Token));
    tokens_ = reinterpret_cast<Token*>(memory_) + before_;
    charge(0);
}

LogChunk::LogChunk(std::shared_ptr<const Mapping> file, const Token* tokens, std::size_t size, bool padded,
                   const std::shared_ptr<Account>& account)
    : file_(std::move(file)),
      tokens_(tokens),
      before_(padded ? kPadding : 0),
      capacity_(size),
      present_(size),
      marks_(std::make_shared<ChunkMarks>(size, account)),
      charge_(account, size * sizeof(Token)) {}

LogChunk::LogChunk(const std::shared_ptr<Account>& account)
    : tokens_(kNoTokens + kPadding),
      blocks_(kNoBlocks),
      before_(kPadding),
      capacity_(kChunk),
      present_(0),
      marks_(std::make_shared<ChunkMarks>(0, account)),
      charge_(account, 0) {}

LogChunk::LogChunk(const LogChunk& from, const std::vector<bool>& needed, std::size_t kept,
                   const std::shared_ptr<Account>& account)
    : before_(kPadding), capacity_(kChunk), present_(kept * kBlock), marks_(from.marks_), charge_(account, 0) {
    constexpr std::size_t kTable = kBlocks * sizeof(std::uint16_t);
    take(kTable + (kPadding + kept * kBlock) * sizeof(Token));
    auto* const blocks = reinterpret_cast<std::uint16_t*>(memory_);
    auto* const tokens = reinterpret_cast<Token*>(memory_ + kTable) + kPadding;
    std::copy_n(from.tokens_ - from.before_, from.before_, tokens - from.before_);
    const ChunkView old = from.view().nth(0);
    std::size_t next = 0;
    for (std::size_t block = 0; block < kBlocks; ++block) {
        if (!needed[block]) continue;
        std::copy_n(old.at(block * kBlock), kBlock, tokens + next * kBlock);
        blocks[block] = static_cast<std::uint16_t>(next++);
    }
    tokens_ = tokens;
    blocks_ = blocks;
    charge(bytes_);
}

std::shared_ptr<LogChunk> LogChunk::squeezed(const std::vector<bool>& needed,
                                             const std::shared_ptr<Account>& account) const {
    const auto kept = static_cast<std::size_t>(std::count(needed.begin(), needed.end(), true));
    return std::shared_ptr<LogChunk>(kept > 0 ? new LogChunk(*this, needed, kept, account) : new LogChunk(account));
}

LogChunk::~LogChunk() {
    if (file_) {
        give_back();
    } else if (is_paged()) {
        munmap(memory_, bytes_);
    } else {
        ::operator delete(memory_);
    }
}

/// Let the system have the pages of the file, which other processes may still use.
void LogChunk::give_back() const {
    const auto begin = reinterpret_cast<std::uintptr_t>(tokens_), end = begin + capacity_ * sizeof(Token);
    const std::uintptr_t first = pages(begin), last = end / kPage * kPage;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

bool LogChunk::is_paged() const { return bytes_ >= std::min(kOwnPages, kPagedBytes); }

/// Zeroed memory; of pages of its own only those are taken that are written to.
void LogChunk::take(std::size_t bytes) {
    bytes_ = bytes;
    if (!is_paged()) {
        memory_ = static_cast<std::byte*>(::operator new(bytes));
        std::memset(memory_, 0, bytes);
        return;
    }
    bytes_ = pages(bytes);
    void* own = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (own == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(own);
}

/// Count what is taken when the first `used` bytes are.
void LogChunk::charge(std::size_t used) { charge_.set(is_paged() ? pages(used) : bytes_); }

void LogChunk::write(std::size_t offset, std::span<const Token> tokens) {
    assert(!file_ && offset + tokens.size() <= capacity_);
    Token* const to = const_cast<Token*>(tokens_) + offset;
    std::copy(tokens.begin(), tokens.end(), to);
    charge(static_cast<std::size_t>(reinterpret_cast<std::byte*>(to + tokens.size()) - memory_));
}

void LogChunk::pad(const Token* end) { std::copy_n(end - kPadding, kPadding, const_cast<Token*>(tokens_) - kPadding); }

}  // namespace agentspec
