/* What the server does, without sockets: requests in, answers out.
 *
 * A dm_serve is the table and what is waited for; a dm_session is one connection.
 * The owner feeds a session the bytes that came, sends what stands in its `out`, and
 * does the same for the sessions that others' requests have woken. One thread; no
 * locks; nothing blocks.
 *
 * Bounds, for each session: one request (DM_WIRE_FRAME_MAX), kept only while it is
 * incomplete or waited for; answers of DM_SERVE_OUT_MAX plus one value, after which
 * further requests wait until the answers have been sent.
 */
#ifndef DM_SERVE_H
#define DM_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_status.h"
#include "store/dm_kv.h"
#include "store/dm_wire.h"

enum { DM_SERVE_OUT_MAX = 1024 * 1024 };

typedef struct dm_session dm_session;
typedef struct dm_watch dm_watch;
typedef struct dm_will dm_will;

typedef struct dm_serve {
    dm_kv kv;          /* keys as they come over the wire, with their '/' */
    dm_kv barriers;    /* of WAIT_ALL: entries that are only watched */
    const char *token; /* borrowed; NULL: none needed */
    dm_session *woken; /* sessions that got answers from another's request */
    int clients;       /* sessions that are their client's first connection */
} dm_serve;

struct dm_session {
    dm_serve *serve;
    dm_wire_buffer out; /* answers; the owner sends from out_sent on */
    size_t out_sent;
    dm_wire_scan scan;
    bool is_valid;      /* has sent VALIDATE */
    bool is_authorised; /* has sent the token, where one is needed */
    bool is_counted;    /* in serve->clients */
    uint8_t waiting;    /* opcode, 0: for nothing */
    int64_t world;      /* of the barrier it waits in */
    size_t missing;     /* keys it waits for */
    dm_watch *watches;
    char *asked; /* keys whose values are still to be sent, as encoded items */
    dm_wire_slice rest;
    dm_will *wills;
    bool is_woken;
    dm_session *next_woken;
    dm_session *previous_woken;
};

void
dm_serve_init(dm_serve *serve, const char *token);

/* All sessions must have ended. */
void
dm_serve_fini(dm_serve *serve);

void
dm_session_init(dm_session *session, dm_serve *serve);

/* The connection is gone: its wills are executed (unless it said goodbye) and what it
 * waited for is forgotten. */
void
dm_session_fini(dm_session *session);

/* Handles the requests in `data`, as many as it can; `used` bytes are done with, the
 * others are to be offered again (with more behind them, or once the session is not
 * stalled any more). An error means: close the connection. `err` must not be NULL. */
dm_status
dm_session_feed(dm_session *session, const char *data, size_t size, size_t *used,
                dm_error *err);

/* Requests must wait: it waits itself, or too much is in `out`. While it waits, only
 * CANCEL_WAIT and PING are handled. */
bool
dm_session_is_stalled(const dm_session *session);

/* Bytes to send, and that many have been sent. */
size_t
dm_session_pending(const dm_session *session);

void
dm_session_sent(dm_session *session, size_t size);

/* Takes one session off the woken list; NULL when there is none. */
dm_session *
dm_serve_next_woken(dm_serve *serve);

#endif
