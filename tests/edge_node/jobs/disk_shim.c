/* Preloaded into a process that commits jobs: numbers the operations on its database file and on its notes, records them
   for a power cut, kills the process before one of them or at a commit boundary, or lets the disk be full from one on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[4096];
static long count, kill_at = -1, full_from = -1, full_until = -1;
static long boundary, kill_boundary = -1; /* each sync has two: before it, and before the operation after it */
static int synced;
static int log_fd = -1;

/* Operations on files of `path` count from now on. Numbers below 0: never. */
void shim_arm(const char *path, long kill, long at_boundary, long full, long room, int log) {
    snprintf(folder, sizeof folder, "%s", path);
    boundary = synced = 0, kill_boundary = at_boundary;
    count = 0, kill_at = kill, full_from = full, full_until = room, log_fd = log;
}

/* A process with SHIM_FOLDER records from its start, into SHIM_LOG with its id. */
__attribute__((constructor)) static void record_all(void) {
    char log[4096];
    if (!getenv("SHIM_FOLDER")) return;
    snprintf(log, sizeof log, "%s.%d", getenv("SHIM_LOG"), getpid());
    shim_arm(getenv("SHIM_FOLDER"), -1, -1, -1, -1, open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
}

static void pass_boundary(void) {
    if (boundary++ == kill_boundary) kill(getpid(), SIGKILL);
}

static void record(char op, const char *name, long offset, const void *data, long size) {
    struct __attribute__((packed)) { char op; int name; long offset, size; } head = {op, (int)strlen(name), offset, size};
    syscall(SYS_write, log_fd, &head, sizeof head);
    syscall(SYS_write, log_fd, name, head.name);
    if (size > 0) syscall(SYS_write, log_fd, data, size);
}

/* Whether the disk has room for the operation. */
static int before(char op, const char *path, long offset, const void *data, long size) {
    size_t length = strlen(folder);
    if (!length || strncmp(path, folder, length) || strstr(path, "-shm")) return 1;
    const char *name = path[length] == '/' ? path + length + 1 : "";
    pthread_mutex_lock(&lock);
    if (count == kill_at) kill(getpid(), SIGKILL);
    if (synced) pass_boundary();
    synced = op == 's';
    if (synced) pass_boundary();
    int room = op != 'w' || !strcmp(name, "notes") || full_from < 0 || count < full_from || count >= full_until;
    count++;
    if (log_fd >= 0) record(op, name, offset, data, size);
    pthread_mutex_unlock(&lock);
    if (!room) errno = ENOSPC;
    return room;
}

static int before_fd(char op, int fd, long offset, const void *data, long size) {
    char link[64], path[4096];
    if (!folder[0]) return 1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 1;
    path[length] = 0;
    return before(op, path, offset, data, size);
}

#define REAL(name) static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    return before_fd('w', fd, offset, data, size) ? real(fd, data, size, offset) : -1;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    return before_fd('w', fd, offset, data, size) ? real(fd, data, size, offset) : -1;
}
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return before_fd('w', fd, -1, data, size) ? real(fd, data, size) : -1;
}
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); before_fd('t', fd, size, "", 0); return real(fd, size); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); before_fd('t', fd, size, "", 0); return real(fd, size); }
int fsync(int fd) { REAL(fsync); before_fd('s', fd, 0, "", 0); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); before_fd('s', fd, 0, "", 0); return real(fd); }
int unlink(const char *path) { REAL(unlink); before('u', path, 0, "", 0); return real(path); }
