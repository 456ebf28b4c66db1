/* Monotonic time and deadlines: see dm_clock.h. */
#include "base/dm_clock.h"

#include <time.h>

int64_t
dm_clock_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * DM_NS_PER_S + ts.tv_nsec;
}

int64_t
dm_clock_deadline(int64_t timeout_ns)
{
    if (timeout_ns < 0) {
        return DM_FOREVER;
    }
    int64_t now = dm_clock_now();
    return timeout_ns > DM_FOREVER - now ? DM_FOREVER : now + timeout_ns;
}

int64_t
dm_clock_left(int64_t deadline)
{
    if (deadline == DM_FOREVER) {
        return DM_FOREVER;
    }
    int64_t left = deadline - dm_clock_now();
    return left > 0 ? left : 0;
}

dm_status
dm_wait_poll(const dm_wait *wait, dm_error *err)
{
    if (wait->poll != NULL) {
        DM_TRY(wait->poll(wait->arg, err));
    }
    if (dm_clock_left(wait->deadline) == 0) {
        return dm_error_set(err, DM_ERR_TIMEOUT, "timed out");
    }
    return DM_OK;
}

int64_t
dm_wait_slice(const dm_wait *wait)
{
    int64_t left = dm_clock_left(wait->deadline);
    return left < DM_WAIT_SLICE_NS ? left : DM_WAIT_SLICE_NS;
}

int
dm_wait_slice_ms(const dm_wait *wait)
{
    return (int)((dm_wait_slice(wait) + DM_NS_PER_MS - 1) / DM_NS_PER_MS);
}
