/* Messages between the members of a group, beside its collectives.
 *
 * A mail is what one member has for one group: a socket that others find through the
 * store, connections to those it has to do with, and one thread. Sends and receives are
 * posted and end on their own, in any order among members and tags; those between two
 * members with one tag match in the order in which they were posted. A send ends when
 * the other member has taken it, so both ends learn of a message that does not fit.
 *
 *     post ──► (connect) ──► small: announced with its data ──► taken: both end
 *                            large: announced; asked for ──► data flows ──► both end
 *
 * Connections are made when the first message needs one, by whichever end comes first;
 * members that exchange nothing never meet. Memory for messages that nobody has asked for
 * yet is bounded by what their senders have posted; of large ones only the announcement
 * waits.
 *
 * Threads: one mutex, held over nothing that waits. `ended` is called without it, on the
 * mail's thread, in post, or in stop. Group ranks throughout.
 */
#ifndef DM_MAIL_H
#define DM_MAIL_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/dm_backend.h"

typedef struct dm_mail dm_mail;

/* A message under way. The poster fills the first fields and leaves the rest alone; it
 * stays valid until `ended` is called. A message that fails may be half-way: `ended` must
 * stop the mail before the buffers are used again. */
typedef struct dm_mail_item {
    const dm_op
        *op; /* DM_OP_SEND or DM_OP_RECV; *op->source is written before `ended` */
    int64_t deadline; /* DM_FOREVER: none */
    /* Called once; the mail touches neither item nor buffers any more. `err` is the
     * record of a failure (NULL where there was no memory for it), valid for the call. */
    void (*ended)(struct dm_mail_item *item, dm_status status, const dm_error *err);

    struct dm_mail_item *next;
    uint64_t id;
    int64_t posted;
    int32_t peer;
    dm_status status;
    dm_error *err;
} dm_mail_item;

/* Opens the socket on the address `host`, publishes it in the store and starts the thread.
 * Copies what the config points to. Blocks for a call to the store. */
dm_status
dm_mail_open(const dm_comm_config *config, const char *host, const dm_wait *wait,
             dm_mail **mail, dm_error *err);

/* Never blocks. Not DM_OK: nothing was posted (DM_ERR_CLOSED after stop). `ended` may be
 * called before this returns. */
dm_status
dm_mail_post(dm_mail *mail, dm_mail_item *item, dm_error *err);

/* Ends all messages with that status and text, closes the connections and refuses further
 * messages. The other members are told what is in `tell`, if it is not NULL. Does not
 * wait. Any thread, also from `ended`. Idempotent. */
void
dm_mail_stop(dm_mail *mail, dm_status status, const char *text, const dm_error *tell);

/* After stop: waits until the thread is gone (not on the thread itself, from `ended`) and
 * closes the descriptors. */
void
dm_mail_join(dm_mail *mail);

/* Stops it if need be and frees it, without waiting: a thread that is still there frees it
 * when it gets out. `forked`: in a child, which only forgets. NULL is fine. */
void
dm_mail_free(dm_mail *mail, bool forked);

#endif
