/* The wire protocol of torch's TCPStore: frames in memory, no I/O, no locks.
 *
 * A request is one opcode byte and its fields; numbers are little-endian; a text or
 * value is a u64 length and its bytes; a list is a u64 count and its items. Keys carry
 * a leading '/', which clients add and strip. Requests without an answer: VALIDATE,
 * SET, APPEND, MULTI_SET, QUEUE_PUSH, GOODBYE.
 *
 * A client opens with VALIDATE and PING. Torch's server echoes PING's number whatever
 * it is. Ours answers a number that begins with DM_WIRE_HELLO by one that begins with
 * DM_WIRE_HELLO_OURS; so a client of ours knows whom it talks to, for no extra round
 * trip, and uses the opcodes from 0x80 up only there (torch's server closes the
 * connection on an opcode it does not know).
 */
#ifndef DM_WIRE_H
#define DM_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dm_status.h"
#include "store/dm_store.h"

#define DM_WIRE_MAGIC UINT32_C(0x3C85F7CE)

/* The upper halves of PING's number and of its answer. Torch's clients send their pid,
 * which is smaller. */
#define DM_WIRE_HELLO UINT32_C(0x444D0000)
#define DM_WIRE_HELLO_OURS UINT32_C(0xBBB20000)

/* Lower half of the question: this connection is not its client's first one. */
#define DM_WIRE_HELLO_SECONDARY UINT32_C(1)
/* Lower half of the answer: TOKEN must come next. */
#define DM_WIRE_HELLO_TOKEN UINT32_C(1)

enum dm_wire_op {
    DM_WIRE_VALIDATE = 0,     /* u32 magic */
    DM_WIRE_SET = 1,          /* key value */
    DM_WIRE_COMPARE_SET = 2,  /* key expected desired -> value */
    DM_WIRE_GET = 3,          /* key -> value, empty when absent */
    DM_WIRE_ADD = 4,          /* key i64 -> i64 */
    DM_WIRE_CHECK = 5,        /* keys -> u8: 0 all there, 1 not */
    DM_WIRE_WAIT = 6,         /* keys -> u8: 0 when all there */
    DM_WIRE_NUM_KEYS = 7,     /* -> i64 */
    DM_WIRE_DELETE_KEY = 8,   /* key -> i64: 1 deleted, 0 absent */
    DM_WIRE_APPEND = 9,       /* key value */
    DM_WIRE_MULTI_GET = 10,   /* keys -> values */
    DM_WIRE_MULTI_SET = 11,   /* pairs */
    DM_WIRE_CANCEL_WAIT = 12, /* -> u8: 1, after the wait's own answer if that raced */
    DM_WIRE_PING = 13,        /* u32 -> u32 */
    DM_WIRE_QUEUE_PUSH = 14,  /* key value */
    DM_WIRE_QUEUE_POP = 15,   /* key -> i64 items taken (0, 1), value if 1 */
    DM_WIRE_QUEUE_LEN = 16,   /* key -> i64 */
    DM_WIRE_LIST_KEYS = 17,   /* -> i64 count, keys */
    DM_WIRE_BARRIER = 18, /* key i64 world -> u8: 0; counts in the key, usable once */

    /* Ours. Each answer begins with a dm_wire_answer byte. Those that wait are ended by
     * CANCEL_WAIT like WAIT is. */
    DM_WIRE_TOKEN = 0x80,       /* value -> OK or REFUSED */
    DM_WIRE_WAIT_GET = 0x81,    /* keys -> values, when all are there */
    DM_WIRE_WAIT_UNLESS = 0x82, /* keys, keys -> OK, or GONE with one's value */
    DM_WIRE_WAIT_POP = 0x83,    /* key -> value */
    DM_WIRE_WAIT_ALL = 0x84,    /* key i64 world -> OK: a barrier, reusable */
    DM_WIRE_TRY_ADD = 0x85,     /* key i64 -> i64, or REFUSED */
    DM_WIRE_TRY_APPEND = 0x86,  /* key value -> OK or REFUSED */
    DM_WIRE_WHICH = 0x87,       /* keys -> as many bytes: 1 there, 0 not */
    DM_WIRE_WILL = 0x88,        /* key value -> OK: set it when this connection drops */
    DM_WIRE_GOODBYE = 0x89,     /* forget this connection's wills */
};

