/* How the members of a gloo group meet: addresses through the store.
 *
 * Plain C, no gloo in it: the C++ of the bridge cannot read store/dm_store.h. A
 * meeting takes one set and one multi-get for each rank, whatever the group's size:
 * a rank reads the addresses of those it will talk to and of nobody else.
 */
#ifndef DM_GLOO_MEET_H
#define DM_GLOO_MEET_H

#include <stddef.h>
#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"

typedef struct dm_store dm_store;

typedef struct dm_gloo_meeting {
    dm_store *store;
    const char *name;     /* of the group */
    const char *stage;    /* which of the group's meetings: part of the key */
    int32_t rank;         /* mine, in the group */
    const int32_t *ranks; /* global rank of each group rank */
    const int32_t *peers; /* group ranks to be met, without mine */
    size_t peer_count;
    size_t address_size; /* bytes; the same on every rank */
    const char *netif;   /* "eth0 (10.0.0.7)": for people */
    int loopback;        /* my addresses are good on this host only */
} dm_gloo_meeting;

/* Publishes `mine` (peer_count addresses, the i-th for peers[i]) and fills `theirs`
 * (the i-th is where peers[i] waits for me). Blocks until all peers have published.
 * DM_ERR_TIMEOUT names the global ranks that have not; DM_ERR_PEER when a member has
 * left its last words (dm_gloo_report.h) instead; DM_ERR_CONNECTION when a
 * peer's address cannot be reached from here (loopback across hosts);
 * DM_ERR_PROTOCOL when a peer runs something else. */
dm_status
dm_gloo_meet(const dm_gloo_meeting *meeting, const void *mine, void *theirs,
             const dm_wait *wait, dm_error *err);

#endif
