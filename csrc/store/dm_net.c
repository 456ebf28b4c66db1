/* Sockets with deadlines: see dm_net.h. */
#include "store/dm_net.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/dm_alloc.h"

enum {
    BACKLOG = 65535,
    KEEPALIVE_IDLE_S = 30, /* a peer whose machine is gone is noticed in a minute */
    KEEPALIVE_INTERVAL_S = 10,
    KEEPALIVE_COUNT = 3,
    ATTEMPT_LIMIT_S = 5, /* for one of several addresses */
    REASON_SIZE = 128,
};

/* What an errno means; `text` may or may not be used. */
static const char *
why(int error, char text[REASON_SIZE])
{
    return strerror_r(error, text, REASON_SIZE); /* GNU's, which returns the text */
}

/* --- addresses ------------------------------------------------------------------------- */

static void
set_port(dm_net_address *address, uint16_t port)
{
    if (address->data.ss_family == AF_INET) {
        ((struct sockaddr_in *)&address->data)->sin_port = htons(port);
    }
    else {
        ((struct sockaddr_in6 *)&address->data)->sin6_port = htons(port);
    }
}

static int
copy_addresses(const struct addrinfo *list, uint16_t port,
               dm_net_address addresses[DM_NET_MAX_ADDRESSES])
{
    int n = 0;
    for (; list != NULL && n < DM_NET_MAX_ADDRESSES; list = list->ai_next) {
        if (list->ai_family != AF_INET && list->ai_family != AF_INET6) {
            continue;
        }
        memset(&addresses[n], 0, sizeof(addresses[n]));
        memcpy(&addresses[n].data, list->ai_addr, list->ai_addrlen);
        addresses[n].size = list->ai_addrlen;
        set_port(&addresses[n], port);
        n++;
    }
    return n;
}

/* "10.0.0.1:29500" or "[::1]:29500". */
static void
format_address(const dm_net_address *address, char *text, size_t size)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (address->data.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&address->data;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof(host));
        snprintf(text, size, "%s:%u", host, ntohs(in->sin_port));
    }
    else {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&address->data;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof(host));
        snprintf(text, size, "[%s]:%u", host, ntohs(in6->sin6_port));
    }
}

static int
look_up(const char *host, int flags, struct addrinfo **list)
{
    struct addrinfo hints = {.ai_flags = flags, .ai_socktype = SOCK_STREAM};
    return getaddrinfo(host, NULL, &hints, list);
}

/* A look-up on its own thread. Two owners: the asking and the looking thread. */
typedef struct lookup {
    atomic_int owners;
    pthread_mutex_t mutex;
    pthread_cond_t done_cond;
    bool done;
    int rc;
    int error; /* errno for EAI_SYSTEM */
    struct addrinfo *list;
    char host[DM_NET_HOST_MAX];
} lookup;

