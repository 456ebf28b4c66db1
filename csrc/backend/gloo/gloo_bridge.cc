/* The table that the bridge hands to the core, and the life of a communicator.
 *
 * Locks: `life` guards what says whether a call is in flight and who closes the
 * connections; it is never held while anything waits for a peer. comm_abort marks and
 * interrupts; the call in flight closes the connections on its way out, or comm_abort
 * itself where there is none.
 */
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "backend/gloo/gloo_collectives.h"
#include "backend/gloo/gloo_core.h"
#include "backend/gloo/gloo_links.h"
#include "backend/gloo/gloo_transport.h"

using dm_gloo::fail;
using dm_gloo::guard;
using dm_gloo::Links;
using dm_gloo::Waiter;

struct dm_comm {
    explicit dm_comm(const dm_comm_config &config)
        : rank(config.rank), size(config.size), ranks(config.ranks), name(config.name),
          store(config.store), waiter(config), links(config, waiter)
    {
    }

    const int32_t rank;
    const int32_t size;
    const int32_t *const ranks;
    const char *const name;
    dm_store *const store;

    Waiter waiter;
    Links links; /* uses waiter */
    uint64_t turns = 0;

    std::mutex life;
    bool in_call = false; /* these two: guarded by life */
    bool shut = false;
};

namespace {

/* Which failures of a call leave the group of no more use. */
bool
run_breaks(dm_status status) noexcept
{
    return status <= DM_ERR_TIMEOUT;
}

bool
connect_breaks(dm_status status) noexcept
{
    return status != DM_OK;
}

/* Leaves word why the group broke, for the ranks that will only see a connection
 * close, and takes over an earlier rank's word where we saw no more than that. */
void
explain(dm_comm *comm, dm_status status, dm_error *err) noexcept
{
    if (comm->store == nullptr) {
        return;
    }
    const int32_t self = comm->ranks[comm->rank];
    dm_gloo_cause mine = {status, {0}};
    switch (status) {
    case DM_ERR_PEER:
        snprintf(mine.text, sizeof(mine.text), "%.400s (noticed by rank %d)", err->text,
                 self);
        break;
    case DM_ERR_MISMATCH:
        snprintf(mine.text, sizeof(mine.text), "%.400s", err->text);
        break;
    default:
        snprintf(mine.text, sizeof(mine.text), "rank %d left the group: %.400s", self,
                 err->text);
        break;
    }
    dm_gloo_cause cause = dm_gloo_last_words(comm->store, comm->name, &mine);
    if (status == DM_ERR_PEER && cause.status != DM_OK &&
        strcmp(cause.text, mine.text) != 0) {
        dm_error_set(err, cause.status == DM_ERR_MISMATCH ? cause.status : status, "%s",
                     cause.text);
    }
}

/* A process that does not ignore SIGPIPE would die of a peer's death: gloo writes to
 * sockets without a thought of it. Holds the signal back while it lives. */
class PipesQuiet {
  public:
    PipesQuiet() noexcept
    {
        struct sigaction action;
        active_ =
            sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler != SIG_IGN;
        if (active_) {
            sigemptyset(&pipe_);
            sigaddset(&pipe_, SIGPIPE);
            pthread_sigmask(SIG_BLOCK, &pipe_, &old_);
        }
    }

    ~PipesQuiet()
    {
        if (active_ && sigismember(&old_, SIGPIPE) == 0) {
            struct timespec now = {0, 0};
            while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
            }
            pthread_sigmask(SIG_SETMASK, &old_, nullptr);
        }
    }

    PipesQuiet(const PipesQuiet &) = delete;
    PipesQuiet &
    operator=(const PipesQuiet &) = delete;

  private:
    bool active_;
    sigset_t pipe_;
    sigset_t old_;
};

/* One call into gloo: begins, runs the body, and cleans up behind a failure. */
template <typename Body>
dm_status
call(dm_comm *comm, const dm_wait *wait, dm_error *err, bool (*breaks)(dm_status),
     Body &&body) noexcept
{
    PipesQuiet quiet;
    dm_error own = DM_ERROR_INIT;
    dm_error *record = err != nullptr ? err : &own;
    {
        std::lock_guard<std::mutex> lock(comm->life);
        if (comm->waiter.is_aborted()) {
            return dm_error_set(record, DM_ERR_ABORTED, "aborted");
        }
        if (comm->shut) {
            return dm_error_set(record, DM_ERR_CLOSED,
                                "the connections are closed after an earlier failure");
        }
        comm->in_call = true;
    }
    comm->waiter.begin(wait);
    dm_status status =
        guard(record, std::forward<Body>(body), [comm](const char *text, dm_error *e) {
            return comm->waiter.describe(comm->waiter.peer(), text, e);
        });
    if (breaks(status)) {
        explain(comm, status, record);
        status = record->status;
    }

    std::lock_guard<std::mutex> lock(comm->life);
    comm->in_call = false;
    if ((breaks(status) || comm->waiter.is_aborted()) && !comm->shut) {
        comm->shut = true;
        comm->links.shut();
    }
    return status;
}

dm_status
comm_new(const dm_comm_config *config, dm_comm **comm, dm_error *err)
{
    return guard(err, [&] { *comm = new dm_comm(*config); });
}

dm_status
comm_connect(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    if (comm->size == 1) {
        return DM_OK;
    }
    return call(comm, wait, err, connect_breaks, [&] { comm->links.open(*wait); });
}

dm_status
comm_run(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    return call(comm, wait, err, run_breaks, [&] {
        if (comm->size == 1) {
            dm_gloo::run_alone(*op);
            return;
        }
        if (!dm_gloo::is_point_to_point(op->kind)) {
            comm->turns++;
        }
        uint64_t key = dm_gloo::key_of(*op, comm->turns);
        comm->links.prepare(*op, *wait);
        comm->waiter.begin_operation(op, comm->turns, key);
        dm_gloo::run_operation(comm->links, *op, key);
    });
}

void
comm_abort(dm_comm *comm)
{
    PipesQuiet quiet;
    comm->waiter.abort();
    std::lock_guard<std::mutex> lock(comm->life);
    if (!comm->in_call && !comm->shut) {
        comm->shut = true;
        comm->links.shut();
    }
}

void
comm_free(dm_comm *comm, bool forked)
{
    /* A child has gloo's memory but not its thread, and the sockets are its
     * parent's. */
    if (!forked) {
        PipesQuiet quiet;
        delete comm;
    }
}

const char *
comm_transport(const dm_comm *comm)
{
    return comm->size == 1 ? "none" : "tcp";
}

const dm_backend table = {
    DM_BACKEND_ABI, "gloo",   0,          dm_gloo::supports, comm_new,
    comm_connect,   comm_run, comm_abort, comm_free,         comm_transport,
};

} // namespace

extern "C" __attribute__((visibility("default"))) const dm_backend *
dm_gloo_backend(int abi);

extern "C" const dm_backend *
dm_gloo_backend(int abi)
{
    return abi == DM_BACKEND_ABI ? &table : nullptr;
}
