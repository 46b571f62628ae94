#include "drafting/workers.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace agentspec {
namespace {

constexpr int kSpin = 20;  // microseconds

using Task = std::function<void(std::size_t)>;

/// Items that threads take one by one.
class Batch {
public:
    Batch(std::size_t count, const Task& task) : count_(count), task_(task), failures_(count) {}

    void take() noexcept {
        for (std::size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
            try {
                task_(i);
            } catch (...) {
                failures_[i] = std::current_exception();
            }
        }
    }

    void rethrow() const {
        for (const std::exception_ptr& failure : failures_) {
            if (failure) std::rethrow_exception(failure);
        }
    }

    // Under the lock of the workers.
    std::size_t wanted = 0;  // workers that may still come
    std::atomic<std::size_t> present{0};  // workers that take items
    std::condition_variable left;

private:
    const std::size_t count_;
    const Task& task_;
    std::vector<std::exception_ptr> failures_;
    alignas(64) std::atomic<std::size_t> next_{0};
};

/// No signal is handled in a worker: a program's handlers expect threads of the program. Faults are not held back.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

/// Wait for what comes within an item's time, most often: to sleep and be woken takes as long.
template <class Condition>
void spin(Condition&& met) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(kSpin);
    while (!met() && std::chrono::steady_clock::now() < until) {
    }
}

class Workers {
public:
    /// Have up to `others` workers take items of `batch` beside this thread, and return when all items are done.
    void run(Batch& batch, std::size_t others) {
        invite(batch, others);
        batch.take();
        {
            const std::lock_guard lock(mutex_);
            std::erase(open_, &batch);
        }
        spin([&] { return batch.present == 0; });
        std::unique_lock lock(mutex_);
        batch.left.wait(lock, [&] { return batch.present == 0; });
    }

    void end() {
        std::vector<std::thread> threads;
        {
            const std::lock_guard lock(mutex_);
            ending_ = true;
            threads.swap(threads_);
        }
        wanted_.notify_all();
        for (std::thread& thread : threads) thread.join();
    }

private:
    void invite(Batch& batch, std::size_t others) {
        {
            const std::lock_guard lock(mutex_);
            start(others);
            batch.wanted = std::min(others, threads_.size());
            if (batch.wanted > 0) open_.push_back(&batch);
            others = batch.wanted;
        }
        for (; others > 0; --others) wanted_.notify_one();
    }

    /// Have `count` threads, or as many as are to be had.
    void start(std::size_t count) {
        if (ending_ || threads_.size() >= count) return;
        const SignalsBlocked blocked;
        try {
            while (threads_.size() < count) threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
            // No more threads are to be had: those there are do the work.
        }
    }

    void serve() {
        std::unique_lock lock(mutex_);
        while (true) {
            wanted_.wait(lock, [&] { return ending_ || !open_.empty(); });
            if (open_.empty()) return;
            Batch& batch = *open_.front();
            if (--batch.wanted == 0) open_.erase(open_.begin());
            ++batch.present;
            lock.unlock();
            batch.take();
            lock.lock();
            if (--batch.present == 0) batch.left.notify_one();  // under the lock: its end ends the batch
        }
    }

    std::mutex mutex_;
    std::condition_variable wanted_;
    std::vector<Batch*> open_;  // that want workers, the oldest first
    std::vector<std::thread> threads_;
    bool ending_ = false;
};

alignas(Workers) unsigned char storage[sizeof(Workers)];  // never destroyed: threads may draft while the process ends

Workers& workers() { return *std::launder(reinterpret_cast<Workers*>(storage)); }

/// The threads of the parent do not exist in a forked process, and its lock may never be free.
void begin_anew() { new (storage) Workers; }

[[maybe_unused]] const int begun = [] {
    begin_anew();
    return pthread_atfork(nullptr, nullptr, begin_anew);
}();

}  // namespace

void share_out(std::size_t count, std::size_t threads, const Task& task) {
    Batch batch(count, task);
    if (threads > 1) {
        workers().run(batch, threads - 1);
    } else {
        batch.take();
    }
    batch.rethrow();
}

void end_workers() { workers().end(); }

}  // namespace agentspec
