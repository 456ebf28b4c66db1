/* The sockets of gloo's connections: see dm_gloo_sockets.h.
 *
 * One list for the process, guarded by `lock`, which a fork takes too: the child finds
 * the list whole and closes what is in it with plain system calls.
 */
#include "backend/gloo/dm_gloo_sockets.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/dm_alloc.h"

typedef struct end {
    sa_family_t family;
    in_port_t port;
    struct in6_addr address; /* IPv4: its first four bytes */
} end;

typedef struct entry {
    const void *group;
    int fd;
    end self;
    end peer;
    struct entry *next;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry *entries; /* guarded by lock */

static bool
same_end(const end *a, const end *b)
{
    return a->family == b->family && a->port == b->port &&
           memcmp(&a->address, &b->address, sizeof(a->address)) == 0;
}

static bool
read_end(const void *address, size_t size, end *out)
{
    memset(out, 0, sizeof(*out));
    struct sockaddr_storage storage = {0};
    memcpy(&storage, address, size < sizeof(storage) ? size : sizeof(storage));
    out->family = storage.ss_family;
    if (out->family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, &storage, sizeof(in));
        out->port = in.sin_port;
        memcpy(&out->address, &in.sin_addr, sizeof(in.sin_addr));
        return true;
    }
    if (out->family == AF_INET6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, &storage, sizeof(in6));
        out->port = in6.sin6_port;
        out->address = in6.sin6_addr;
        return true;
    }
    return false;
}

/* The two ends of a connected socket; false for anything else. */
static bool
read_socket(int fd, end *self, end *peer)
{
    struct sockaddr_storage a, b;
    socklen_t a_size = sizeof(a), b_size = sizeof(b);
    return getsockname(fd, (struct sockaddr *)&a, &a_size) == 0 &&
           getpeername(fd, (struct sockaddr *)&b, &b_size) == 0 &&
           read_end(&a, a_size, self) && read_end(&b, b_size, peer);
}

/* --- forks ---------------------------------------------------------------------------- */

static void
before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void
in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void
in_child(void)
{
    /* The list is left as it is: it was made for another process, and freeing is not for
     * a child of many threads. */
    for (const entry *e = entries; e != NULL; e = e->next) {
        end self, peer;
        if (read_socket(e->fd, &self, &peer) && same_end(&self, &e->self) &&
            same_end(&peer, &e->peer)) {
            close(e->fd);
        }
    }
    entries = NULL;
    pthread_mutex_unlock(&lock);
}

static void
watch_forks(void)
{
    (void)pthread_atfork(before_fork, in_parent, in_child);
}

/* --- notes ------------------------------------------------------------------------------ */

static void
note_if_ours(const void *group, int fd, const end *mine, const end *theirs, size_t n)
{
    end self, peer;
    if (!read_socket(fd, &self, &peer)) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        /* A port that listened for one peer has taken one connection; a port of a
         * peer's that listened for us likewise. */
        if (!same_end(&self, &mine[i]) && !same_end(&peer, &theirs[i])) {
            continue;
        }
        entry *note = dm_malloc_array(1, sizeof(*note));
        if (note == NULL) {
            return;
        }
        *note = (entry){group, fd, self, peer, entries};
        (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
        entries = note;
        return;
    }
}

void
dm_gloo_sockets_note(const void *group, const void *mine, const void *theirs, size_t n,
                     size_t size)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);

    end *ends = dm_calloc(2 * n, sizeof(*ends));
    DIR *folder = opendir("/proc/self/fd");
    if (ends != NULL && folder != NULL) {
        for (size_t i = 0; i < n; i++) {
            (void)read_end((const char *)mine + i * size, size, &ends[i]);
            (void)read_end((const char *)theirs + i * size, size, &ends[n + i]);
        }
        pthread_mutex_lock(&lock);
        for (struct dirent *e; (e = readdir(folder)) != NULL;) {
            if (e->d_name[0] != '.') {
                note_if_ours(group, atoi(e->d_name), ends, ends + n, n);
            }
        }
        pthread_mutex_unlock(&lock);
    }
    if (folder != NULL) {
        closedir(folder);
    }
    dm_free(ends);
}

void
dm_gloo_sockets_forget(const void *group)
{
    pthread_mutex_lock(&lock);
    for (entry **at = &entries; *at != NULL;) {
        entry *e = *at;
        if (e->group == group) {
            *at = e->next;
            dm_free(e);
        }
        else {
            at = &e->next;
        }
    }
    pthread_mutex_unlock(&lock);
}
