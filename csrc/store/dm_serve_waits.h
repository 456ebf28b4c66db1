/* What sessions wait for, and how they are told: the part of the server's work that one
 * session's request does to others. Only for dm_serve.c.
 *
 * A watch is one session at one entry of a table, in order of arrival.
 */
#ifndef DM_SERVE_WAITS_H
#define DM_SERVE_WAITS_H

#include "store/dm_serve.h"

/* What a watch waits for at its entry. */
typedef enum dm_watch_kind {
    DM_WATCH_KEY,     /* a value or an item */
    DM_WATCH_UNLESS,  /* a value, which ends the wait badly */
    DM_WATCH_POP,     /* an item, to be taken */
    DM_WATCH_COUNT,   /* torch's barrier: the number in the key reaches the world */
    DM_WATCH_ARRIVAL, /* our barrier: as many watches as the world */
} dm_watch_kind;

/* One session at one entry. In two lists: the entry's (double, in order of arrival)
 * and the session's. */
struct dm_watch {
    dm_session *session;
    dm_kv *kv;
    dm_kv_entry *entry;
    dm_watch_kind kind;
    dm_watch *previous;
    dm_watch *next;
    dm_watch *next_of_session;
};

/* The value of a key, empty when there is none. Borrowed. */
dm_wire_slice
dm_serve_value_of(const dm_serve *serve, dm_wire_slice key);

/* Keeps the keys (encoded items) whose values are to be sent. */
dm_status
dm_session_ask(dm_session *session, dm_wire_slice items, dm_error *err);

/* Answers with the values that were asked for as long as there is room in `out`. */
void
dm_session_send_values(dm_session *session);

void
dm_session_forget_asked(dm_session *session);

dm_status
dm_session_watch(dm_session *session, dm_kv *kv, dm_wire_slice key, dm_watch_kind kind,
                 dm_error *err);

/* Forgets what the session waits for. */
void
dm_session_stop_waiting(dm_session *session);

/* Takes the session off the woken list. */
void
dm_session_unwake(dm_session *session);

/* Ends of a wait; each wakes the session: everything is there; `value` stands under a
 * key in `unless`; an item is there, which is taken. */
void
dm_session_complete(dm_session *session);

void
dm_session_complete_gone(dm_session *session, const dm_bytes *value);

void
dm_session_complete_pop(dm_session *session, const dm_kv_entry *entry);

/* Tells those who watch the entry that it has got a value. */
void
dm_serve_value_has_come(dm_kv_entry *entry);

/* Gives a new item to the first who wants it. Who only waits for the key is told and
 * will come to take it; as in torch, one for each item. */
void
dm_serve_item_has_come(dm_kv_entry *entry);

#endif