static void
lookup_release(lookup *self)
{
    /* acq_rel: what the other owner wrote is seen by the one that frees. */
    if (atomic_fetch_sub_explicit(&self->owners, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (self->list != NULL) {
        freeaddrinfo(self->list);
    }
    pthread_cond_destroy(&self->done_cond);
    pthread_mutex_destroy(&self->mutex);
    dm_free(self);
}

static void *
lookup_run(void *arg)
{
    lookup *self = arg;
    struct addrinfo *list = NULL;
    int rc = look_up(self->host, AI_ADDRCONFIG, &list);
    int error = errno;
    pthread_mutex_lock(&self->mutex);
    self->rc = rc;
    self->error = error;
    self->list = rc == 0 ? list : NULL;
    self->done = true;
    pthread_cond_signal(&self->done_cond);
    pthread_mutex_unlock(&self->mutex);
    lookup_release(self);
    return NULL;
}

static dm_status
lookup_start(const char *host, lookup **out, dm_error *err)
{
    lookup *self = dm_calloc(1, sizeof(*self));
    if (self == NULL) {
        return dm_error_set_no_memory(err, "a name look-up");
    }
    atomic_init(&self->owners, 2);
    snprintf(self->host, sizeof(self->host), "%s", host);
    pthread_mutex_init(&self->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self->done_cond, &monotonic);
    pthread_condattr_destroy(&monotonic);

    /* Signals are for the threads of the program. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int rc = pthread_create(&thread, NULL, lookup_run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        lookup_release(self);
        lookup_release(self);
        return dm_error_set_errno(err, rc, "starting a thread to look up '%s'", host);
    }
    pthread_detach(thread);
    *out = self;
    return DM_OK;
}

static dm_status
lookup_wait(lookup *self, const dm_wait *wait, dm_error *err)
{
    dm_status status = DM_OK;
    pthread_mutex_lock(&self->mutex);
    while (!self->done && status == DM_OK) {
        pthread_mutex_unlock(&self->mutex);
        status = dm_wait_poll(wait, err);
        int64_t until = dm_clock_now() + dm_wait_slice(wait);
        struct timespec ts = {until / DM_NS_PER_S, until % DM_NS_PER_S};
        pthread_mutex_lock(&self->mutex);
        int rc = 0;
        while (!self->done && status == DM_OK && rc == 0) {
            rc = pthread_cond_timedwait(&self->done_cond, &self->mutex, &ts);
        }
    }
    if (self->done) {
        status = DM_OK;
    }
    pthread_mutex_unlock(&self->mutex);
    return status;
}

static dm_status
lookup_failed(const char *host, int rc, int error, dm_error *err)
{
    if (rc == EAI_MEMORY) {
        return dm_error_set_no_memory(err, "a name look-up");
    }
    if (rc == EAI_SYSTEM) {
        return dm_error_set_native(err, DM_ERR_CONNECTION, error,
                                   "cannot look up host '%s': %s", host,
                                   why(error, (char[REASON_SIZE]){0}));
    }
    return dm_error_set_native(err, DM_ERR_CONNECTION, EHOSTUNREACH,
                               "cannot look up host '%s': %s", host, gai_strerror(rc));
}

static int
loopback(uint16_t port, dm_net_address addresses[DM_NET_MAX_ADDRESSES])
{
    memset(addresses, 0, 2 * sizeof(*addresses));
    struct sockaddr_in *in = (struct sockaddr_in *)&addresses[0].data;
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    addresses[0].size = sizeof(*in);
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&addresses[1].data;
    in6->sin6_family = AF_INET6;
    in6->sin6_addr = in6addr_loopback;
    addresses[1].size = sizeof(*in6);
    set_port(&addresses[0], port);
    set_port(&addresses[1], port);
    return 2;
}

dm_status
dm_net_resolve(const char *host, uint16_t port, const dm_wait *wait,
               dm_net_address addresses[DM_NET_MAX_ADDRESSES], int *n, dm_error *err)
{
    char name[DM_NET_HOST_MAX];
    size_t size = strlen(host);
    if (size >= 2 && host[0] == '[' && host[size - 1] == ']') {
        host++;
        size -= 2;
    }
    if (size == 0 || size >= sizeof(name)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "host '%.64s' is %s: an address or a name of at most %d "
                            "bytes is needed",
                            host, size == 0 ? "empty" : "too long",
                            DM_NET_HOST_MAX - 1);
    }
    memcpy(name, host, size);
    name[size] = '\0';

    struct addrinfo *list;
    if (look_up(name, AI_NUMERICHOST, &list) == 0) {
        *n = copy_addresses(list, port, addresses);
        freeaddrinfo(list);
        return DM_OK;
    }
    if (strcasecmp(name, "localhost") == 0) {
        *n = loopback(port, addresses);
        return DM_OK;
    }

    lookup *self = NULL;
    DM_TRY(lookup_start(name, &self, err));
    dm_status status = lookup_wait(self, wait, err);
    if (status == DM_ERR_TIMEOUT) {
        dm_error_set(err, status, "timed out looking up host '%s'", name);
    }
    else if (status == DM_OK && self->rc != 0) {
        status = lookup_failed(name, self->rc, self->error, err);
    }
    else if (status == DM_OK) {
        *n = copy_addresses(self->list, port, addresses);
        if (*n == 0) {
            status = lookup_failed(name, EAI_FAMILY, 0, err);
        }
    }
    lookup_release(self);
    return status;
}

/* --- connect ----------------------------------------------------------------------------- */

static void
set_option(int fd, int level, int name, int value)
{
    (void)setsockopt(fd, level, name, &value, sizeof(value));
}

void
dm_net_tune(int fd)
{
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_COUNT);
}

/* Waits until one of `events` (or an error) is there. */
static dm_status
wait_ready(int fd, short events, const dm_wait *wait, dm_error *err)
{
    for (;;) {
        DM_TRY(dm_wait_poll(wait, err));
        struct pollfd item = {.fd = fd, .events = events};
        int rc = poll(&item, 1, dm_wait_slice_ms(wait));
        if (rc > 0) {
            return DM_OK;
        }
        if (rc < 0 && errno != EINTR) {
            return dm_error_set_errno(err, errno, "poll");
        }
    }
}

/* On loopback, a client that tries a free port over and over can meet itself. */
static bool
met_itself(int fd)
{
    dm_net_address here = {.size = sizeof(here.data)};
    dm_net_address there = {.size = sizeof(there.data)};
    return getsockname(fd, (struct sockaddr *)&here.data, &here.size) == 0 &&
           getpeername(fd, (struct sockaddr *)&there.data, &there.size) == 0 &&
           here.size == there.size && memcmp(&here.data, &there.data, here.size) == 0;
}

static dm_status
not_connected(const dm_net_address *address, int error, dm_error *err)
{
    char text[INET6_ADDRSTRLEN + 16];
    format_address(address, text, sizeof(text));
    return dm_error_set_native(err, DM_ERR_CONNECTION, error,
                               "cannot connect to %s: %s", text,
                               why(error, (char[REASON_SIZE]){0}));
}

static dm_status
connect_one(const dm_net_address *address, const dm_wait *wait, int *out, dm_error *err)
{
    int fd =
        socket(address->data.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno == EAFNOSUPPORT ? not_connected(address, errno, err)
                                     : dm_error_set_errno(err, errno, "socket");
    }
    dm_net_tune(fd);
    dm_status status = DM_OK;
    int error = 0;
    if (connect(fd, (const struct sockaddr *)&address->data, address->size) != 0) {
        error = errno;
    }
    if (error == EINPROGRESS || error == EINTR) {
        DM_TRY_GOTO(status, wait_ready(fd, POLLOUT, wait, err), close_fd);
        socklen_t size = sizeof(error);
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
            error = errno;
        }
    }
    if (error == 0 && met_itself(fd)) {
        error = ECONNREFUSED;
    }
    if (error != 0) {
        status = not_connected(address, error, err);
        goto close_fd;
    }
    *out = fd;
    return DM_OK;

close_fd:
    close(fd);
    return status;
}

dm_status
dm_net_connect(const dm_net_address *addresses, int n, const dm_wait *wait, int *fd,
               dm_error *err)
{
    assert(n > 0);
    dm_status status = DM_OK;
    for (int i = 0; i < n; i++) {
        /* One dead address of several must not eat the whole time. */
        dm_wait attempt = *wait;
        int64_t limit = dm_clock_deadline(ATTEMPT_LIMIT_S * DM_NS_PER_S);
        bool limited = n > 1 && limit < wait->deadline;
        if (limited) {
            attempt.deadline = limit;
        }
        status = connect_one(&addresses[i], &attempt, fd, err);
        if (status == DM_ERR_TIMEOUT && limited) {
            status = not_connected(&addresses[i], ETIMEDOUT, err);
        }
        if (status != DM_ERR_CONNECTION) {
            return status;
        }
    }
    return status;
}

bool
dm_net_may_retry(const dm_error *err)
{
    if (err->status != DM_ERR_CONNECTION) {
        return false;
    }
    switch (err->native) {
    case EACCES:
    case EPERM:
    case EAFNOSUPPORT:
        return false;
    default:
        return true;
    }
}

dm_status
dm_net_sleep(int64_t ns, const dm_wait *wait, dm_error *err)
{
    int64_t end = dm_clock_deadline(ns);
    for (;;) {
        DM_TRY(dm_wait_poll(wait, err));
        int64_t left = dm_clock_left(end);
        if (left == 0) {
            return DM_OK;
        }
        int64_t slice = dm_wait_slice(wait);
        slice = slice < left ? slice : left;
        struct timespec ts = {slice / DM_NS_PER_S, slice % DM_NS_PER_S};
        nanosleep(&ts, NULL);
    }
}

/* --- listen ------------------------------------------------------------------------------- */

static int
listen_one(const dm_net_address *address, int *out)
{
    int fd =
        socket(address->data.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno;
    }
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (bind(fd, (const struct sockaddr *)&address->data, address->size) != 0 ||
        listen(fd, BACKLOG) != 0) {
        int error = errno;
        close(fd);
        return error;
    }
    *out = fd;
    return 0;
}

static bool
is_loopback(const dm_net_address *address)
{
    if (address->data.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)&address->data;
        return (ntohl(in->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
    }
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&address->data;
    return IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
}

/* This machine's own name, with or without its domain. */
static bool
is_own_name(const char *host)
{
    char own[DM_NET_HOST_MAX];
    if (gethostname(own, sizeof(own)) != 0) {
        return false;
    }
    own[sizeof(own) - 1] = '\0';
    size_t label = strcspn(own, ".");
    return strcspn(host, ".") == label && strncasecmp(host, own, label) == 0;
}

/* The address from which this machine speaks to others. Asks the routing table: nothing
 * is sent. */
static bool
outward_address(uint16_t port, dm_net_address *address)
{
    struct sockaddr_in anybody = {.sin_family = AF_INET, .sin_port = htons(9)};
    inet_pton(AF_INET, "192.0.2.1", &anybody.sin_addr); /* of no machine */
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    memset(address, 0, sizeof(*address));
    address->size = sizeof(address->data);
    bool found =
        fd >= 0 &&
        connect(fd, (const struct sockaddr *)&anybody, sizeof(anybody)) == 0 &&
        getsockname(fd, (struct sockaddr *)&address->data, &address->size) == 0;
    if (fd >= 0) {
        close(fd);
    }
    if (found) {
        set_port(address, port);
    }
    return found;
}

int
dm_net_listen_outward(const char *host, int fd)
{
    dm_net_address bound = {.size = sizeof(bound.data)};
    dm_net_address address;
    uint16_t port;
    int second = -1;
    if (getsockname(fd, (struct sockaddr *)&bound.data, &bound.size) != 0 ||
        !is_loopback(&bound) || !is_own_name(host) ||
        dm_net_port(fd, &port, NULL) != DM_OK || !outward_address(port, &address) ||
        is_loopback(&address) || listen_one(&address, &second) != 0) {
        return -1;
    }
    return second;
}

dm_status
dm_net_listen(const char *host, uint16_t port, const dm_wait *wait, int *fd,
              dm_error *err)
{
    dm_net_address addresses[DM_NET_MAX_ADDRESSES];
    int n = 0;
    DM_TRY(dm_net_resolve(host, port, wait, addresses, &n, err));
    int first_error = 0;
    for (int i = 0; i < n; i++) {
        int error = listen_one(&addresses[i], fd);
        if (error == 0) {
            return DM_OK;
        }
        if (first_error == 0) {
            first_error = error;
        }
    }
    return dm_error_set_native(err, DM_ERR_SYSTEM, first_error,
                               "cannot listen on %s:%u: %s", host, port,
                               why(first_error, (char[REASON_SIZE]){0}));
}

dm_status
dm_net_adopt_listener(int fd, dm_error *err)
{
    int listening = 0;
    int type = 0;
    socklen_t size = sizeof(listening);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0) {
        return dm_error_set_native(err, DM_ERR_VALUE, errno,
                                   "file descriptor %d is no socket: %s", fd,
                                   why(errno, (char[REASON_SIZE]){0}));
    }
    if (!listening || type != SOCK_STREAM) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "file descriptor %d is no listening stream socket", fd);
    }
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        return dm_error_set_errno(err, errno, "fcntl");
    }
    return DM_OK;
}

