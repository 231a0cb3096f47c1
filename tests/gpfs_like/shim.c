/* Preloaded: what lies below $SHIM_PREFIX is on a file system of the number
 * $SHIM_MAGIC with blocks of $SHIM_BLOCK bytes, as statfs(2) and stat(2) tell; every
 * pwrite(2) there is a line "offset length path" in $SHIM_LOG.
 * It stands for GPFS in that st_blksize is the block, and the number is GPFS's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

static int is_below(const char *path)
{
    const char *prefix = getenv("SHIM_PREFIX");
    char real[PATH_MAX];

    return prefix && realpath(path, real) && !strncmp(real, prefix, strlen(prefix));
}

static long setting(const char *name)
{
    return strtol(getenv(name), NULL, 0);
}

#define STATFS(name, type)                                                       \
    int name(const char *path, struct type *answer)                              \
    {                                                                            \
        int (*real)(const char *, struct type *) = dlsym(RTLD_NEXT, #name);      \
        int failed = real(path, answer);                                         \
                                                                                 \
        if (!failed && is_below(path))                                           \
            answer->f_type = setting("SHIM_MAGIC");                              \
        return failed;                                                           \
    }
STATFS(statfs, statfs)
STATFS(statfs64, statfs64)

#define STAT(name, type)                                                         \
    int name(const char *path, struct type *answer)                              \
    {                                                                            \
        int (*real)(const char *, struct type *) = dlsym(RTLD_NEXT, #name);      \
        int failed = real(path, answer);                                         \
                                                                                 \
        if (!failed && is_below(path))                                           \
            answer->st_blksize = setting("SHIM_BLOCK");                          \
        return failed;                                                           \
    }
STAT(stat, stat)
STAT(stat64, stat64)

/* As glibc before 2.33 has it. */
#define OLD_STAT(name, type)                                                     \
    int name(int version, const char *path, struct type *answer)                 \
    {                                                                            \
        int (*real)(int, const char *, struct type *) = dlsym(RTLD_NEXT, #name); \
        int failed = real(version, path, answer);                                \
                                                                                 \
        if (!failed && is_below(path))                                           \
            answer->st_blksize = setting("SHIM_BLOCK");                          \
        return failed;                                                           \
    }
OLD_STAT(__xstat, stat)
OLD_STAT(__xstat64, stat64)

static void note(int descriptor, size_t length, long long offset)
{
    char link[64], path[PATH_MAX], line[PATH_MAX + 64];
    ssize_t n;
    int log;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
    n = readlink(link, path, sizeof(path) - 1);
    if (n < 0)
        return;
    path[n] = 0;
    if (!is_below(path))
        return;
    n = snprintf(line, sizeof(line), "%lld %zu %s\n", offset, length, path);
    log = open(getenv("SHIM_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (write(log, line, n) != n)
        abort();
    close(log);
}

#define PWRITE(name, off_type)                                                   \
    ssize_t name(int descriptor, const void *bytes, size_t n, off_type offset)   \
    {                                                                            \
        ssize_t (*real)(int, const void *, size_t, off_type) =                   \
            dlsym(RTLD_NEXT, #name);                                             \
                                                                                 \
        note(descriptor, n, offset);                                             \
        return real(descriptor, bytes, n, offset);                               \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
