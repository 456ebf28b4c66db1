/* Text for errors: see dm_text.h. */
#include "group/dm_text.h"

#include <stdio.h>

enum { SHOWN = 6 };

void
dm_text_ranks(const int32_t *ranks, int32_t n, char text[DM_RANKS_TEXT_SIZE])
{
    size_t used = (size_t)snprintf(text, DM_RANKS_TEXT_SIZE, n == 1 ? "rank" : "ranks");
    /* Leaving out one rank would not make the text shorter. */
    int32_t shown = n <= SHOWN + 2 ? n : SHOWN;
    for (int32_t i = 0; i < shown; i++) {
        used += (size_t)snprintf(text + used, DM_RANKS_TEXT_SIZE - used, "%s %d",
                                 i == 0 ? "" : ",", (int)ranks[i]);
    }
    if (shown < n) {
        snprintf(text + used, DM_RANKS_TEXT_SIZE - used, ", ..., %d (%d in all)",
                 (int)ranks[n - 1], (int)n);
    }
}