dm_status
dm_net_port(int fd, uint16_t *port, dm_error *err)
{
    dm_net_address address = {.size = sizeof(address.data)};
    if (getsockname(fd, (struct sockaddr *)&address.data, &address.size) != 0) {
        return dm_error_set_errno(err, errno, "getsockname");
    }
    switch (address.data.ss_family) {
    case AF_INET:
        *port = ntohs(((struct sockaddr_in *)&address.data)->sin_port);
        return DM_OK;
    case AF_INET6:
        *port = ntohs(((struct sockaddr_in6 *)&address.data)->sin6_port);
        return DM_OK;
    default:
        return dm_error_set(err, DM_ERR_VALUE, "file descriptor %d is no TCP socket",
                            fd);
    }
}

/* --- bytes --------------------------------------------------------------------------------- */

static dm_status
peer_gone(int error, dm_error *err)
{
    return dm_error_set_native(err, DM_ERR_CONNECTION, error, "connection lost: %s",
                               why(error, (char[REASON_SIZE]){0}));
}

dm_status
dm_net_send(int fd, const void *data, size_t size, const dm_wait *wait, dm_error *err)
{
    const char *at = data;
    while (size > 0) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n >= 0) {
            at += n;
            size -= (size_t)n;
        }
        else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            DM_TRY(wait_ready(fd, POLLOUT, wait, err));
        }
        else if (errno != EINTR) {
            return peer_gone(errno, err);
        }
    }
    return DM_OK;
}

dm_status
dm_net_receive(int fd, void *data, size_t size, const dm_wait *wait, size_t *got,
               dm_error *err)
{
    for (;;) {
        ssize_t n = recv(fd, data, size, 0);
        if (n > 0) {
            *got = (size_t)n;
            return DM_OK;
        }
        if (n == 0) {
            return dm_error_set_native(err, DM_ERR_CONNECTION, ECONNRESET,
                                       "connection closed by the other side");
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            DM_TRY(wait_ready(fd, POLLIN, wait, err));
        }
        else if (errno != EINTR) {
            return peer_gone(errno, err);
        }
    }
}
