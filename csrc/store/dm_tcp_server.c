/* The tcp server: sockets around dm_serve, on one thread with epoll.
 *
 * All state below `thread` belongs to the server's thread; others see the port (set
 * before it starts), the number of clients (atomic) and the eventfd that stops it.
 * No client can stall the others: sockets are non-blocking, each turn reads at most
 * one scratch buffer from each, and a client whose answers pile up or that waits is
 * not read beyond a bound.
 */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "store/dm_net.h"
#include "store/dm_serve.h"
#include "store/dm_store.h"

enum {
    MAX_LISTENERS = 2,
    MAX_EVENTS = 256,
    ACCEPTS_PER_TURN = 64,
    ADVANCES_PER_TURN = 8,
    SCRATCH_SIZE = 128 * 1024,  /* read from one client in one turn */
    STALLED_IN_MAX = 64 * 1024, /* kept for a client whose requests must wait */
    HANDSHAKE_LIMIT_S = 60,     /* for VALIDATE to come */
    ACCEPT_PAUSE_MS = 100,      /* when there are no descriptors left */
    RESOLVE_LIMIT_S = 30,
};

typedef struct connection {
    int fd;
    uint32_t events;   /* that epoll watches for */
    bool is_closed;    /* waits on the dead list for the end of the turn */
    bool has_ended;    /* the client will send no more */
    int64_t deadline;  /* for the handshake */
    dm_wire_buffer in; /* bytes that could not be handled yet */
    dm_session session;
    struct connection *previous; /* all connections, in order of arrival */
    struct connection *next;
    struct connection *next_dead;
} connection;

struct dm_store_server {
    pid_t pid;
    uint16_t port;
    atomic_int clients;
    int stop_fd; /* eventfd */
    pthread_t thread;

    int listen_fds[MAX_LISTENERS];
    int n_listen;
    int epoll_fd;
    bool is_stopping;
    int64_t accept_again; /* 0: accepting; else when to try again */
    bool raised_limit;
    char *token;
    dm_serve serve;
    connection *first;
    connection *last;
    connection *first_young; /* the first that may not have sent VALIDATE yet */
    connection *dead;
    char scratch[SCRATCH_SIZE];
};

/* --- connections ------------------------------------------------------------------------- */

static connection *
connection_of(dm_session *session)
{
    return (connection *)((char *)session - offsetof(connection, session));
}

static void
watch_events(dm_store_server *server, connection *self, uint32_t events)
{
    if (self->events == events) {
        return;
    }
    struct epoll_event event = {.events = events, .data.ptr = self};
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, self->fd, &event) == 0) {
        self->events = events;
    }
}

/* Ends a connection. Its memory lives to the end of the turn: events for it may still
 * be to come. */
static void
drop(dm_store_server *server, connection *self)
{
    if (self->is_closed) {
        return;
    }
    self->is_closed = true;
    /* A forked child may hold the socket too: then close() alone neither takes it out of
     * epoll, which would go on naming this connection, nor tells the client. */
    (void)epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, self->fd, NULL);
    shutdown(self->fd, SHUT_RDWR);
    close(self->fd);
    dm_session_fini(&self->session);
    dm_wire_buffer_fini(&self->in);
    if (server->first_young == self) {
        server->first_young = self->next;
    }
    *(self->previous != NULL ? &self->previous->next : &server->first) = self->next;
    *(self->next != NULL ? &self->next->previous : &server->last) = self->previous;
    self->next_dead = server->dead;
    server->dead = self;
    server->accept_again = server->accept_again != 0 ? 1 : 0;
}

static void
free_dead(dm_store_server *server)
{
    while (server->dead != NULL) {
        connection *self = server->dead;
        server->dead = self->next_dead;
        dm_free(self);
    }
}

/* Sends what there is to send. False: the connection is broken. */
static bool
flush(connection *self)
{
    dm_session *session = &self->session;
    size_t pending = dm_session_pending(session);
    while (pending > 0) {
        ssize_t n = send(self->fd, session->out.data + session->out_sent, pending,
                         MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return errno == EAGAIN || errno == EWOULDBLOCK;
        }
        dm_session_sent(session, (size_t)n);
        if ((size_t)n < pending) {
            return true;
        }
        pending = 0;
    }
    return true;
}

