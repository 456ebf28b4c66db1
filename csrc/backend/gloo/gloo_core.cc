/* Errors inside the bridge: see gloo_core.h. */
#include "backend/gloo/gloo_core.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace dm_gloo {

void
fail(dm_status status, const char *format, ...)
{
    Failure failure = {{status, 0, {0}}};
    va_list args;
    va_start(args, format);
    vsnprintf(failure.error.text, sizeof(failure.error.text), format, args);
    va_end(args);
    throw failure;
}

void
check(dm_status status, const dm_error &error)
{
    if (status != DM_OK) {
        throw Failure{error};
    }
}

const char *
plain_text(const char *what) noexcept
{
    const char *end = what[0] == '[' ? std::strstr(what, "] ") : nullptr;
    return end != nullptr ? end + 2 : what;
}

} // namespace dm_gloo
