/* Time: monotonic nanoseconds, absolute deadlines, and how a call waits.
 *
 * Inside the core every time-out is an absolute deadline, so that a call made
 * of several waits keeps one promise. Nothing here allocates or locks.
 */
#ifndef DM_CLOCK_H
#define DM_CLOCK_H

#include <stdint.h>

#include "base/dm_status.h"

/* A deadline that never comes. */
#define DM_FOREVER INT64_MAX

/* The longest a wait may sleep before it calls dm_wait_poll again (100 ms). */
#define DM_WAIT_SLICE_NS INT64_C(100000000)

#define DM_NS_PER_S INT64_C(1000000000)
#define DM_NS_PER_MS INT64_C(1000000)

/* How a blocking call waits. `poll`, where there is one, is called before the
 * first sleep and then at least every DM_WAIT_SLICE_NS, by the waiting thread,
 * with none of our locks held. A status other than DM_OK ends the wait and is
 * what the call returns (the poll function has written `err`). */
typedef struct dm_wait {
    int64_t deadline; /* dm_clock_now() nanoseconds, or DM_FOREVER */
    dm_status (*poll)(void *arg, dm_error *err);
    void *arg; /* borrowed for the length of the call */
} dm_wait;

#define DM_WAIT_FOREVER {DM_FOREVER, NULL, NULL}

/* Nanoseconds of CLOCK_MONOTONIC; the same clock in every process of a host. */
int64_t
dm_clock_now(void);

/* now + timeout_ns, saturating at DM_FOREVER. A negative timeout means none. */
int64_t
dm_clock_deadline(int64_t timeout_ns);

/* Nanoseconds left, 0 when the deadline has passed, DM_FOREVER when it is. */
int64_t
dm_clock_left(int64_t deadline);

/* Asks the wait whether to go on: DM_OK, the poll's status, or DM_ERR_TIMEOUT
 * (with a bare "timed out") once the deadline has passed. */
dm_status
dm_wait_poll(const dm_wait *wait, dm_error *err);

/* How long the next sleep may be: min(time left, DM_WAIT_SLICE_NS), in
 * nanoseconds. */
int64_t
dm_wait_slice(const dm_wait *wait);

/* The same for poll(2) and epoll_wait(2): milliseconds, rounded up. */
int
dm_wait_slice_ms(const dm_wait *wait);

#endif
