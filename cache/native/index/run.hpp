// Sorted runs: positions that never change, in memory of their own or in a mapped file, with a table over them.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "index/run_table.hpp"
#include "index/sorted_run.hpp"
#include "storage/mapping.hpp"

namespace agentspec {

/// Where the positions of a run lie. Readers know how many of them are there.
class RunStorage {
public:
    /// In memory of their own. A merge adds to them, as far as their capacity goes.
    explicit RunStorage(Positions positions) : own_(std::move(positions)), data_(own_.data()) {}
    RunStorage(std::shared_ptr<const Mapping> file, const Position* positions)
        : file_(std::move(file)), data_(positions) {}

    const Position* data() const { return data_; }
    Positions& own() { return own_; }
    bool is_mapped() const { return file_ != nullptr; }
    /// What `size` of the positions take, without others that are merged or given back.
    std::size_t memory_bytes(std::size_t size) const { return file_ ? size * sizeof(Position) : bytes_of(own_, size); }
    /// Let the system have places of its own memory, which nobody reads any more.
    void give_back(std::size_t begin, std::size_t end) const {
        if (own_.capacity() * sizeof(Position) >= kPagedBytes) agentspec::give_back(data_ + begin, data_ + end);
    }

private:
    std::shared_ptr<const Mapping> file_;
    Positions own_;
    const Position* data_;
};

/// Part of a run: sorted positions at places first to last of a storage, the latter excluded. Its table, if any, counts
/// places from the storage's beginning.
class RunPart {
public:
    RunPart(std::shared_ptr<RunStorage> storage, std::size_t first, std::size_t last,
            std::shared_ptr<const RunTable> table)
        : storage_(std::move(storage)), first_(first), last_(last), table_(std::move(table)) {}

    const Position* data() const { return storage_->data(); }
    const RunTable& table() const { return *table_; }
    std::uint32_t first() const { return static_cast<std::uint32_t>(first_); }
    std::uint32_t last() const { return static_cast<std::uint32_t>(last_); }
    std::size_t size() const { return last_ - first_; }
    std::span<const Position> positions() const { return {data() + first_, size()}; }
    std::size_t memory_bytes() const { return storage_->memory_bytes(size()) + table_->memory_bytes(); }
    std::size_t mapped_bytes() const { return storage_->is_mapped() ? size() * sizeof(Position) : 0; }

    /// This part without its first `count` places.
    RunPart behind(std::size_t count) const { return {storage_, first_ + count, last_, table_}; }
    /// How many parts, copies included, are of the same storage.
    long sharers() const { return storage_.use_count(); }
    /// Nobody reads what the storage holds before this part: let the system have it.
    void give_back_before() const { storage_->give_back(0, first_); }

private:
    std::shared_ptr<RunStorage> storage_;
    std::size_t first_, last_;
    std::shared_ptr<const RunTable> table_;
};

/// The positions of one stretch of the log: a single part or, while two runs are merged, what is merged already and
/// what is left of the two, each before the next in the order of contexts or of the log.
class Run {
public:
    /// One part: the first `size` positions of a storage, of which there is at least one.
    Run(LogView log, std::size_t size, std::shared_ptr<RunStorage> storage);
    Run(LogView log, Positions positions);
    /// Several parts, in the stretch from `oldest` to `newest`.
    Run(std::vector<RunPart> parts, Position oldest, Position newest);
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
