/* gloo's transport with two things added: it knows whom it waits for, and a message of
 * another operation or length can never match.
 *
 * Transport and Buffer wrap gloo's tcp context and buffers; gloo's algorithms, which
 * make all their buffers through the context, run on them unchanged. A buffer keeps
 * one of gloo's for each peer, so that a wait is always a wait for one known rank
 * (gloo's own buffer cannot tell which of several peers is late). How it waits is
 * gloo_waiter.h's business.
 *
 * Threads: one operation at a time.
 */
#ifndef GLOO_TRANSPORT_H
#define GLOO_TRANSPORT_H

#include <memory>
#include <vector>

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_waiter.h"

namespace dm_gloo {

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

} // namespace dm_gloo

#endif
