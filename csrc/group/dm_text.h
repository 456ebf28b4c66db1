/* Text that several files of group/ put into errors. */
#ifndef DM_TEXT_H
#define DM_TEXT_H

#include <stddef.h>
#include <stdint.h>

/* Room for the text of dm_text_ranks. */
enum { DM_RANKS_TEXT_SIZE = 128 };

/* "rank 5", "ranks 2, 3", "ranks 0, 4, 8, 12, 16, 20, ..., 124 (32 in all)". */
void
dm_text_ranks(const int32_t *ranks, int32_t n, char text[DM_RANKS_TEXT_SIZE]);

#endif
