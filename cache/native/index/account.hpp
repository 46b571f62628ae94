// Bytes counted where they are taken and where they are given back, so that copies in passing are counted too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace agentspec {

/// The bytes that the parts of one index take.
class Account {
public:
    void add(std::int64_t bytes) {
        const std::int64_t now = bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
        for (std::int64_t most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
        }
    }
    /// The most there were at a time.
    std::size_t most() const { return static_cast<std::size_t>(most_.load(std::memory_order_relaxed)); }
    std::size_t bytes() const { return static_cast<std::size_t>(bytes_.load(std::memory_order_relaxed)); }

private:
    std::atomic<std::int64_t> bytes_{0}, most_{0};
};

/// Bytes on an account for as long as this object lives.
class Charge {
public:
    Charge(std::shared_ptr<Account> account, std::size_t bytes) : account_(std::move(account)) { set(bytes); }
    ~Charge() { set(0); }
    Charge(const Charge&) = delete;
    Charge& operator=(const Charge&) = delete;

    void set(std::size_t bytes) {
        if (bytes == bytes_) return;
        account_->add(static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(bytes_.exchange(bytes)));
    }
    std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

private:
    std::shared_ptr<Account> account_;
    std::atomic<std::size_t> bytes_{0};
};

}  // namespace agentspec