/* Handles `data` or, when that is NULL, what was kept; keeps what is left. */
static bool
feed(connection *self, const char *data, size_t size)
{
    dm_wire_buffer *in = &self->in;
    bool kept = data == NULL;
    if (kept) {
        data = in->data;
        size = in->size;
    }
    size_t used;
    dm_error err;
    if (dm_session_feed(&self->session, data, size, &used, &err) != DM_OK) {
        (void)flush(self); /* the answers to what was right */
        return false;
    }
    if (!kept) {
        dm_wire_put_raw(in, data + used, size - used);
        return !in->failed;
    }
    in->size -= used;
    if (in->size == 0) {
        dm_wire_buffer_fini(in);
    }
    else if (used != 0) {
        memmove(in->data, in->data + used, in->size);
    }
    return true;
}

static void
publish_clients(dm_store_server *server)
{
    /* Relaxed: a number to look at, nothing depends on it. */
    atomic_store_explicit(&server->clients, server->serve.clients,
                          memory_order_relaxed);
}

/* Whether kept requests or values still to be sent could go on now. */
static bool
can_go_on(const connection *self)
{
    const dm_session *session = &self->session;
    return session->waiting == 0 && dm_session_pending(session) == 0 &&
           (self->in.size != 0 || session->asked != NULL);
}

/* Sends and feeds by turns until nothing moves (or others should have their turn),
 * then watches for what can move it again. */
static void
advance(dm_store_server *server, connection *self)
{
    dm_session *session = &self->session;
    publish_clients(server);
    bool alive = flush(self);
    bool moves = true;
    for (int i = 0; alive && moves && i < ADVANCES_PER_TURN; i++) {
        if (!can_go_on(self)) {
            moves = false;
            break;
        }
        size_t before = self->in.size;
        alive = feed(self, NULL, 0);
        moves = self->in.size != before || dm_session_pending(session) != 0;
        alive = alive && flush(self);
    }
    if (!alive || self->has_ended) {
        drop(server, self);
        return;
    }
    bool full = dm_session_is_stalled(session) && self->in.size >= STALLED_IN_MAX;
    bool writes = dm_session_pending(session) != 0 || (moves && can_go_on(self));
    watch_events(server, self,
                 (full ? 0 : (uint32_t)EPOLLIN) | (writes ? (uint32_t)EPOLLOUT : 0) |
                     EPOLLRDHUP);
}

/* Reads once. */
static void
read_some(dm_store_server *server, connection *self)
{
    bool direct = self->in.size != 0; /* behind what was kept */
    char *to = server->scratch;
    if (direct) {
        if (!dm_wire_reserve(&self->in, SCRATCH_SIZE)) {
            drop(server, self);
            return;
        }
        to = self->in.data + self->in.size;
    }
    ssize_t n = recv(self->fd, to, SCRATCH_SIZE, 0);
    if (n < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            drop(server, self);
        }
        return;
    }
    if (n == 0) {
        self->has_ended = true;
    }
    else if (direct) {
        self->in.size += (size_t)n;
    }
    if (!feed(self, direct ? NULL : to, (size_t)n)) {
        drop(server, self);
        return;
    }
    advance(server, self);
}

static void
handle_event(dm_store_server *server, connection *self, uint32_t events)
{
    if (self->is_closed) {
        return;
    }
    bool reads = (self->events & EPOLLIN) != 0;
    if ((events & (EPOLLERR | EPOLLHUP)) != 0 ||
        ((events & EPOLLRDHUP) != 0 && !reads)) {
        /* Nobody is there to answer, or nobody to read what is too much to keep. What
         * it has sent before it left still counts. */
        if (reads && (events & EPOLLIN) != 0) {
            read_some(server, self);
            return;
        }
        drop(server, self);
        return;
    }
    if ((events & EPOLLOUT) != 0) {
        advance(server, self);
    }
    if (!self->is_closed && (events & EPOLLIN) != 0) {
        read_some(server, self);
    }
}

/* Sends the answers that one client's requests have brought to others. */
static void
serve_woken(dm_store_server *server)
{
    dm_session *session;
    while ((session = dm_serve_next_woken(&server->serve)) != NULL) {
        advance(server, connection_of(session));
    }
}

/* --- accepting ------------------------------------------------------------------------------ */

