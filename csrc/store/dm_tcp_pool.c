/* The connections of a tcp store's client: see dm_tcp_pool.h. */
#include "store/dm_tcp_pool.h"

#include <assert.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/dm_alloc.h"

enum { MAX_IDLE = 4 };

/* --- the pool ------------------------------------------------------------------------ */

dm_status
dm_tcp_pool_check_open(dm_tcp_pool *self, dm_error *err)
{
    /* Relaxed: a call that races with close may go either way. */
    if (atomic_load_explicit(&self->closed, memory_order_relaxed)) {
        return dm_error_set(err, DM_ERR_CLOSED, "store at %s:%u is closed", self->host,
                            self->port);
    }
    return DM_OK;
}

static dm_status
poll_call(void *arg, dm_error *err)
{
    const dm_tcp_call *call = arg;
    DM_TRY(dm_tcp_pool_check_open(call->pool, err));
    const dm_wait *outer = call->outer;
    return outer->poll != NULL ? outer->poll(outer->arg, err) : DM_OK;
}

static void
call_init(dm_tcp_call *call, dm_tcp_pool *pool, const dm_wait *wait, dm_error *err)
{
    *call = (dm_tcp_call){
        .pool = pool, .outer = wait, .err = err, .started = dm_clock_now()};
    call->inner = (dm_wait){wait->deadline, poll_call, call};
    call->wait = &call->inner;
}

static void
add_busy_locked(dm_tcp_pool *self, dm_tcp_conn *conn)
{
    conn->previous = NULL;
    conn->next = self->busy;
    if (self->busy != NULL) {
        self->busy->previous = conn;
    }
    self->busy = conn;
}

static void
remove_busy_locked(dm_tcp_pool *self, dm_tcp_conn *conn)
{
    *(conn->previous != NULL ? &conn->previous->next : &self->busy) = conn->next;
    if (conn->next != NULL) {
        conn->next->previous = conn->previous;
    }
}

/* A PING over a connection whose call is waiting. It has nothing to send but a cancel,
 * and five bytes always fit where an answer is awaited; if not, its call fails. */
static void
ping_locked(dm_tcp_conn *conn)
{
    static const char ping[] = {DM_WIRE_PING, (char)DM_TCP_PONG, 0, 0, 0};
    if (send(conn->fd, ping, sizeof(ping), MSG_NOSIGNAL | MSG_DONTWAIT) ==
        (ssize_t)sizeof(ping)) {
        conn->pings++;
    }
}

/* Whether a request over another connection could overtake something. Sees to it that
 * this is not so for ever. A call that this thread has further down its stack (this one
 * comes from its poll function) does not count: nobody else could read its answer. */
static bool
any_unanswered_locked(const dm_tcp_pool *self)
{
    bool any = false;
    for (dm_tcp_conn *conn = self->busy; conn != NULL; conn = conn->next) {
        if (conn->is_unanswered && !pthread_equal(conn->user, pthread_self())) {
            any = true;
            if (conn->is_waiting && conn->pings == 0) {
                ping_locked(conn);
            }
        }
    }
    return any;
}

/* Sleeps until the pool changes, or polls the wait when that is due. */
static dm_status
sleep_locked(dm_tcp_call *call, int64_t *next_poll)
{
    dm_tcp_pool *self = call->pool;
    if (dm_clock_now() < *next_poll) {
        struct timespec until = {*next_poll / DM_NS_PER_S, *next_poll % DM_NS_PER_S};
        pthread_cond_timedwait(&self->changed, &self->mutex, &until);
        return DM_OK;
    }
    pthread_mutex_unlock(&self->mutex);
    dm_status status = dm_wait_poll(call->wait, call->err);
    *next_poll = dm_clock_now() + dm_wait_slice(call->wait);
    pthread_mutex_lock(&self->mutex);
    return status;
}

static dm_status
open_connection(dm_tcp_pool *self, bool first, const dm_wait *wait, dm_tcp_conn **conn,
                dm_error *err)
{
    dm_tcp_target target = {
        .host = self->host,
        .port = self->port,
        .token = self->token,
        .secondary = !first,
        .retry = first,
    };
    return dm_tcp_conn_open(&target, wait, conn, err);
}

