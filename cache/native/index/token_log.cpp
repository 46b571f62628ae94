#include "index/token_log.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace agentspec {
namespace {

constexpr std::size_t kHeapBytes = 2 * kPagedBytes;  // arrays up to this size come from the heap
constexpr std::size_t kMedium = std::size_t{1} << 26;     // tokens that most logs never exceed
const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
const std::size_t kPageTokens = kPage / sizeof(Token);
const std::size_t kMarked = 8 * sizeof(Token);  // pages of tokens whose marks, a bit each, fill a page

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

/// Give whole pages back to the system, but keep their addresses, which read as zeros.
void empty(void* pages, std::size_t bytes) {
#ifdef __linux__
    madvise(pages, bytes, MADV_DONTNEED);
#else
    madvise(pages, bytes, MADV_FREE);
#endif
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
    const std::size_t pages = (size_ + kPageTokens - 1) / kPageTokens;
    for (std::size_t page = 0, next; page < pages; page = next) {
        next = alike(page, pages);
        const std::size_t begin = page * kPageTokens, end = std::min(size_, next * kPageTokens);
        if (is_gone(page)) {
            larger->size_ = end;
            larger->let_go(page, next);
        } else {
            larger->append({data_ + begin, end - begin});
        }
    }
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

bool TokenLog::can_discard() const { return !file_ && capacity_ * sizeof(Token) > kHeapBytes; }

void TokenLog::discard(std::size_t begin, std::size_t end) {
    if (!can_discard()) return;
    const std::size_t last = end / kPageTokens;
    for (std::size_t page = (begin + kPageTokens - 1) / kPageTokens, next; page < last; page = next) {
        next = alike(page, last);
        if (is_gone(page)) continue;
        empty(data_ + page * kPageTokens, (next - page) * kPage);
        let_go(page, next);
    }
    charge();
}

/// The end of the pages from this one on that are all gone, or all there.
std::size_t TokenLog::alike(std::size_t page, std::size_t last) const {
    const bool gone = is_gone(page);
    while (++page < last && is_gone(page) == gone) {
    }
    return page;
}

/// Note that pages are gone. The marks of many pages lie in a page of their own, which then goes, too.
void TokenLog::let_go(std::size_t first, std::size_t last) {
    gone_.resize(std::max(gone_.size(), last));
    std::fill(gone_.begin() + first, gone_.begin() + last, true);
    discarded_ += (last - first) * kPageTokens;
    for (std::size_t marks = first / kMarked; marks * kMarked < last; ++marks) {
        if (!is_gone(marks * kMarked) || alike(marks * kMarked, (marks + 1) * kMarked) < (marks + 1) * kMarked)
            continue;
        gone_marks_ += kPage;
        if (std::uint64_t* dead = dead_.load(); dead && dead_bytes() > kHeapBytes) {
            empty(reinterpret_cast<std::byte*>(dead) + marks * kPage, kPage);
        }
    }
}

void TokenLog::charge() {
    std::size_t tokens = file_ ? size_ * sizeof(Token) : taken(size_ * sizeof(Token), capacity_ * sizeof(Token));
    tokens -= discarded_ * sizeof(Token);
    const std::size_t marks = any_dead() ? taken(size_ / 8, dead_bytes()) : 0;
    charge_.set(tokens + marks - (marks > 0 && dead_bytes() > kHeapBytes ? gone_marks_ : 0));
}

}  // namespace agentspec