static bool
add_connection(dm_store_server *server, int fd)
{
    connection *self = dm_calloc(1, sizeof(*self));
    if (self == NULL) {
        close(fd);
        return false;
    }
    self->fd = fd;
    self->events = EPOLLIN | EPOLLRDHUP;
    struct epoll_event event = {.events = self->events, .data.ptr = self};
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        close(fd);
        dm_free(self);
        return false;
    }
    dm_net_tune(fd);
    self->deadline = dm_clock_deadline(HANDSHAKE_LIMIT_S * DM_NS_PER_S);
    dm_session_init(&self->session, &server->serve);
    self->previous = server->last;
    *(server->last != NULL ? &server->last->next : &server->first) = self;
    server->last = self;
    if (server->first_young == NULL) {
        server->first_young = self;
    }
    return true;
}

/* More descriptors, as far as the system lets us without asking. */
static bool
raise_limit(dm_store_server *server)
{
    struct rlimit limit;
    if (server->raised_limit || getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
        limit.rlim_cur >= limit.rlim_max) {
        return false;
    }
    server->raised_limit = true;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

static void
watch_listeners(dm_store_server *server, bool on)
{
    for (int i = 0; i < server->n_listen; i++) {
        struct epoll_event event = {.events = on ? (uint32_t)EPOLLIN : 0,
                                    .data.ptr = &server->listen_fds[i]};
        (void)epoll_ctl(server->epoll_fd, EPOLL_CTL_MOD, server->listen_fds[i], &event);
    }
}

static bool
is_listener(const dm_store_server *server, const void *who)
{
    return who == &server->listen_fds[0] || who == &server->listen_fds[1];
}

static void
accept_some(dm_store_server *server, int listen_fd)
{
    for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            (void)add_connection(server, fd);
            continue;
        }
        if (errno == EMFILE && raise_limit(server)) {
            continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            /* Those who wait in the backlog wait until others have left. */
            watch_listeners(server, false);
            server->accept_again = dm_clock_deadline(ACCEPT_PAUSE_MS * DM_NS_PER_MS);
        }
        return;
    }
}

/* --- the thread ------------------------------------------------------------------------------- */

/* Drops those that never said who they are; returns how long to sleep at most. */
static int
look_at_clock(dm_store_server *server)
{
    int64_t now = dm_clock_now();
    while (server->first_young != NULL) {
        connection *self = server->first_young;
        if (self->session.is_valid) {
            server->first_young = self->next;
        }
        else if (self->deadline <= now) {
            drop(server, self);
        }
        else {
            break;
        }
    }
    if (server->accept_again != 0 && server->accept_again <= now) {
        server->accept_again = 0;
        watch_listeners(server, true);
    }
    int64_t next = DM_FOREVER;
    if (server->first_young != NULL) {
        next = server->first_young->deadline;
    }
    if (server->accept_again != 0 && server->accept_again < next) {
        next = server->accept_again;
    }
    if (next == DM_FOREVER) {
        return -1;
    }
    return (int)((dm_clock_left(next) + DM_NS_PER_MS - 1) / DM_NS_PER_MS);
}

static void
turn(dm_store_server *server)
{
    struct epoll_event events[MAX_EVENTS];
    int n = epoll_wait(server->epoll_fd, events, MAX_EVENTS, look_at_clock(server));
    for (int i = 0; i < n; i++) {
        void *who = events[i].data.ptr;
        if (who == &server->stop_fd) {
            server->is_stopping = true;
        }
        else if (is_listener(server, who)) {
            accept_some(server, *(int *)who);
        }
        else {
            handle_event(server, who, events[i].events);
        }
    }
    serve_woken(server);
    free_dead(server);
    publish_clients(server);
}

static void *
run(void *arg)
{
    dm_store_server *server = arg;
    while (!server->is_stopping) {
        turn(server);
    }
    return NULL;
}

/* --- life ---------------------------------------------------------------------------------------- */

