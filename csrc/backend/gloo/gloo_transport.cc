/* gloo's transport with names and marks: see gloo_transport.h. */
#include "backend/gloo/gloo_transport.h"

#include <sys/socket.h>

#include <gloo/transport/pair.h>

namespace dm_gloo {

/* --- Transport -------------------------------------------------------------------- */

Transport::Transport(std::shared_ptr<gloo::transport::Context> inner, Waiter &waiter)
    : gloo::transport::Context(inner->rank, inner->size), inner_(std::move(inner)),
      waiter_(waiter)
{
}

std::unique_ptr<gloo::transport::Pair> &
Transport::getPair(int peer)
{
    return inner_->getPair(peer);
}

std::unique_ptr<gloo::transport::Pair> &
Transport::createPair(int peer)
{
    return inner_->createPair(peer);
}

std::unique_ptr<gloo::transport::UnboundBuffer>
Transport::createUnboundBuffer(void *data, size_t bytes)
{
    return std::make_unique<Buffer>(*this, data, bytes);
}

/* The finalizer of splitmix64. */
static uint64_t
mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

uint64_t
Transport::slot(uint64_t slot, size_t bytes) const noexcept
{
    /* gloo counts up the lowest byte where one operation needs several slots. */
    uint64_t mark = mix(key_ + mix(bytes + 1));
    return (mark & ~UINT64_C(0xff)) | (slot & 0xff);
}

bool
Transport::is_broken(int peer) noexcept
{
    /* Connecting to an address of no family does nothing, but a pair that has failed
     * answers with its failure. */
    static const std::vector<char> nowhere(sizeof(struct sockaddr_storage) +
                                           sizeof(ssize_t));
    bool failed = false;
    guard(
        nullptr,
        [&] {
            auto &pair = inner_->getPair(peer);
            failed = pair == nullptr;
            if (pair != nullptr) {
                pair->connect(nowhere);
            }
        },
        [&](const char *, dm_error *) {
            failed = true;
            return DM_ERR_PEER;
        });
    return failed;
}

void
Transport::require(int peer)
{
    waiter_.touch(peer);
    if (inner_->getPair(peer) == nullptr) {
        fail(DM_ERR_STATE, "there is no connection to %s",
             waiter_.peer_text(peer).text);
    }
}

/* --- Buffer ------------------------------------------------------------------------- */

Buffer::Buffer(Transport &transport, void *data, size_t bytes)
    : gloo::transport::UnboundBuffer(data, bytes), transport_(transport)
{
}

void
Buffer::Queue::push(uint32_t lane)
{
    if (head > 0 && head == lanes.size()) {
        lanes.clear();
        head = 0;
    }
    lanes.push_back(lane);
}

uint32_t
Buffer::Queue::pop()
{
    if (head == lanes.size()) {
        fail(DM_ERR_STATE, "nothing to wait for");
    }
    return lanes[head++];
}

uint32_t
Buffer::lane_for(int peer)
{
    for (uint32_t i = 0; i < lanes_.size(); i++) {
        if (lanes_[i].peer == peer) {
            return i;
        }
    }
    lanes_.push_back({peer, transport_.inner().createUnboundBuffer(ptr, size)});
    return static_cast<uint32_t>(lanes_.size() - 1);
}

void
Buffer::send(int peer, uint64_t slot, size_t offset, size_t bytes)
{
    bytes = bytes == kUnspecifiedByteCount ? size - offset : bytes;
    transport_.require(peer);
    uint32_t lane = lane_for(peer);
    lanes_[lane].inner->send(peer, transport_.slot(slot, bytes), offset, bytes);
    sends_.push(lane);
}

void
Buffer::recv(int peer, uint64_t slot, size_t offset, size_t bytes)
{
    bytes = bytes == kUnspecifiedByteCount ? size - offset : bytes;
    transport_.require(peer);
    uint32_t lane = lane_for(peer);
    lanes_[lane].inner->recv(peer, transport_.slot(slot, bytes), offset, bytes);
    receives_.push(lane);
}

void
Buffer::recv(std::vector<int> peers, uint64_t slot, size_t offset, size_t bytes)
{
    bytes = bytes == kUnspecifiedByteCount ? size - offset : bytes;
    for (int peer : peers) {
        transport_.require(peer);
    }
    sources_ = peers;
    uint32_t lane = lane_for(DM_ANY_RANK);
    lanes_[lane].inner->recv(std::move(peers), transport_.slot(slot, bytes), offset,
                             bytes);
    receives_.push(lane);
}

bool
Buffer::wait(Queue &queue, bool sending, int *peer)
{
    Lane &lane = lanes_[queue.pop()];
    int from = transport_.waiter().wait(*lane.inner, sending, lane.peer, [&] {
        if (lane.peer != DM_ANY_RANK) {
            return transport_.is_broken(lane.peer);
        }
        /* A source that has left may have said all it had to say. */
        for (int source : sources_) {
            if (!transport_.is_broken(source)) {
                return false;
            }
        }
        return true;
    });
    if (peer != nullptr) {
        *peer = from;
    }
    return true;
}

bool
Buffer::waitRecv(int *peer, std::chrono::milliseconds)
{
    return wait(receives_, false, peer);
}

bool
Buffer::waitSend(int *peer, std::chrono::milliseconds)
{
    return wait(sends_, true, peer);
}

void
Buffer::abortWaitRecv()
{
}

void
Buffer::abortWaitSend()
{
}

/* --- Context ----------------------------------------------------------------------- */

Context::Context(const std::shared_ptr<gloo::transport::Device> &device,
                 const std::shared_ptr<Transport> &transport)
    : gloo::Context(transport->rank, transport->size)
{
    device_ = device;
    transportContext_ = transport;
}

} // namespace dm_gloo
