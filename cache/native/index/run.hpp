// Sorted runs: positions that never change, in memory of their own or in a mapped file, with a table over them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "index/account.hpp"
#include "index/run_table.hpp"
#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// Where the positions of a run lie. A merge fills it from the front, and gives it back from the front.
class RunStorage {
public:
    /// Positions that are there already.
    RunStorage(Positions positions, const std::shared_ptr<Account>& account);
    /// Positions in a mapped file.
    RunStorage(std::shared_ptr<const Mapping> file, std::span<const Position> positions,
               const std::shared_ptr<Account>& account);
    /// Room for `capacity` positions, which takes memory as it is filled.
    RunStorage(std::size_t capacity, const std::shared_ptr<Account>& account);
    ~RunStorage();
    RunStorage(const RunStorage&) = delete;
    RunStorage& operator=(const RunStorage&) = delete;

    const Position* data() const { return data_; }
    Position* room() { return room_; }
    bool is_mapped() const { return file_ != nullptr; }
    /// What `size` of the positions take, without others that are merged or given back.
    std::size_t bytes_of(std::size_t size) const { return (is_paged() ? size : capacity_) * sizeof(Position); }
    /// Count the first `size` positions as taken.
    void fill(std::size_t size);
    /// Nobody reads the positions before `end` any more.
    void give_back(std::size_t end);

private:
    bool is_paged() const { return file_ || capacity_ * sizeof(Position) >= kPagedBytes; }
    void charge();

    std::shared_ptr<const Mapping> file_;
    Positions owned_;
    Position* room_ = nullptr;
    const Position* data_;
    std::size_t capacity_, size_, given_back_ = 0;
    Charge charge_;
};

/// Part of a run: sorted positions at places first to last of a storage, the latter excluded. Its table, if any, counts
/// places from the storage's beginning.
class RunPart {
public:
    RunPart(std::shared_ptr<RunStorage> storage, std::size_t last, std::shared_ptr<const RunTable> table)
        : RunPart(std::move(storage), 0, last, std::move(table)) {}

    const Position* data() const { return storage_->data(); }
    const RunTable& table() const { return *table_; }
    std::uint32_t first() const { return static_cast<std::uint32_t>(first_); }
    std::uint32_t last() const { return static_cast<std::uint32_t>(last_); }
    std::size_t size() const { return last_ - first_; }
    std::span<const Position> positions() const { return {data() + first_, size()}; }
    std::size_t memory_bytes() const { return storage_->bytes_of(size()) + table_->charged_bytes(); }
    std::size_t mapped_bytes() const { return storage_->is_mapped() ? size() * sizeof(Position) : 0; }

    /// This part up to another place of its storage.
    RunPart until(std::size_t last, std::shared_ptr<const RunTable> table) const;
    /// This part without its first `count` places.
    RunPart behind(std::size_t count) const;
    /// `rest` takes the place of this part: what lies before it is given back when no part that holds it is left.
    void precede(const RunPart& rest) const;

private:
    /// What can be given back when nobody reads this part, nor any that began earlier. There is one for all parts that
    /// begin at a place of a storage, or those of an older snapshot would not keep what they read.
    struct Beginning {
        explicit Beginning(std::shared_ptr<RunStorage> from) : storage(std::move(from)) {}
        Beginning(const Beginning&) = delete;  // a copy that ends would give back what is still read
        Beginning& operator=(const Beginning&) = delete;
        ~Beginning() { storage->give_back(behind); }

        std::shared_ptr<RunStorage> storage;
        std::size_t behind = 0;
        std::shared_ptr<Beginning> next;
    };
    RunPart(std::shared_ptr<RunStorage> storage, std::size_t first, std::size_t last,
            std::shared_ptr<const RunTable> table)
        : storage_(std::move(storage)),
          beginning_(std::make_shared<Beginning>(storage_)),
          first_(first),
          last_(last),
          table_(std::move(table)) {}

    std::shared_ptr<RunStorage> storage_;
    std::shared_ptr<Beginning> beginning_;
    std::size_t first_, last_;
    std::shared_ptr<const RunTable> table_;
};

/// The positions of one stretch of the log: a single part or, while two runs are merged, what is merged already and
/// what is left of the two, each before the next in the order of contexts or of the log.
class Run {
public:
    /// One part. `positions` must not be empty.
    Run(LogView log, Positions positions, const std::shared_ptr<Account>& account);
    Run(LogView log, std::shared_ptr<const Mapping> file, std::span<const Position> positions,
        const std::shared_ptr<Account>& account);
    /// Several parts, in the stretch from `older` to `newer`, of which `dead` are known to be dead.
    Run(std::vector<RunPart> parts, Position oldest, Position newest, std::size_t dead);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    const std::vector<RunPart>& parts() const { return parts_; }
    /// The positions of a run of one part.
    std::span<const Position> positions() const { return parts_[0].positions(); }
    std::size_t size() const { return size_; }
    /// All positions lie between these two.
    Position oldest() const { return oldest_; }
    Position newest() const { return newest_; }
    std::size_t memory_bytes() const;
    std::size_t mapped_bytes() const;

    /// How many of the positions are of forgotten tokens.
    std::size_t dead() const { return dead_.load(std::memory_order_relaxed); }
    void count_dead(std::size_t more) const { dead_.fetch_add(more, std::memory_order_relaxed); }

private:
    std::vector<RunPart> parts_;
    std::size_t size_ = 0;
    Position oldest_ = 0, newest_ = 0;
    mutable std::atomic<std::size_t> dead_{0};
};

using Runs = std::vector<std::shared_ptr<const Run>>;  // by position: each is older than the next

}  // namespace agentspec
