#include "index/run.hpp"

#include <sys/mman.h>

#include <cstdint>

namespace agentspec {
namespace {

constexpr std::size_t kLargestPage = 1 << 14;  // a multiple of the pages of all systems

/// Give pages back to the system, but keep their addresses.
void discard(std::uintptr_t begin, std::uintptr_t end) {
    if (begin >= end) return;
    mmap(reinterpret_cast<void*>(begin), end - begin, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1,
         0);
}

}  // namespace

RunStorage::RunStorage(Positions positions, const std::shared_ptr<Account>& account)
    : owned_(std::move(positions)),
      data_(owned_.data()),
      capacity_(owned_.capacity()),
      size_(capacity_),
      charge_(account, 0) {
    charge();
}

RunStorage::RunStorage(std::shared_ptr<const Mapping> file, std::span<const Position> positions,
                       const std::shared_ptr<Account>& account)
    : file_(std::move(file)),
      data_(positions.data()),
      capacity_(positions.size()),
      size_(capacity_),
      charge_(account, 0) {
    charge();
}

RunStorage::RunStorage(std::size_t capacity, const std::shared_ptr<Account>& account)
    : room_(PageAllocator<Position>().allocate(capacity)),
      data_(room_),
      capacity_(capacity),
      size_(0),
      charge_(account, 0) {}

RunStorage::~RunStorage() {
    if (room_) PageAllocator<Position>().deallocate(room_, capacity_);
}

void RunStorage::fill(std::size_t size) {
    size_ = size;
    charge();
}

void RunStorage::give_back(std::size_t end) {
    if (end <= given_back_) return;
    if (!file_ && is_paged()) {
        const auto page = [&](std::size_t place) {
            const auto address = reinterpret_cast<std::uintptr_t>(data_ + place);
            return std::max(reinterpret_cast<std::uintptr_t>(data_), address / kLargestPage * kLargestPage);
        };
        discard(page(given_back_), page(end));
    }
    given_back_ = end;
    charge();
}

void RunStorage::charge() { charge_.set(bytes_of(size_ - given_back_)); }

RunPart RunPart::until(std::size_t last, std::shared_ptr<const RunTable> table) const {
    RunPart other(*this);
    other.last_ = last;
    other.table_ = std::move(table);
    return other;
}

RunPart RunPart::behind(std::size_t count) const { return RunPart(storage_, first_ + count, last_, table_); }

void RunPart::precede(const RunPart& rest) const {
    beginning_->behind = rest.first_;
    beginning_->next = rest.beginning_;
}

Run::Run(LogView log, Positions positions, const std::shared_ptr<Account>& account) {
    const auto [oldest, newest] = std::minmax_element(positions.begin(), positions.end());
    oldest_ = *oldest;
    newest_ = *newest;
    size_ = positions.size();
    const auto table = RunTable::over(log, positions, account);
    parts_.emplace_back(std::make_shared<RunStorage>(std::move(positions), account), size_, table);
}

Run::Run(LogView log, std::shared_ptr<const Mapping> file, std::span<const Position> positions,
         const std::shared_ptr<Account>& account)
    : size_(positions.size()) {
    const auto [oldest, newest] = std::minmax_element(positions.begin(), positions.end());
    oldest_ = *oldest;
    newest_ = *newest;
    const auto table = RunTable::over(log, positions, account);
    parts_.emplace_back(std::make_shared<RunStorage>(std::move(file), positions, account), size_, table);
}

Run::Run(std::vector<RunPart> parts, Position oldest, Position newest, std::size_t dead)
    : parts_(std::move(parts)), oldest_(oldest), newest_(newest), dead_(dead) {
    for (const RunPart& part : parts_) size_ += part.size();
}

std::size_t Run::memory_bytes() const {
    std::size_t total = 0;
    for (const RunPart& part : parts_) total += part.memory_bytes();
    return total;
}

std::size_t Run::mapped_bytes() const {
    std::size_t total = 0;
    for (const RunPart& part : parts_) total += part.mapped_bytes();
    return total;
}

}  // namespace agentspec