/* An idle connection, or the right to open one (NULL). */
static dm_status
take_idle_locked(dm_tcp_call *call, dm_tcp_conn **conn)
{
    dm_tcp_pool *self = call->pool;
    int64_t next_poll = 0;
    for (;;) {
        DM_TRY(dm_tcp_pool_check_open(self, call->err));
        if (self->idle != NULL) {
            *conn = self->idle;
            self->idle = (*conn)->next;
            self->n_idle--;
            return DM_OK;
        }
        if (!any_unanswered_locked(self)) {
            self->n_open++;
            *conn = NULL;
            return DM_OK;
        }
        DM_TRY(sleep_locked(call, &next_poll));
    }
}

static void
forget_connection(dm_tcp_pool *self)
{
    pthread_mutex_lock(&self->mutex);
    self->n_open--;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

static void
mark_busy_locked(dm_tcp_call *call, dm_tcp_call_kind kind)
{
    dm_tcp_pool *self = call->pool;
    dm_tcp_conn *conn = call->conn;
    add_busy_locked(self, conn);
    conn->pings = conn->pongs = 0;
    conn->user = pthread_self();
    call->kind = kind;
    call->acknowledged = kind == DM_TCP_ONE_WAY && self->n_open > 1;
    if (kind == DM_TCP_ONE_WAY) {
        conn->is_unanswered = true;
    }
}

static dm_status
acquire(dm_tcp_call *call, dm_tcp_call_kind kind)
{
    dm_tcp_pool *self = call->pool;
    pthread_mutex_lock(&self->mutex);
    dm_status status = take_idle_locked(call, &call->conn);
    if (status == DM_OK && call->conn != NULL) {
        mark_busy_locked(call, kind);
    }
    pthread_mutex_unlock(&self->mutex);
    if (status != DM_OK || call->conn != NULL) {
        return status;
    }

    status = open_connection(self, false, call->wait, &call->conn, call->err);
    if (status != DM_OK) {
        forget_connection(self);
        return status;
    }
    pthread_mutex_lock(&self->mutex);
    status = dm_tcp_pool_check_open(self, call->err);
    if (status == DM_OK) {
        mark_busy_locked(call, kind);
    }
    pthread_mutex_unlock(&self->mutex);
    if (status != DM_OK) {
        dm_tcp_conn_free(call->conn);
        call->conn = NULL;
        forget_connection(self);
    }
    return status;
}

/* Gives the connection back, or closes it when it is broken or one too many. */
static void
give_back(dm_tcp_call *call)
{
    dm_tcp_pool *self = call->pool;
    dm_tcp_conn *conn = call->conn;
    pthread_mutex_lock(&self->mutex);
    remove_busy_locked(self, conn);
    bool keep = !conn->is_broken && self->n_idle < MAX_IDLE &&
                !atomic_load_explicit(&self->closed, memory_order_relaxed);
    if (keep) {
        conn->is_unanswered = call->kind == DM_TCP_ONE_WAY && !call->acknowledged;
        conn->next = self->idle;
        self->idle = conn;
        self->n_idle++;
        conn = NULL;
    }
    else {
        self->n_open--;
    }
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    dm_tcp_conn_free(conn);
}

/* --- one call ----------------------------------------------------------------------------- */

dm_status
dm_tcp_call_explain(dm_tcp_call *call, dm_status status)
{
    const dm_tcp_pool *self = call->pool;
    if (status == DM_ERR_CONNECTION || status == DM_ERR_PROTOCOL ||
        status == DM_ERR_SYSTEM) {
        /* The cause may be that close has cut the connection. */
        dm_status closed = dm_tcp_pool_check_open(call->pool, call->err);
        if (closed != DM_OK) {
            return closed;
        }
        dm_error_context(call->err, "store at %s:%u", self->host, self->port);
    }
    return status;
}

dm_status
dm_tcp_call_timed_out(const dm_tcp_call *call, const char *what, const char *names)
{
    const dm_tcp_pool *self = call->pool;
    return dm_error_set(
        call->err, DM_ERR_TIMEOUT, "store at %s:%u: timed out after %.3g s %s %s",
        self->host, self->port, (double)(dm_clock_now() - call->started) / DM_NS_PER_S,
        what, names);
}

dm_status
dm_tcp_call_begin(dm_tcp_call *call, dm_tcp_pool *pool, dm_tcp_call_kind kind,
                  uint8_t op, const dm_wait *wait, dm_error *err)
{
    call_init(call, pool, wait, err);
    dm_status status = acquire(call, kind);
    if (status != DM_OK) {
        return status;
    }
    dm_tcp_conn_begin(call->conn, op);
    return DM_OK;
}

dm_status
dm_tcp_call_send(dm_tcp_call *call)
{
    return dm_tcp_conn_send(call->conn, call->wait, call->err);
}

dm_status
dm_tcp_call_send_one_way(dm_tcp_call *call)
{
    if (!call->acknowledged) {
        return dm_tcp_call_send(call);
    }
    dm_wire_put_u8(&call->conn->out, DM_WIRE_PING);
    dm_wire_put_u32(&call->conn->out, DM_TCP_PONG);
    DM_TRY(dm_tcp_call_send(call));
    return dm_tcp_conn_read_pong(call->conn, call->wait, call->err);
}

/* Tells the others that the call waits, or that all it has sent is answered. */
static void
set_state(dm_tcp_call *call, bool is_waiting, bool is_answered)
{
    dm_tcp_pool *self = call->pool;
    dm_tcp_conn *conn = call->conn;
    pthread_mutex_lock(&self->mutex);
    conn->is_waiting = is_waiting;
    conn->is_unanswered = conn->is_unanswered && !is_answered;
    call->pings = conn->pings;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
}

dm_status
dm_tcp_call_send_and_await(dm_tcp_call *call, uint8_t *answer)
{
    DM_TRY(dm_tcp_call_send(call));
    set_state(call, true, false);
    dm_status status;
    for (;;) {
        status = dm_tcp_conn_await(call->conn, &call->wait, answer, call->err);
        if (status != DM_OK || *answer != DM_TCP_PONG) {
            break;
        }
        set_state(call, true, true);
    }
    set_state(call, false, status == DM_OK);
    if (status != DM_OK && !call->conn->is_broken) {
        (void)dm_tcp_call_finish_wait(call);
    }
    return status;
}

dm_status
dm_tcp_call_finish_wait(dm_tcp_call *call)
{
    return dm_tcp_conn_finish_wait(call->conn, call->pings);
}

dm_status
dm_tcp_call_end(dm_tcp_call *call, dm_status status)
{
    give_back(call);
    return dm_tcp_call_explain(call, status);
}

dm_status
dm_tcp_call_begin_apart(dm_tcp_call *call, dm_tcp_pool *pool, const dm_wait *wait,
                        dm_error *err)
{
    call_init(call, pool, wait, err);
    DM_TRY(dm_tcp_pool_check_open(pool, err));
    return open_connection(pool, false, call->wait, &call->conn, err);
}

/* --- life ---------------------------------------------------------------------------- */

dm_status
dm_tcp_pool_init(dm_tcp_pool *pool, const char *host, uint16_t port, const char *token,
                 const dm_wait *wait, bool *is_ours, dm_error *err)
{
    memset(pool, 0, sizeof(*pool));
    dm_status status;
    dm_tcp_conn *conn = NULL;
    pool->port = port;
    pool->host = dm_strdup(host);
    pool->token = token != NULL ? dm_strdup(token) : NULL;
    if (pool->host == NULL || (token != NULL && pool->token == NULL)) {
        status = dm_error_set_no_memory(err, "a tcp store");
        goto fail;
    }
    DM_TRY_GOTO(status, open_connection(pool, true, wait, &conn, err), fail);
    atomic_init(&pool->closed, false);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    *is_ours = conn->is_ours;
    pool->idle = conn;
    pool->n_idle = pool->n_open = 1;
    return DM_OK;

fail:
    dm_free(pool->host);
    dm_free(pool->token);
    return status;
}

static void
free_all(dm_tcp_conn *conn)
{
    while (conn != NULL) {
        dm_tcp_conn *next = conn->next;
        dm_tcp_conn_free(conn);
        conn = next;
    }
}

void
dm_tcp_pool_close(dm_tcp_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    /* Relaxed: see dm_tcp_pool_check_open. */
    atomic_store_explicit(&pool->closed, true, memory_order_relaxed);
    dm_tcp_conn *idle = pool->idle;
    pool->n_open -= pool->n_idle;
    pool->n_idle = 0;
    pool->idle = NULL;
    for (const dm_tcp_conn *conn = pool->busy; conn != NULL; conn = conn->next) {
        shutdown(conn->fd, SHUT_RDWR);
    }
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    free_all(idle);
}

void
dm_tcp_pool_fini(dm_tcp_pool *pool, bool forked)
{
    free_all(pool->idle);
    if (!forked) {
        assert(pool->busy == NULL);
        pthread_cond_destroy(&pool->changed);
        pthread_mutex_destroy(&pool->mutex);
    }
    dm_free(pool->host);
    dm_free(pool->token);
}
