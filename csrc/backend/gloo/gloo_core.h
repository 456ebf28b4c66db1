/* The core's C vocabulary for the C++ of the bridge, and how errors travel in it.
 *
 * Inside the bridge an error is an exception: our own Failure, which carries a
 * finished record, or one of gloo's. Nothing leaves the bridge as an exception:
 * guard() is the only place that catches.
 */
#ifndef GLOO_CORE_H
#define GLOO_CORE_H

#include <exception>
#include <new>
#include <utility>

#include <gloo/common/error.h>

extern "C" {
#include "backend/dm_backend.h"
#include "backend/gloo/dm_gloo_meet.h"
#include "backend/gloo/dm_gloo_report.h"
#include "backend/gloo/dm_gloo_sockets.h"
#include "backend/gloo/dm_netif.h"
#include "backend/reduce/dm_reduce.h"
#include "base/dm_alloc.h"
#include "base/dm_clock.h"
#include "base/dm_dtype.h"
#include "base/dm_status.h"
}

namespace dm_gloo {

/* Not a std::exception: nothing of gloo's may catch it by that base. */
struct Failure {
    dm_error error;
};

[[noreturn]] void
fail(dm_status status, const char *format, ...) DM_PRINTF(2, 3);

/* Throws when `status` is an error; `error` is its record. */
void
check(dm_status status, const dm_error &error);

/* gloo's text without the "[file:line] " that it begins with. */
const char *
plain_text(const char *what) noexcept;

/* Runs `body` and turns what it throws into a status and a record. `on_gloo` decides
 * what an exception of gloo's means: it knows who was waited for. */
template <typename Body, typename OnGloo>
dm_status
guard(dm_error *err, Body &&body, OnGloo &&on_gloo) noexcept
{
    try {
        std::forward<Body>(body)();
        return DM_OK;
    }
    catch (const Failure &failure) {
        if (err != nullptr) {
            *err = failure.error;
        }
        return failure.error.status;
    }
    catch (const std::bad_alloc &) {
        return dm_error_set_no_memory(err, "what gloo needs");
    }
    catch (const gloo::IoException &e) {
        return std::forward<OnGloo>(on_gloo)(plain_text(e.what()), err);
    }
    catch (const std::exception &e) {
        return dm_error_set(err, DM_ERR_LIBRARY, "gloo: %s", plain_text(e.what()));
    }
    catch (...) {
        return dm_error_set(err, DM_ERR_LIBRARY, "gloo: an unknown exception");
    }
}

/* As above where no peer is involved. */
template <typename Body>
dm_status
guard(dm_error *err, Body &&body) noexcept
{
    return guard(err, std::forward<Body>(body), [](const char *text, dm_error *e) {
        return dm_error_set(e, DM_ERR_CONNECTION, "gloo: %s", text);
    });
}

} // namespace dm_gloo

#endif