enum dm_wire_answer {
    DM_WIRE_OK = 0,
    DM_WIRE_CANCELLED = 1,
    DM_WIRE_GONE = 2,    /* and a value */
    DM_WIRE_REFUSED = 3, /* and a text that says why */
};

enum {
    DM_WIRE_FRAME_MAX = 64 * 1024 * 1024, /* bytes of one request */
    DM_WIRE_KEYS_MAX = 1024 * 1024,       /* items of one list */
    DM_WIRE_TOKEN_MAX = 4096,
};

typedef struct dm_wire_slice {
    const char *data; /* borrowed */
    size_t size;
} dm_wire_slice;

/* --- decoding ------------------------------------------------------------------------ */

/* A request, pointing into the bytes it was decoded from. Fields that its opcode does
 * not have are zero. */
typedef struct dm_wire_request {
    uint8_t op;
    dm_wire_slice key;
    dm_wire_slice value;    /* also the desired one, and the token */
    dm_wire_slice expected; /* of COMPARE_SET */
    int64_t number;         /* amount, world, magic or nonce */
    size_t n;               /* items in `items` */
    size_t n_unless;
    dm_wire_slice items; /* for dm_wire_next: keys, or key and value by turns */
    dm_wire_slice unless;
} dm_wire_request;

/* How far the decoding of an incomplete request has come, so that bytes that come one
 * by one cost no more than those that come together. Zeroed before each request. */
typedef struct dm_wire_scan {
    size_t at;      /* bytes understood */
    unsigned field; /* fields understood */
    bool in_list;
    uint64_t left; /* items of the list that is being read */
    size_t n[2];   /* lists: counts, then where their items begin and end */
    size_t begin[2];
    size_t end[2];
    unsigned lists;
    size_t part_at[3]; /* keys and values in order */
    size_t part_size[3];
    unsigned parts;
    int64_t number;
} dm_wire_scan;

/* Decodes the request at the start of `data`. DM_OK: `request` and `used` are filled
 * and the scan is zeroed. DM_ERR_AGAIN (no text): more bytes are needed; call again
 * with at least these ones and the same scan. DM_ERR_PROTOCOL: no well-behaved client
 * sends that. Never reads beyond `size`, whatever the bytes claim. */
dm_status
dm_wire_decode(const char *data, size_t size, dm_wire_scan *scan,
               dm_wire_request *request, size_t *used, dm_error *err);

/* Takes the next item off `items` of a decoded request; false at the end. */
bool
dm_wire_next(dm_wire_slice *items, dm_wire_slice *item);

uint32_t
dm_wire_load_u32(const char *bytes);

uint64_t
dm_wire_load_u64(const char *bytes);

/* Whether `op` waits at the server, and so is ended by CANCEL_WAIT. */
bool
dm_wire_op_waits(uint8_t op);

/* --- encoding ------------------------------------------------------------------------ */

/* Bytes that grow. A put that finds no memory sets `failed` and the later ones do
 * nothing, so that only the end needs a check. */
typedef struct dm_wire_buffer {
    char *data;
    size_t size;
    size_t capacity;
    bool failed;
} dm_wire_buffer;

/* Frees the memory; the buffer is empty and usable. */
void
dm_wire_buffer_fini(dm_wire_buffer *buffer);

/* Room for `size` more bytes; false (and `failed`) without memory. */
bool
dm_wire_reserve(dm_wire_buffer *buffer, size_t size);

void
dm_wire_put_u8(dm_wire_buffer *buffer, uint8_t value);

void
dm_wire_put_u32(dm_wire_buffer *buffer, uint32_t value);

void
dm_wire_put_u64(dm_wire_buffer *buffer, uint64_t value);

/* The bytes alone. */
void
dm_wire_put_raw(dm_wire_buffer *buffer, const void *data, size_t size);

/* Length and bytes. */
void
dm_wire_put_bytes(dm_wire_buffer *buffer, const void *data, size_t size);

/* Length, '/' and the key. */
void
dm_wire_put_key(dm_wire_buffer *buffer, const char *key);

/* Count and keys. */
void
dm_wire_put_keys(dm_wire_buffer *buffer, const char *const *keys, size_t n);

/* DM_ERR_NO_MEMORY if a put has failed. */
dm_status
dm_wire_check(const dm_wire_buffer *buffer, dm_error *err);

#endif
