/* The wait in flight of one group: see gloo_waiter.h. */
#include "backend/gloo/gloo_waiter.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dm_gloo {

namespace {

constexpr int64_t kFirstReportNs = DM_NS_PER_S;
constexpr int64_t kLastReportNs = 30 * DM_NS_PER_S;

bool
is_point_to_point(int32_t kind)
{
    return kind == DM_OP_SEND || kind == DM_OP_RECV;
}

/* Whether two ranks, one of which waits for the other, can never come together. */
bool
clash(const dm_gloo_report &mine, int32_t rank, const dm_gloo_report &theirs)
{
    if (is_point_to_point(mine.kind) && is_point_to_point(theirs.kind)) {
        return mine.kind != theirs.kind && theirs.peer == rank &&
               mine.key == theirs.key && mine.bytes != theirs.bytes;
    }
    return !is_point_to_point(mine.kind) && !is_point_to_point(theirs.kind) &&
           mine.turn == theirs.turn && mine.key != theirs.key;
}

} // namespace

Waiter::Waiter(const dm_comm_config &config)
    : rank_(config.rank), size_(config.size), ranks_(config.ranks), name_(config.name),
      store_(config.store)
{
}

void
Waiter::begin(const dm_wait *wait) noexcept
{
    wait_ = wait;
    op_ = nullptr;
    peer_ = DM_ANY_RANK;
    started_ = dm_clock_now();
    /* Everybody's report should be there when the first of them times out. */
    int64_t half =
        wait->deadline == DM_FOREVER ? kFirstReportNs : (wait->deadline - started_) / 2;
    next_report_ = started_ + std::min(kFirstReportNs, half);
}

void
Waiter::begin_operation(const dm_op *op, uint64_t turn, uint64_t key) noexcept
{
    op_ = op;
    turn_ = turn;
    key_ = key;
}

void
Waiter::look()
{
    if (is_aborted()) {
        fail(DM_ERR_ABORTED, "aborted while waiting for %s", peer_text(peer_).text);
    }
    dm_error error = DM_ERROR_INIT;
    dm_status status = dm_wait_poll(wait_, &error);
    if (status == DM_ERR_TIMEOUT) {
        fail_late();
    }
    check(status, error);
    if (op_ != nullptr && dm_clock_now() >= next_report_) {
        report();
    }
}

/* --- reports ------------------------------------------------------------------------ */

void
Waiter::put_report(dm_gloo_report *mine)
{
    *mine = {};
    mine->turn = turn_;
    mine->key = key_;
    mine->bytes = op_->count * dm_dtype_size(op_->dtype);
    mine->kind = op_->kind;
    mine->peer = peer_;
    static_assert(sizeof(mine->text) >= size_t{DM_OP_TEXT_SIZE}, "a report's text");
    dm_op_describe(op_, mine->text);
    dm_gloo_report_put(store_, name_, rank_, mine);
}

void
Waiter::report()
{
    int64_t now = dm_clock_now();
    next_report_ = now + std::min(now - started_, kLastReportNs);
    dm_gloo_report mine, theirs;
    put_report(&mine);
    if (peer_ != DM_ANY_RANK && dm_gloo_report_get(store_, name_, peer_, &theirs) &&
        clash(mine, rank_, theirs)) {
        fail(DM_ERR_MISMATCH, "%s is in %s while rank %d (group rank %d) is in %s",
             peer_text(peer_).text, theirs.text, ranks_[rank_], rank_, mine.text);
    }
}

void
Waiter::fail_late()
{
    double seconds = static_cast<double>(dm_clock_now() - started_) / DM_NS_PER_S;
    PeerText whom = peer_text(peer_);
    if (op_ == nullptr || peer_ == DM_ANY_RANK) {
        fail(DM_ERR_TIMEOUT, "timed out after %.1f s waiting for %s", seconds,
             whom.text);
    }

    /* Along those who wait for each other in this same operation, to the one who does
     * not: it is elsewhere. */
    dm_gloo_report mine, theirs;
    put_report(&mine);
    int last = peer_;
    for (int32_t hops = 0; hops < size_; hops++) {
        if (!dm_gloo_report_get(store_, name_, last, &theirs) ||
            theirs.turn != mine.turn || theirs.key != mine.key || theirs.peer < 0 ||
            theirs.peer >= size_) {
            break;
        }
        last = theirs.peer;
        if (last == rank_ || last == peer_) {
            last = peer_;
            break;
        }
    }
    if (last == peer_) {
        fail(DM_ERR_TIMEOUT, "timed out after %.1f s waiting for %s", seconds,
             whom.text);
    }
    fail(DM_ERR_TIMEOUT, "timed out after %.1f s waiting for %s, who waits for %s",
         seconds, whom.text, peer_text(last).text);
}

/* --- interrupting ------------------------------------------------------------------- */

Waiter::InFlight::InFlight(Waiter &waiter, gloo::transport::UnboundBuffer &buffer,
                           bool sending)
    : waiter_(waiter)
{
    std::unique_lock<std::mutex> lock(waiter_.mutex_);
    if (waiter_.is_aborted()) {
        lock.unlock();
        waiter_.look();
    }
    waiter_.in_flight_ = &buffer;
    waiter_.sending_ = sending;
}

Waiter::InFlight::~InFlight()
{
    std::lock_guard<std::mutex> lock(waiter_.mutex_);
    waiter_.in_flight_ = nullptr;
}

void
Waiter::interrupt_locked() noexcept
{
    if (in_flight_ == nullptr) {
        return;
    }
    if (sending_) {
        in_flight_->abortWaitSend();
    }
    else {
        in_flight_->abortWaitRecv();
    }
}

void
Waiter::on_slice() noexcept
{
    std::lock_guard<std::mutex> lock(mutex_);
    interrupt_locked();
}

void
Waiter::abort() noexcept
{
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_.store(true, std::memory_order_release);
    interrupt_locked();
}

/* --- texts -------------------------------------------------------------------------- */

Waiter::PeerText
Waiter::peer_text(int peer) const noexcept
{
    PeerText text;
    if (peer == DM_ANY_RANK) {
        std::snprintf(text.text, sizeof(text.text), "any rank");
    }
    else {
        std::snprintf(text.text, sizeof(text.text), "rank %d (group rank %d)",
                      ranks_[peer], peer);
    }
    return text;
}

dm_status
Waiter::describe(int peer, const char *text, dm_error *err) const noexcept
{
    static const char *const gone[] = {"losed by peer", "reset by peer", "Broken pipe",
                                       "onnection refused"};
    for (const char *sign : gone) {
        if (std::strstr(text, sign) != nullptr) {
            return dm_error_set(err, DM_ERR_PEER, "%s closed its connection",
                                peer_text(peer).text);
        }
    }
    return dm_error_set(err, DM_ERR_CONNECTION, "the connection to %s failed: %s",
                        peer_text(peer).text, text);
}

} // namespace dm_gloo
