// Running without the interpreter's lock, and ending that before the interpreter ends.
#pragma once

#include <Python.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace agentspec {

/// Releases the interpreter's lock for a scope, until `quiesce` was called.
///
/// A daemon thread that asked for the lock while the interpreter ends would be unwound through C++ frames that cannot
/// be, which aborts the process.
class Released {
public:
    Released() {
        if (ending().load()) return;
        ++running();
        state_ = PyEval_SaveThread();
    }

    ~Released() {
        if (state_ == nullptr) return;
        PyEval_RestoreThread(state_);
        --running();
    }

    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

    /// In a forked process the threads that were inside a scope do not exist. Called once, when the module is loaded.
    static void forget_at_fork() {
        pthread_atfork(nullptr, nullptr, [] { running() = 0; });
    }

    /// Waits until no thread is inside a scope; from then on scopes keep the lock. The caller holds the lock.
    static void quiesce() {
        ending() = true;
        while (running().load() > 0) {
            PyThreadState* state = PyEval_SaveThread();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            PyEval_RestoreThread(state);
        }
    }

private:
    static std::atomic<bool>& ending() {
        static std::atomic<bool> value{false};
        return value;
    }

    static std::atomic<int>& running() {
        static std::atomic<int> value{0};
        return value;
    }

    PyThreadState* state_ = nullptr;
};

}  // namespace agentspec
