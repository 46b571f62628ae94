/* Preloaded into a process, it makes calls on the cache's files fail: all writes with ENOSPC while the file $FAULT_FULL
   exists, all syncs with EIO while $FAULT_SYNC exists, and the $FAULT_AT-th call of any kind with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls;

static int exists(const char *variable) {
    const char *path = getenv(variable);
    return path && access(path, F_OK) == 0;
}

static int ours(const char *path) { return strstr(path, "sequences.sqlite3") != NULL; }

static int is_state(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && (path[length] = 0, strstr(path, "state.sqlite3") != NULL);
}

static int ours_open(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return ours(path);
}

/* The count since the last time it was asked for. */
long fault_calls(void) { return atomic_exchange(&calls, 0); }

static int nth(void) {
    const char *at = getenv("FAULT_AT");
    return at && atomic_fetch_add(&calls, 1) + 1 == atol(at);
}

static ssize_t write_at(const char *name, int file, const void *data, size_t size, off_t at) {
    ssize_t (*next)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, name);
    if (exists("FAULT_FULL") && is_state(file)) return errno = ENOSPC, -1;
    if (ours_open(file)) {
        if (exists("FAULT_FULL")) return errno = ENOSPC, -1;
        if (nth()) return errno = EIO, -1;
    }
    return next(file, data, size, at);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return write_at("pwrite", file, data, size, at); }

ssize_t pwrite64(int file, const void *data, size_t size, off_t at) {
    return write_at("pwrite64", file, data, size, at);
}

static int sync_file(const char *name, int file) {
    int (*next)(int) = dlsym(RTLD_NEXT, name);
    if (ours_open(file) && (exists("FAULT_SYNC") || nth())) return errno = EIO, -1;
    return next(file);
}

int fsync(int file) { return sync_file("fsync", file); }

int fdatasync(int file) { return sync_file("fdatasync", file); }

static int truncate_file(const char *name, int file, off_t size) {
    int (*next)(int, off_t) = dlsym(RTLD_NEXT, name);
    if (ours_open(file) && nth()) return errno = EIO, -1;
    return next(file, size);
}

int ftruncate(int file, off_t size) { return truncate_file("ftruncate", file, size); }

int ftruncate64(int file, off_t size) { return truncate_file("ftruncate64", file, size); }

static int open_file(const char *name, const char *path, int flags, mode_t mode) {
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (ours(path) && nth()) return errno = EIO, -1;
    return next(path, flags, mode);
}

#define OPEN(name)                                        \
    int name(const char *path, int flags, ...) {          \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        const mode_t mode = va_arg(rest, unsigned);       \
        va_end(rest);                                     \
        return open_file(#name, path, flags, mode);       \
    }

OPEN(open)
OPEN(open64)
