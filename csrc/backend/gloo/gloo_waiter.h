/* The wait in flight of one group: in slices, with a name for whom it waits.
 *
 * Waiting costs no thread of our own: the device's loop thread ends the wait in
 * flight every slice, which leaves the message as it was, and the waiting thread looks
 * around and waits on. gloo's own time-out is never used, since it closes every
 * connection of the group.
 *
 * Between slices it asks, in this order: was it aborted; what does the caller's poll
 * function say; is the deadline over; and, once it has waited for a second and then
 * less and less often, what the awaited rank reports to be in (dm_gloo_report.h).
 * The poll function is first called after the first slice, not before: most waits are
 * over by then, and it may take the GIL.
 *
 * Threads: one operation at a time; abort() and on_slice() from any thread.
 */
#ifndef GLOO_WAITER_H
#define GLOO_WAITER_H

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

#include <gloo/transport/unbound_buffer.h>

#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_device.h"

namespace dm_gloo {

class Waiter final : public Watched {
  public:
    /* Borrows what the config points to. */
    explicit Waiter(const dm_comm_config &config);

    /* A call begins; `wait` is borrowed until the next begin. No operation: the group
     * is connecting. */
    void
    begin(const dm_wait *wait) noexcept;

    /* What the call is about: borrowed likewise. */
    void
    begin_operation(const dm_op *op, uint64_t turn, uint64_t key) noexcept;

    /* Throws when the call must end. */
    void
    look();

    /* Waits for one completion of `buffer` from or to `peer` (DM_ANY_RANK: whoever
     * comes). `is_broken` is asked between slices whether the connection to the peer
     * is gone, which gloo does not always tell the buffer. Returns the peer. */
    template <typename IsBroken>
    int
    wait(gloo::transport::UnboundBuffer &buffer, bool sending, int peer,
         IsBroken &&is_broken);

    /* Whom a failure of the next call into gloo is about. */
    void
    touch(int peer) noexcept
    {
        peer_ = peer;
    }

    int
    peer() const noexcept
    {
        return peer_;
    }

    /* Ends the wait in flight; every later look() throws. Any thread. */
    void
    abort() noexcept;

    bool
    is_aborted() const noexcept
    {
        /* Acquire: what the aborting thread wrote before is seen. */
        return aborted_.load(std::memory_order_acquire);
    }

    void
    on_slice() noexcept override;

    /* DM_ERR_PEER or DM_ERR_CONNECTION for gloo's text about a peer. Any thread. */
    dm_status
    describe(int peer, const char *text, dm_error *err) const noexcept;

    /* "rank 3 (group rank 1)". Any thread. */
    struct PeerText {
        char text[48];
    };
    PeerText
    peer_text(int peer) const noexcept;

  private:
    /* Marks the buffer as the one that is waited for, while it lives. */
    class InFlight {
      public:
        InFlight(Waiter &waiter, gloo::transport::UnboundBuffer &buffer, bool sending);
        ~InFlight();
        InFlight(const InFlight &) = delete;
        InFlight &
        operator=(const InFlight &) = delete;

      private:
        Waiter &waiter_;
    };

    void
    interrupt_locked() noexcept;

    /* Publishes what this rank is in; throws when the awaited rank is in something
     * else. */
    void
    report();

    void
    put_report(dm_gloo_report *mine);

    [[noreturn]] void
    fail_late();

    const int32_t rank_;
    const int32_t size_;
    const int32_t *const ranks_;
    const char *const name_;
    dm_store *const store_;

    const dm_wait *wait_ = nullptr;
    const dm_op *op_ = nullptr;
    uint64_t turn_ = 0;
    uint64_t key_ = 0;
    int64_t started_ = 0;
    int64_t next_report_ = 0;
    int peer_ = DM_ANY_RANK;

    std::atomic<bool> aborted_{false};
    std::mutex mutex_;
    gloo::transport::UnboundBuffer *in_flight_ = nullptr; /* guarded by mutex_ */
    bool sending_ = false;                                /* guarded by mutex_ */
};

template <typename IsBroken>
int
Waiter::wait(gloo::transport::UnboundBuffer &buffer, bool sending, int peer,
             IsBroken &&is_broken)
{
    /* Far beyond any deadline, far below what overflows in gloo. */
    constexpr std::chrono::milliseconds forever = std::chrono::hours(24 * 365);
    touch(peer);
    bool broken = false;
    for (;;) {
        int from = peer;
        {
            InFlight mark(*this, buffer, sending);
            if (sending ? buffer.waitSend(&from, forever)
                        : buffer.waitRecv(&from, forever)) {
                return from;
            }
        }
        look();
        /* One more slice for what had come before the connection went. */
        if (broken) {
            fail(DM_ERR_PEER, "%s closed its connection", peer_text(peer).text);
        }
        broken = std::forward<IsBroken>(is_broken)();
    }
}

} // namespace dm_gloo

#endif
