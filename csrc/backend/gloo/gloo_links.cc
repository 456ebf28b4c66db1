/* The connections of one group: see gloo_links.h. */
#include "backend/gloo/gloo_links.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <thread>

#include <gloo/transport/address.h>
#include <gloo/transport/pair.h>

namespace dm_gloo {

namespace {

/* Far beyond any deadline: time-outs are ours, never gloo's. */
constexpr std::chrono::milliseconds kForever = std::chrono::hours(1000);

/* Opens pairs one after the other on a thread of its own, so that the caller can wait
 * in slices. Destroying it early closes the pairs, which ends a connect in flight. */
class Opening {
  public:
    Opening(Device &device, Transport &transport, Waiter &waiter,
            std::vector<int> peers, std::vector<std::vector<char>> addresses)
        : device_(device), transport_(transport), waiter_(waiter),
          peers_(std::move(peers)), addresses_(std::move(addresses))
    {
        SignalsBlocked blocked;
        thread_ = std::thread([this] { run(); });
    }

    ~Opening()
    {
        bool done;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            cancelled_ = true;
            done = done_;
        }
        for (size_t i = 0; i < peers_.size() && !done; i++) {
            device_.hurry();
            guard(nullptr, [&] { transport_.getPair(peers_[i])->close(); });
        }
        thread_.join();
    }

    Opening(const Opening &) = delete;
    Opening &
    operator=(const Opening &) = delete;

    /* Returns when all are open. Throws. */
    void
    wait()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        auto slice = std::chrono::nanoseconds(DM_WAIT_SLICE_NS);
        while (!changed_.wait_for(lock, slice, [this] { return done_; })) {
            waiter_.touch(peers_[at_]);
            lock.unlock();
            waiter_.look();
            lock.lock();
        }
        check(status_, error_);
    }

  private:
    void
    run() noexcept
    {
        dm_status status = DM_OK;
        dm_error error = DM_ERROR_INIT;
        for (size_t i = 0; i < peers_.size() && status == DM_OK; i++) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                if (cancelled_) {
                    break;
                }
                at_ = i;
            }
            device_.hurry();
            status = guard(
                &error, [&] { transport_.getPair(peers_[i])->connect(addresses_[i]); },
                [&](const char *text, dm_error *e) {
                    return waiter_.describe(peers_[i], text, e);
                });
        }
        std::lock_guard<std::mutex> lock(mutex_);
        done_ = true;
        status_ = status;
        error_ = error;
        changed_.notify_one();
    }

    Device &device_;
    Transport &transport_;
    Waiter &waiter_;
    const std::vector<int> peers_;
    const std::vector<std::vector<char>> addresses_;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool cancelled_ = false; /* these five: guarded by mutex_ */
    bool done_ = false;
    size_t at_ = 0;
    dm_status status_ = DM_OK;
    dm_error error_ = DM_ERROR_INIT;

    std::thread thread_; /* last: it uses the rest */
};

/* A wait whose poll also sees an abort. */
class AbortableWait {
  public:
    AbortableWait(const dm_wait &wait, const Waiter &waiter)
        : outer_(wait), waiter_(waiter), wait_{wait.deadline, poll, this}
    {
    }

    const dm_wait *
    get() const
    {
        return &wait_;
    }

  private:
    static dm_status
    poll(void *arg, dm_error *err)
    {
        const AbortableWait *self = static_cast<AbortableWait *>(arg);
        if (self->waiter_.is_aborted()) {
            return dm_error_set(err, DM_ERR_ABORTED,
                                "aborted while waiting for the other ranks to join "
                                "the group");
        }
        return self->outer_.poll != nullptr ? self->outer_.poll(self->outer_.arg, err)
                                            : DM_OK;
    }

    const dm_wait &outer_;
    const Waiter &waiter_;
    const dm_wait wait_;
};

/* FNV-1a: the same on every rank. */
uint64_t
hash(const std::string &text)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (unsigned char c : text) {
        h = (h ^ c) * UINT64_C(0x100000001b3);
    }
    return h;
}

} // namespace

Links::Links(const dm_comm_config &config, Waiter &waiter)
    : rank_(config.rank), size_(config.size), ranks_(config.ranks), name_(config.name),
      store_(config.store), waiter_(waiter)
{
}

Links::~Links()
{
    if (device_ != nullptr) {
        device_->forget(&waiter_);
        shut();
    }
}

std::vector<int>
Links::others() const
{
    std::vector<int> peers;
    for (int peer = 0; peer < size_; peer++) {
        if (peer != rank_) {
            peers.push_back(peer);
        }
    }
    return peers;
}

