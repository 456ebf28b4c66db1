/* The connections of a tcp store's client, and one call over one of them.
 *
 * A call checks a connection out of a small pool, so that a call that waits stops no
 * other: where none is idle another one is opened. The mutex guards the pool and is
 * held over nothing that blocks.
 *
 * Order. SET and the like have no answer. With one connection the next call follows
 * on the same one, so all is seen in order. With several, a request on another
 * connection might overtake; therefore
 *   - a second connection is opened only when the first has nothing unanswered,
 *   - while there are several, each request without an answer is followed by a PING
 *     whose answer is waited for,
 *   - who wants a second connection while the first has something unanswered and waits
 *     sends a PING over it, which the server answers at once.
 * So what a call has done is done at the server before any later call begins there. A
 * call made by the poll function of another one does not come after that one.
 */
#ifndef DM_TCP_POOL_H
#define DM_TCP_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "store/dm_tcp_conn.h"

typedef struct dm_tcp_pool {
    char *host;
    char *token; /* or NULL */
    uint16_t port;
    pthread_mutex_t mutex;  /* guards all below */
    pthread_cond_t changed; /* a connection came back or has nothing unanswered now */
    atomic_bool closed;     /* written with the mutex held */
    int n_open;             /* connections, those being opened too */
    int n_idle;
    dm_tcp_conn *idle; /* a stack, by `next` */
    dm_tcp_conn *busy; /* a list */
} dm_tcp_pool;

/* Opens the first connection, retrying until the deadline; `is_ours` says whose server
 * it is. Errors as dm_tcp_conn_open. */
dm_status
dm_tcp_pool_init(dm_tcp_pool *pool, const char *host, uint16_t port, const char *token,
                 const dm_wait *wait, bool *is_ours, dm_error *err);

/* Closes the idle connections and cuts the busy ones, whose calls then end with
 * DM_ERR_CLOSED, as later ones do. Idempotent; does not block. */
void
dm_tcp_pool_close(dm_tcp_pool *pool);

/* Frees what is idle; no call is on its way. In a forked child the parent's locks are
 * left alone. */
void
dm_tcp_pool_fini(dm_tcp_pool *pool, bool forked);

dm_status
dm_tcp_pool_check_open(dm_tcp_pool *pool, dm_error *err);

/* --- one call ------------------------------------------------------------------------ */

typedef enum dm_tcp_call_kind {
    DM_TCP_ANSWERED,
    DM_TCP_ONE_WAY, /* its request has no answer */
    DM_TCP_WAITS,   /* its answer may take for ever */
} dm_tcp_call_kind;

typedef struct dm_tcp_call {
    dm_tcp_pool *pool;
    dm_tcp_conn *conn;
    const dm_wait *outer;
    dm_wait inner;       /* the caller's, which also ends when the store is closed */
    const dm_wait *wait; /* &inner, or the grace of a wait that was cut */
    dm_error *err;
    int64_t started;
    dm_tcp_call_kind kind;
    bool acknowledged; /* a PING goes behind the request */
    unsigned pings;    /* that others have sent while it waited */
} dm_tcp_call;

/* Takes a connection and begins a request on it, to be built in conn->out. On success
 * dm_tcp_call_end must follow. The call must not be moved. */
dm_status
dm_tcp_call_begin(dm_tcp_call *call, dm_tcp_pool *pool, dm_tcp_call_kind kind,
                  uint8_t op, const dm_wait *wait, dm_error *err);

/* As begin, on a further connection that the caller keeps (call->conn); no end. */
dm_status
dm_tcp_call_begin_apart(dm_tcp_call *call, dm_tcp_pool *pool, const dm_wait *wait,
                        dm_error *err);

/* Sends a request that has an answer. */
dm_status
dm_tcp_call_send(dm_tcp_call *call);

/* Sends a DM_TCP_ONE_WAY request and, where that is needed, makes sure that it has
 * arrived. */
dm_status
dm_tcp_call_send_one_way(dm_tcp_call *call);

/* Sends a DM_TCP_WAITS request and returns the first byte of its answer, whose rest is
 * to be read with call->wait. After a DM_ERR_TIMEOUT the wait has been cancelled; the
 * connection may be used for other requests unless it is broken. */
dm_status
dm_tcp_call_send_and_await(dm_tcp_call *call, uint8_t *answer);

/* After the rest of the answer: DM_OK, or the interrupt that came before it. */
dm_status
dm_tcp_call_finish_wait(dm_tcp_call *call);

/* Gives the connection back and returns `status`, with "store at host:port" put in
 * front of what the connection says, or DM_ERR_CLOSED when that is why it broke. */
dm_status
dm_tcp_call_end(dm_tcp_call *call, dm_status status);

/* The second half of end alone. */
dm_status
dm_tcp_call_explain(dm_tcp_call *call, dm_status status);

/* DM_ERR_TIMEOUT: "store at host:port: timed out after 3 s <what> <names>". */
dm_status
dm_tcp_call_timed_out(const dm_tcp_call *call, const char *what, const char *names);

#endif
