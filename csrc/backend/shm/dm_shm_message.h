/* send and recv: messages between two members.
 *
 * Each ordered pair of members has a row of cells and a byte ring. A message announces
 * itself in the next cell; small ones lie in it, larger ones flow through the ring.
 * Messages of one pair arrive in the order in which they were sent; a receiver that
 * asks for another tag sets those in front aside, in memory of its own.
 *
 * A sender that finds the ring full says so (`blocked`) and rings the receiver's bell.
 * A receiver that waits for anything else then takes the message in before it sleeps,
 * so that two members may both send first and receive afterwards, and a message may be
 * under way while its receiver is in a collective.
 */
#ifndef DM_SHM_MESSAGE_H
#define DM_SHM_MESSAGE_H

#include "backend/shm/dm_shm_comm.h"

dm_status
dm_shm_send(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

/* DM_ERR_MISMATCH when the message with that tag has another dtype or count. */
dm_status
dm_shm_recv(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err);

/* Takes in what blocked senders have for me; true when there was something. Called by
 * whoever is about to sleep. */
bool
dm_shm_take_in(dm_comm *comm);

/* Frees what was set aside. */
void
dm_shm_inbox_free(dm_shm_inbox *inbox);

#endif