void
Links::open(const dm_wait &wait)
{
    device_ = Device::acquire();
    device_->watch(&waiter_);
    auto inner = device_->transport()->createContext(rank_, size_);
    inner->setTimeout(kForever);
    transport_ = std::make_shared<Transport>(inner, waiter_);
    context_ = std::make_shared<Context>(device_->transport(), transport_);

    std::vector<int> peers;
    if (is_full()) {
        peers = others();
    }
    else {
        for (int32_t step = 1; step < size_; step <<= 1) {
            peers.push_back((rank_ + step) % size_);
            peers.push_back((rank_ - step + size_) % size_);
        }
    }
    connect("first", peers, wait);
}

void
Links::prepare(const dm_op &op, const dm_wait &wait)
{
    if (is_full()) {
        return;
    }
    switch (op.kind) {
    case DM_OP_ALL_TO_ALL:
        connect("all", others(), wait);
        break;
    case DM_OP_GATHER:
    case DM_OP_SCATTER:
    case DM_OP_REDUCE:
        connect("root" + std::to_string(op.root),
                op.root == rank_ ? others() : std::vector<int>{op.root}, wait);
        break;
    case DM_OP_SEND:
    case DM_OP_RECV:
        if (op.root == DM_ANY_RANK) {
            fail(DM_ERR_UNSUPPORTED,
                 "recv from any rank works in groups of up to %d ranks, this one has "
                 "%d: name the rank",
                 kSmallGroup, size_);
        }
        connect("pair" + std::to_string(std::min(op.root, rank_)) + "-" +
                    std::to_string(std::max(op.root, rank_)),
                {op.root}, wait);
        break;
    default:
        break;
    }
}

void
Links::connect(const std::string &stage, const std::vector<int> &wanted,
               const dm_wait &wait)
{
    std::vector<int> peers;
    for (int peer : wanted) {
        if (transport_->getPair(peer) == nullptr) {
            peers.push_back(peer);
        }
    }
    if (peers.empty()) {
        return;
    }
    /* Ascending on every rank: then connecting one by one cannot go round in a
     * circle. */
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());

    std::vector<char> mine;
    size_t address_size = 0;
    for (int peer : peers) {
        std::vector<char> bytes = transport_->createPair(peer)->address().bytes();
        address_size = bytes.size();
        mine.insert(mine.end(), bytes.begin(), bytes.end());
    }

    std::vector<int32_t> members(peers.begin(), peers.end());
    std::string netif =
        std::string(device_->netif().name) + " (" + device_->netif().text + ")";
    dm_gloo_meeting meeting = {};
    meeting.store = store_;
    meeting.name = name_.c_str();
    meeting.stage = stage.c_str();
    meeting.rank = rank_;
    meeting.ranks = ranks_;
    meeting.peers = members.data();
    meeting.peer_count = members.size();
    meeting.address_size = address_size;
    meeting.netif = netif.c_str();
    meeting.loopback = device_->netif().loopback;

    std::vector<char> theirs(mine.size());
    dm_error error = DM_ERROR_INIT;
    AbortableWait abortable(wait, waiter_);
    check(dm_gloo_meet(&meeting, mine.data(), theirs.data(), abortable.get(), &error),
          error);

    std::vector<std::vector<char>> addresses;
    for (size_t i = 0; i < peers.size(); i++) {
        auto begin = theirs.begin() + static_cast<std::ptrdiff_t>(i * address_size);
        addresses.emplace_back(begin,
                               begin + static_cast<std::ptrdiff_t>(address_size));
    }
    Opening(*device_, *transport_, waiter_, peers, std::move(addresses)).wait();
    greet(stage, peers);
    dm_gloo_sockets_note(this, mine.data(), theirs.data(), peers.size(), address_size);
}

/* A connection is open on one side before the other side knows. A message each way
 * over all of them shows that both do. */
void
Links::greet(const std::string &stage, const std::vector<int> &peers)
{
    transport_->set_key(hash("greet " + stage));
    Buffer nothing(*transport_, nullptr, 0);
    for (int peer : peers) {
        nothing.recv(peer, 0);
        nothing.send(peer, 0);
    }
    for (size_t i = 0; i < peers.size(); i++) {
        nothing.waitRecv();
        nothing.waitSend();
    }
}

void
Links::shut() noexcept
{
    if (transport_ == nullptr) {
        return;
    }
    dm_gloo_sockets_forget(this);
    for (int peer = 0; peer < size_; peer++) {
        auto &pair = transport_->getPair(peer);
        if (pair != nullptr) {
            device_->hurry();
            pair.reset();
        }
    }
}

} // namespace dm_gloo
