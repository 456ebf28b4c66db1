/* gloo's transport with three things added: it waits in slices, it knows whom it
 * waits for, and a message of another operation or length can never match.
 *
 * Transport and Buffer wrap gloo's tcp context and buffers; gloo's algorithms, which
 * make all their buffers through the context, run on them unchanged. A buffer keeps
 * one of gloo's for each peer, so that a wait is always a wait for one known rank
 * (gloo's own buffer cannot tell which of several peers is late).
 *
 * Waiting costs no thread of our own: the device's loop thread ends the wait in
 * flight every slice, which leaves the message as it was, and the waiting thread looks
 * around and waits on. gloo's own time-out is never used, since it closes every
 * connection of the group.
 *
 * Threads: one operation at a time; interrupt() and abort() from any thread.
 */
#ifndef GLOO_TRANSPORT_H
#define GLOO_TRANSPORT_H

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_device.h"

namespace dm_gloo {

/* Global and group ranks for error texts. */
struct Names {
    int32_t rank;         /* mine, in the group */
    const int32_t *ranks; /* global, by group rank */
};

/* The wait in flight of one group. */
class Waiter final : public Watched {
  public:
    explicit Waiter(const Names &names) : names_(names)
    {
    }

    /* An operation begins; `wait` is borrowed until the next begin. */
    void
    begin(const dm_wait *wait) noexcept;

    /* Throws when the operation must end: abort, the poll function, the deadline. */
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

    /* DM_ERR_PEER or DM_ERR_CONNECTION for gloo's text about a peer. */
    dm_status
    describe(int peer, const char *text, dm_error *err) const noexcept;

    /* The peer touched last. */
    int
    peer() const noexcept
    {
        return peer_;
    }

    /* "rank 3 (group rank 1)". */
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

    const Names names_;
    const dm_wait *wait_ = nullptr;
    int64_t started_ = 0;
    int peer_ = DM_ANY_RANK;

    std::atomic<bool> aborted_{false};
    std::mutex mutex_;
    gloo::transport::UnboundBuffer *in_flight_ = nullptr; /* guarded by mutex_ */
    bool sending_ = false;                                /* guarded by mutex_ */
};

class Transport final : public gloo::transport::Context {
  public:
    Transport(std::shared_ptr<gloo::transport::Context> inner, Waiter &waiter);

    std::unique_ptr<gloo::transport::Pair> &
    getPair(int peer) override;

    std::unique_ptr<gloo::transport::Pair> &
    createPair(int peer) override;

    std::unique_ptr<gloo::transport::UnboundBuffer>
    createUnboundBuffer(void *data, size_t bytes) override;

    /* What every message of the operation to come is marked with: two ranks whose
     * keys differ exchange nothing. */
    void
    set_key(uint64_t key) noexcept
    {
        key_ = key;
    }

    /* The slot on the wire. It holds the length, because gloo ends the process when a
     * message is longer than the buffer that was offered for it. */
    uint64_t
    slot(uint64_t slot, size_t bytes) const noexcept;

    /* Whether the connection to the peer has failed (asks gloo; costs microseconds). */
    bool
    is_broken(int peer) noexcept;

    /* Throws unless there is a connection to the peer. */
    void
    require(int peer);

    Waiter &
    waiter() noexcept
    {
        return waiter_;
    }

    gloo::transport::Context &
    inner() noexcept
    {
        return *inner_;
    }

  private:
    std::shared_ptr<gloo::transport::Context> inner_;
    Waiter &waiter_;
    uint64_t key_ = 0;
};

class Buffer final : public gloo::transport::UnboundBuffer {
  public:
    Buffer(Transport &transport, void *data, size_t bytes);

    /* Waits for the oldest pending receive (send). The time-out is ignored. */
    bool
    waitRecv(int *peer, std::chrono::milliseconds timeout) override;
    bool
    waitSend(int *peer, std::chrono::milliseconds timeout) override;
    using gloo::transport::UnboundBuffer::waitRecv;
    using gloo::transport::UnboundBuffer::waitSend;

    /* Not for us: the waiter interrupts gloo's buffers itself. */
    void
    abortWaitRecv() override;
    void
    abortWaitSend() override;

    void
    send(int peer, uint64_t slot, size_t offset = 0,
         size_t bytes = kUnspecifiedByteCount) override;
    void
    recv(int peer, uint64_t slot, size_t offset = 0,
         size_t bytes = kUnspecifiedByteCount) override;
    /* From whichever of the peers sends first. */
    void
    recv(std::vector<int> peers, uint64_t slot, size_t offset = 0,
         size_t bytes = kUnspecifiedByteCount) override;

  private:
    /* One of gloo's buffers over the same memory, for one peer. */
    struct Lane {
        int peer; /* DM_ANY_RANK: for receives from any */
        std::unique_ptr<gloo::transport::UnboundBuffer> inner;
    };

    /* First in, first out, of lane numbers. */
    struct Queue {
        std::vector<uint32_t> lanes;
        size_t head = 0;

        void
        push(uint32_t lane);
        uint32_t
        pop();
    };

    uint32_t
    lane_for(int peer);

    bool
    wait(Queue &queue, bool sending, int *peer);

    Transport &transport_;
    std::vector<Lane> lanes_;
    std::vector<int> sources_; /* of a receive from any */
    Queue sends_;
    Queue receives_;
};

/* What gloo's algorithms get: the group's device and transport. */
class Context final : public gloo::Context {
  public:
    Context(const std::shared_ptr<gloo::transport::Device> &device,
            const std::shared_ptr<Transport> &transport);
};

/* --- */

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
