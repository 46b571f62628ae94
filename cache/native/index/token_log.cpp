#include "index/token_log.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kHeapBytes = std::size_t{1} << 18;  // arrays up to this size come from the heap
constexpr std::size_t kMedium = std::size_t{1} << 26;     // tokens that most logs never exceed
constexpr std::size_t kPage = 4096;

/// Zeroed memory that is taken page by page when it is written to.
void* take(std::size_t bytes) {
    if (bytes <= kHeapBytes) {
        void* array = ::operator new(bytes);
        return std::memset(array, 0, bytes);
    }
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return pages;
}

void give_back(void* array, std::size_t bytes) {
    if (bytes <= kHeapBytes) {
        ::operator delete(array);
    } else {
        munmap(array, bytes);
    }
}

/// What an array of `capacity` bytes takes when `used` of them were written to.
std::size_t taken(std::size_t used, std::size_t capacity) {
    return capacity <= kHeapBytes ? capacity : std::min(capacity, (used + kPage - 1) / kPage * kPage);
}

std::size_t roomy(std::size_t needed) {
    if (needed * sizeof(Token) <= kHeapBytes / 2) return needed + needed / 8 + 32;
    return needed <= kMedium / 2 ? kMedium : std::max(needed, std::size_t{std::numeric_limits<Position>::max()});
}

}  // namespace

TokenLog::TokenLog(std::size_t capacity, std::shared_ptr<Account> account)
    : data_(static_cast<Token*>(take(capacity * sizeof(Token)))), capacity_(capacity), charge_(std::move(account), 0) {
    charge();
}

TokenLog::TokenLog(std::shared_ptr<const Mapping> file, std::size_t offset, std::size_t size,
                   std::shared_ptr<Account> account)
    : file_(std::move(file)),
      data_(reinterpret_cast<Token*>(file_->data() + offset)),
      size_(size),
      capacity_((file_->size() - offset) / sizeof(Token)),
      mapped_(size),
      charge_(std::move(account), 0) {
    charge();
}

TokenLog::~TokenLog() {
    if (!file_) give_back(data_, capacity_ * sizeof(Token));
    if (std::uint64_t* dead = dead_.load()) give_back(dead, dead_bytes());
}

std::shared_ptr<TokenLog> TokenLog::with_room(std::size_t needed, const std::shared_ptr<Account>& account) {
    for (std::size_t capacity = roomy(needed);; capacity = std::max(needed, capacity / 2)) {
        try {
            return std::make_shared<TokenLog>(capacity, account);
        } catch (const std::bad_alloc&) {
            if (capacity == needed) throw;  // else too few addresses are left: take no more than needed
        }
    }
}

std::shared_ptr<TokenLog> TokenLog::grown(std::size_t more, const std::shared_ptr<Account>& account) const {
    auto larger = with_room(size_ + more, account);
    larger->append({data_, size_});
    for (std::size_t begin = 0; any_dead() && begin < size_; ++begin) {
        std::size_t end = begin;
        while (end < size_ && is_dead(end)) ++end;
        if (end > begin) larger->bury(begin, end);
        begin = end;
    }
    return larger;
}

void TokenLog::append(std::span<const Token> tokens) {
    assert(size_ + tokens.size() <= capacity_);
    std::copy(tokens.begin(), tokens.end(), data_ + size_);
    size_ += tokens.size();
    charge();
}

void TokenLog::bury(std::size_t begin, std::size_t end) {
    if (begin == end) return;
    std::uint64_t* dead = dead_.load(std::memory_order_relaxed);
    if (!dead) {
        dead = static_cast<std::uint64_t*>(take(dead_bytes()));
        dead_.store(dead, std::memory_order_release);
        charge();
    }
    for (std::size_t at = begin; at < end;) {
        const std::size_t first = at % 64, count = std::min(64 - first, end - at);
        const std::uint64_t bits = (count == 64 ? ~0ull : (1ull << count) - 1) << first;
        __atomic_fetch_or(dead + at / 64, bits, __ATOMIC_RELAXED);
        at += count;
    }
}

void TokenLog::charge() {
    const std::size_t tokens = file_ ? size_ * sizeof(Token) : taken(size_ * sizeof(Token), capacity_ * sizeof(Token));
    charge_.set(tokens + (any_dead() ? taken(size_ / 8, dead_bytes()) : 0));
}

}  // namespace agentspec
