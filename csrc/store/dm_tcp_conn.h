/* One connection of a tcp store's client: opening, requests out, answers in.
 *
 * Used by one thread at a time. A request is built in `out` (dm_wire_put_...), sent
 * whole and its answer read field by field. Whatever leaves a request half sent or an
 * answer half read marks the connection as broken: it can only be closed.
 */
#ifndef DM_TCP_CONN_H
#define DM_TCP_CONN_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"
#include "store/dm_wire.h"

typedef struct dm_tcp_conn {
    int fd;
    bool is_ours; /* the server understands our opcodes */
    bool is_broken;
    unsigned pongs; /* answers to a PING that another thread has sent during a wait */
    dm_wire_buffer out;
    size_t in_at;
    size_t in_size;
    char in[4096];
    dm_status cut; /* why the wait ended before the answer that is being read came */
    dm_wait grace; /* while such an answer is read */
    /* The pool's, guarded by its mutex. */
    bool is_unanswered; /* nothing has answered what was sent yet */
    bool is_waiting;    /* a request that waits has been sent, whole */
    unsigned pings;     /* that other threads have sent during the wait */
    pthread_t user;     /* whose call it is, while busy */
    struct dm_tcp_conn *previous;
    struct dm_tcp_conn *next;
} dm_tcp_conn;

/* The number that PINGs carry: its first byte begins no answer of a wait. */
enum { DM_TCP_PONG = 0xA5 };

typedef struct dm_tcp_target {
    const char *host;
    uint16_t port;
    const char *token; /* NULL: none */
    bool secondary;    /* the server does not count it as one more client */
    bool retry;        /* while nobody answers there, until the deadline */
} dm_tcp_target;

/* Connects and shakes hands. All errors name host and port. DM_ERR_TIMEOUT shows the
 * last reason; DM_ERR_CONNECTION where `retry` is off or it cannot help (a token is
 * asked for or wrong); DM_ERR_PROTOCOL: what answers there is no store. */
dm_status
dm_tcp_conn_open(const dm_tcp_target *target, const dm_wait *wait, dm_tcp_conn **conn,
                 dm_error *err);

/* Closes and frees; NULL is fine. */
void
dm_tcp_conn_free(dm_tcp_conn *conn);

/* Empties `out` and begins a request. */
void
dm_tcp_conn_begin(dm_tcp_conn *conn, uint8_t op);

dm_status
dm_tcp_conn_send(dm_tcp_conn *conn, const dm_wait *wait, dm_error *err);

dm_status
dm_tcp_conn_read_u8(dm_tcp_conn *conn, const dm_wait *wait, uint8_t *value,
                    dm_error *err);

dm_status
dm_tcp_conn_read_u32(dm_tcp_conn *conn, const dm_wait *wait, uint32_t *value,
                     dm_error *err);

dm_status
dm_tcp_conn_read_i64(dm_tcp_conn *conn, const dm_wait *wait, int64_t *value,
                     dm_error *err);

/* `size` bytes. */
dm_status
dm_tcp_conn_read_raw(dm_tcp_conn *conn, const dm_wait *wait, void *data, size_t size,
                     dm_error *err);

/* Length and bytes, at most `limit`; the caller frees. */
dm_status
dm_tcp_conn_read_bytes(dm_tcp_conn *conn, const dm_wait *wait, size_t limit,
                       dm_bytes *value, dm_error *err);

/* Reads the answer to a PING that was sent behind a request without an answer. When
 * the wait ends first, the answer still gets a moment of grace (it is on its way);
 * only an interrupt is then returned, the text in `err`. */
dm_status
dm_tcp_conn_read_pong(dm_tcp_conn *conn, const dm_wait *wait, dm_error *err);

/* The first byte of the answer to a request that waits at the server, or DM_TCP_PONG
 * when one has come (and been counted) and the wait goes on: call again. When the wait
 * ends first (time-out, interrupt), it is cancelled there, which leaves the connection
 * usable, and the wait's status is returned. If the answer came all the same, the
 * byte is returned and its rest is to be read with the *wait that is given back.
 * dm_tcp_conn_finish_wait must follow, after the rest of the answer. */
dm_status
dm_tcp_conn_await(dm_tcp_conn *conn, const dm_wait **wait, uint8_t *answer,
                  dm_error *err);

/* Reads what may still come behind an awaited answer: that of CANCEL_WAIT, and pongs
 * up to `pings`. DM_OK, also when only the deadline had passed, or the status that
 * ended the wait (its text still stands in the record that await was given). */
dm_status
dm_tcp_conn_finish_wait(dm_tcp_conn *conn, unsigned pings);

#endif
