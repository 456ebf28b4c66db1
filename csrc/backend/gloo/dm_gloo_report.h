/* What the ranks of a group tell each other through the store when things go slowly or
 * wrong. Nothing here is touched by an operation that goes well.
 *
 * A rank that has waited for a while reports what it is in and whom it waits for. By
 * the reports a rank finds out that another one is in a different operation, and at a
 * time-out who is at the end of the chain of those who wait for each other. A rank
 * that leaves after a failure leaves word why, for those that only see a connection
 * close.
 *
 * Every call here blocks for at most DM_GLOO_REPORT_NS and keeps no error: it adds to
 * a message, and its failure must not hide what the message is about.
 */
#ifndef DM_GLOO_REPORT_H
#define DM_GLOO_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"

#define DM_GLOO_REPORT_NS DM_NS_PER_S

typedef struct dm_store dm_store;

enum { DM_GLOO_REPORT_TEXT_SIZE = 128 };

/* Plain bytes in the store: byte order is the host's, as in gloo's own messages. */
typedef struct dm_gloo_report {
    uint64_t turn;                       /* collectives begun in this group */
    uint64_t key;                        /* what the members must agree on */
    uint64_t bytes;                      /* send, recv: the length */
    int32_t kind;                        /* dm_op_kind */
    int32_t peer;                        /* group rank that is waited for, or -1 */
    char text[DM_GLOO_REPORT_TEXT_SIZE]; /* dm_op_describe */
} dm_gloo_report;

/* Replaces this rank's report in the group `name`. */
void
dm_gloo_report_put(dm_store *store, const char *name, int32_t rank,
                   const dm_gloo_report *report);

/* The last report of a group rank; false when there is none. */
bool
dm_gloo_report_get(dm_store *store, const char *name, int32_t rank,
                   dm_gloo_report *report);

/* Why the group broke: the first rank to say so wins. */
typedef struct dm_gloo_cause {
    dm_status status; /* DM_OK: the store did not answer */
    char text[512];
} dm_gloo_cause;

/* The key that says so. Returns `text`. */
const char *
dm_gloo_broken_key(const char *name, char *text, size_t size);

/* Leaves `cause` unless there is one, and returns what stands in the store. */
dm_gloo_cause
dm_gloo_last_words(dm_store *store, const char *name, const dm_gloo_cause *cause);

#endif
