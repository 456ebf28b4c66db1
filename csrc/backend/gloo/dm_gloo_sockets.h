/* The sockets of gloo's connections: kept out of children.
 *
 * gloo opens its sockets inheritable and tells nobody their numbers. A child that holds
 * one (a data loader's worker, say) keeps the connection up when its parent has died, and
 * the peers wait on. So they are found by their addresses and noted: they are closed in
 * whatever the process executes, and in its forked children.
 *
 * A noted number may be anybody's by the time of a fork, since gloo closes sockets by
 * itself: a child closes it only where it is still the connection that was noted.
 */
#ifndef DM_GLOO_SOCKETS_H
#define DM_GLOO_SOCKETS_H

#include <stddef.h>

/* Notes this process's sockets whose own address is one of `mine` or whose peer's is one
 * of `theirs`: arrays of `n` entries of `size` bytes, each beginning with a sockaddr (as
 * gloo's addresses do). `group` is what dm_gloo_sockets_forget is told. Any thread.
 * Failures leave sockets unnoted. */
void
dm_gloo_sockets_note(const void *group, const void *mine, const void *theirs, size_t n,
                     size_t size);

/* The group's sockets are about to be closed. Any thread. */
void
dm_gloo_sockets_forget(const void *group);

#endif