static void
close_fd(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

static void
close_listeners(dm_store_server *server)
{
    for (int i = 0; i < server->n_listen; i++) {
        close(server->listen_fds[i]);
    }
}

/* Frees a server whose thread has ended or never began. */
static void
free_server(dm_store_server *server)
{
    while (server->first != NULL) {
        drop(server, server->first);
        free_dead(server);
    }
    dm_serve_fini(&server->serve);
    close_listeners(server);
    close_fd(server->epoll_fd);
    close_fd(server->stop_fd);
    dm_free(server->token);
    dm_free(server);
}

static dm_status
open_listeners(const dm_store_server_config *config, dm_store_server *server,
               dm_error *err)
{
    int fd = config->listen_fd;
    if (fd >= 0) {
        DM_TRY(dm_net_adopt_listener(fd, err));
    }
    else {
        const dm_wait wait = {dm_clock_deadline(RESOLVE_LIMIT_S * DM_NS_PER_S), NULL,
                              NULL};
        DM_TRY(dm_net_listen(config->host, config->port, &wait, &fd, err));
    }
    server->listen_fds[server->n_listen++] = fd;
    int second = config->listen_fd < 0 ? dm_net_listen_outward(config->host, fd) : -1;
    if (second >= 0) {
        server->listen_fds[server->n_listen++] = second;
    }
    return dm_net_port(fd, &server->port, err);
}

static dm_status
watch_for_input(const dm_store_server *server, int *fd, dm_error *err)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = fd};
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, *fd, &event) != 0) {
        return dm_error_set_errno(err, errno, "epoll_ctl");
    }
    return DM_OK;
}

static dm_status
open_epoll(dm_store_server *server, dm_error *err)
{
    server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (server->epoll_fd < 0) {
        return dm_error_set_errno(err, errno, "epoll_create1");
    }
    server->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->stop_fd < 0) {
        return dm_error_set_errno(err, errno, "eventfd");
    }
    DM_TRY(watch_for_input(server, &server->stop_fd, err));
    for (int i = 0; i < server->n_listen; i++) {
        DM_TRY(watch_for_input(server, &server->listen_fds[i], err));
    }
    return DM_OK;
}

static dm_status
start_thread(dm_store_server *server, dm_error *err)
{
    /* Signals are for the threads of the program. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&server->thread, NULL, run, server);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        return dm_error_set_errno(err, rc, "starting the store server's thread");
    }
    (void)pthread_setname_np(server->thread, "dm-store-server");
    return DM_OK;
}

dm_status
dm_store_server_start(const dm_store_server_config *config, dm_store_server **out,
                      dm_error *err)
{
    const char *token = config->token;
    if (token != NULL && (*token == '\0' || strlen(token) > DM_WIRE_TOKEN_MAX)) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "the token of a store has 1 to %d bytes, got %zu",
                            DM_WIRE_TOKEN_MAX, strlen(token));
    }
    dm_store_server *server = dm_calloc(1, sizeof(*server));
    char *copy = token != NULL ? dm_strdup(token) : NULL;
    if (server == NULL || (token != NULL && copy == NULL)) {
        dm_free(server);
        dm_free(copy);
        return dm_error_set_no_memory(err, "a store server");
    }
    server->pid = getpid();
    server->token = copy;
    server->epoll_fd = server->stop_fd = -1;
    dm_serve_init(&server->serve, copy);
    atomic_init(&server->clients, 0);

    dm_status status;
    DM_TRY_GOTO(status, open_listeners(config, server, err), fail);
    DM_TRY_GOTO(status, open_epoll(server, err), fail);
    DM_TRY_GOTO(status, start_thread(server, err), fail);
    *out = server;
    return DM_OK;

fail:
    if (config->listen_fd >= 0) {
        server->n_listen = 0; /* not taken over */
    }
    free_server(server);
    return status;
}

uint16_t
dm_store_server_port(const dm_store_server *server)
{
    return server->port;
}

int
dm_store_server_clients(dm_store_server *server)
{
    /* Relaxed: see publish_clients. */
    return atomic_load_explicit(&server->clients, memory_order_relaxed);
}

void
dm_store_server_stop(dm_store_server *server)
{
    if (server == NULL) {
        return;
    }
    if (server->pid != getpid()) {
        /* The lists may have been in use during the fork: leave them. */
        close_listeners(server);
        close_fd(server->epoll_fd);
        close_fd(server->stop_fd);
        return;
    }
    uint64_t one = 1;
    ssize_t n;
    do {
        n = write(server->stop_fd, &one, sizeof(one));
    } while (n < 0 && errno == EINTR);
    pthread_join(server->thread, NULL);
    free_server(server);
}
