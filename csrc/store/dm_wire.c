/* The wire protocol of torch's TCPStore: see dm_wire.h. */
#include "store/dm_wire.h"

#include <assert.h>
#include <string.h>

#include "base/dm_alloc.h"

/* --- numbers --------------------------------------------------------------------------- */

uint32_t
dm_wire_load_u32(const char *bytes)
{
    const unsigned char *b = (const unsigned char *)bytes;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
           (uint32_t)b[3] << 24;
}

uint64_t
dm_wire_load_u64(const char *bytes)
{
    return (uint64_t)dm_wire_load_u32(bytes) | (uint64_t)dm_wire_load_u32(bytes + 4)
                                                   << 32;
}

static void
store_le(char *bytes, uint64_t value, int size)
{
    for (int i = 0; i < size; i++) {
        bytes[i] = (char)(value >> (8 * i));
    }
}

/* --- what a request is made of ------------------------------------------------------------ */

/* Field by field: k key, v value, t token, 4 u32, 8 i64, K list of keys, P list of key
 * and value pairs. NULL: no such opcode. */
static const char *
fields_of(uint8_t op)
{
    switch ((enum dm_wire_op)op) {
    case DM_WIRE_VALIDATE:
    case DM_WIRE_PING:
        return "4";
    case DM_WIRE_SET:
    case DM_WIRE_APPEND:
    case DM_WIRE_QUEUE_PUSH:
    case DM_WIRE_TRY_APPEND:
    case DM_WIRE_WILL:
        return "kv";
    case DM_WIRE_COMPARE_SET:
        return "kvv";
    case DM_WIRE_GET:
    case DM_WIRE_DELETE_KEY:
    case DM_WIRE_QUEUE_POP:
    case DM_WIRE_QUEUE_LEN:
    case DM_WIRE_WAIT_POP:
        return "k";
    case DM_WIRE_ADD:
    case DM_WIRE_BARRIER:
    case DM_WIRE_WAIT_ALL:
    case DM_WIRE_TRY_ADD:
        return "k8";
    case DM_WIRE_CHECK:
    case DM_WIRE_WAIT:
    case DM_WIRE_MULTI_GET:
    case DM_WIRE_WAIT_GET:
    case DM_WIRE_WHICH:
        return "K";
    case DM_WIRE_WAIT_UNLESS:
        return "KK";
    case DM_WIRE_MULTI_SET:
        return "P";
    case DM_WIRE_NUM_KEYS:
    case DM_WIRE_CANCEL_WAIT:
    case DM_WIRE_LIST_KEYS:
    case DM_WIRE_GOODBYE:
        return "";
    case DM_WIRE_TOKEN:
        return "t";
    }
    return NULL;
}

bool
dm_wire_op_waits(uint8_t op)
{
    return op == DM_WIRE_WAIT || op == DM_WIRE_BARRIER ||
           (op >= DM_WIRE_WAIT_GET && op <= DM_WIRE_WAIT_ALL);
}

/* --- decoding ---------------------------------------------------------------------------- */

/* Takes `want` bytes; NULL when they have not come yet. */
static const char *
take(const char *data, size_t size, dm_wire_scan *scan, size_t want)
{
    if (size - scan->at < want) {
        return NULL;
    }
    const char *bytes = data + scan->at;
    scan->at += want;
    return bytes;
}

/* A length and its bytes, both or nothing. */
static dm_status
take_part(const char *data, size_t size, dm_wire_scan *scan, size_t limit,
          const char *what, dm_wire_slice *part, dm_error *err)
{
    if (size - scan->at < 8) {
        return DM_ERR_AGAIN;
    }
    uint64_t length = dm_wire_load_u64(data + scan->at);
    if (length > limit) {
        return dm_error_set(err, DM_ERR_PROTOCOL,
                            "%s of %llu bytes, at most %zu are "
                            "allowed",
                            what, (unsigned long long)length, limit);
    }
    if (size - scan->at - 8 < length) {
        return DM_ERR_AGAIN;
    }
    part->data = data + scan->at + 8;
    part->size = (size_t)length;
    scan->at += 8 + (size_t)length;
    return DM_OK;
}

static dm_status
take_list(const char *data, size_t size, dm_wire_scan *scan, bool pairs, dm_error *err)
{
    unsigned list = scan->lists;
    if (!scan->in_list) {
        const char *bytes = take(data, size, scan, 8);
        if (bytes == NULL) {
            return DM_ERR_AGAIN;
        }
        uint64_t count = dm_wire_load_u64(bytes);
        if (count > DM_WIRE_KEYS_MAX) {
            return dm_error_set(err, DM_ERR_PROTOCOL,
                                "a list of %llu items, at most %d are allowed",
                                (unsigned long long)count, DM_WIRE_KEYS_MAX);
        }
        scan->in_list = true;
        scan->n[list] = (size_t)count;
        scan->begin[list] = scan->at;
        scan->left = pairs ? 2 * count : count;
    }
    while (scan->left > 0) {
        bool value = pairs && scan->left % 2 == 1;
        dm_wire_slice item;
        DM_TRY(take_part(data, size, scan,
                         value ? (size_t)DM_STORE_VALUE_MAX : (size_t)DM_STORE_KEY_MAX,
                         value ? "a value" : "a key", &item, err));
        scan->left--;
    }
    scan->in_list = false;
    scan->end[list] = scan->at;
    scan->lists++;
    return DM_OK;
}

static dm_status
take_field(const char *data, size_t size, dm_wire_scan *scan, char field, dm_error *err)
{
    dm_wire_slice part = {NULL, 0};
    const char *bytes;
    size_t limit = DM_STORE_VALUE_MAX;
    const char *what = "a value";
    switch (field) {
    case '4':
        bytes = take(data, size, scan, 4);
        if (bytes != NULL) {
            scan->number = dm_wire_load_u32(bytes);
        }
        return bytes != NULL ? DM_OK : DM_ERR_AGAIN;
    case '8':
        bytes = take(data, size, scan, 8);
        if (bytes != NULL) {
            scan->number = (int64_t)dm_wire_load_u64(bytes);
        }
        return bytes != NULL ? DM_OK : DM_ERR_AGAIN;
    case 'K':
    case 'P':
        return take_list(data, size, scan, field == 'P', err);
    case 'k':
        limit = DM_STORE_KEY_MAX;
        what = "a key";
        break;
    case 't':
        limit = DM_WIRE_TOKEN_MAX;
        what = "a token";
        break;
    default:
        assert(field == 'v');
    }
    DM_TRY(take_part(data, size, scan, limit, what, &part, err));
    scan->part_at[scan->parts] = (size_t)(part.data - data);
    scan->part_size[scan->parts] = part.size;
    scan->parts++;
    return DM_OK;
}

/* The request that a finished scan has found. */
static void
fill(const char *data, const dm_wire_scan *scan, const char *fields,
     dm_wire_request *request)
{
    *request = (dm_wire_request){.op = (uint8_t)data[0], .number = scan->number};
    dm_wire_slice parts[3] = {{0}};
    for (unsigned i = 0; i < scan->parts; i++) {
        parts[i] = (dm_wire_slice){data + scan->part_at[i], scan->part_size[i]};
    }
    if (fields[0] == 't') {
        request->value = parts[0];
    }
    else {
        request->key = parts[0];
        request->expected = scan->parts == 3 ? parts[1] : parts[2];
        request->value = scan->parts == 3 ? parts[2] : parts[1];
    }
    if (scan->lists >= 1) {
        request->n = scan->n[0];
        request->items =
            (dm_wire_slice){data + scan->begin[0], scan->end[0] - scan->begin[0]};
    }
    if (scan->lists == 2) {
        request->n_unless = scan->n[1];
        request->unless =
            (dm_wire_slice){data + scan->begin[1], scan->end[1] - scan->begin[1]};
    }
}

dm_status
dm_wire_decode(const char *data, size_t size, dm_wire_scan *scan,
               dm_wire_request *request, size_t *used, dm_error *err)
{
    if (size == 0) {
        return DM_ERR_AGAIN;
    }
    const char *fields = fields_of((uint8_t)data[0]);
    if (fields == NULL) {
        return dm_error_set(err, DM_ERR_PROTOCOL, "no opcode 0x%02x",
                            (unsigned)(unsigned char)data[0]);
    }
    if (scan->at == 0) {
        scan->at = 1;
    }
    while (fields[scan->field] != '\0') {
        dm_status status = take_field(data, size, scan, fields[scan->field], err);
        if (status == DM_ERR_AGAIN && size >= DM_WIRE_FRAME_MAX) {
            return dm_error_set(err, DM_ERR_PROTOCOL, "a request of more than %d bytes",
                                DM_WIRE_FRAME_MAX);
        }
        DM_TRY(status);
        scan->field++;
    }
    fill(data, scan, fields, request);
    *used = scan->at;
    memset(scan, 0, sizeof(*scan));
    return DM_OK;
}

bool
dm_wire_next(dm_wire_slice *items, dm_wire_slice *item)
{
    if (items->size < 8) {
        return false;
    }
    uint64_t length = dm_wire_load_u64(items->data);
    assert(length <= items->size - 8);
    item->data = items->data + 8;
    item->size = (size_t)length;
    items->data += 8 + length;
    items->size -= 8 + (size_t)length;
    return true;
}

/* --- encoding ------------------------------------------------------------------------------ */

void
dm_wire_buffer_fini(dm_wire_buffer *buffer)
{
    dm_free(buffer->data);
    *buffer = (dm_wire_buffer){0};
}

bool
dm_wire_reserve(dm_wire_buffer *buffer, size_t size)
{
    if (buffer->failed) {
        return false;
    }
    if (buffer->capacity - buffer->size >= size) {
        return true;
    }
    size_t capacity = buffer->capacity != 0 ? buffer->capacity : 128;
    while (capacity - buffer->size < size && capacity <= SIZE_MAX / 2) {
        capacity *= 2;
    }
    char *data = capacity - buffer->size >= size
                     ? dm_realloc_array(buffer->data, capacity, 1)
                     : NULL;
    if (data == NULL) {
        buffer->failed = true;
        return false;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void
dm_wire_put_raw(dm_wire_buffer *buffer, const void *data, size_t size)
{
    if (size != 0 && dm_wire_reserve(buffer, size)) {
        memcpy(buffer->data + buffer->size, data, size);
        buffer->size += size;
    }
}

void
dm_wire_put_u8(dm_wire_buffer *buffer, uint8_t value)
{
    dm_wire_put_raw(buffer, &value, 1);
}

void
dm_wire_put_u32(dm_wire_buffer *buffer, uint32_t value)
{
    char bytes[4];
    store_le(bytes, value, 4);
    dm_wire_put_raw(buffer, bytes, sizeof(bytes));
}

void
dm_wire_put_u64(dm_wire_buffer *buffer, uint64_t value)
{
    char bytes[8];
    store_le(bytes, value, 8);
    dm_wire_put_raw(buffer, bytes, sizeof(bytes));
}

void
dm_wire_put_bytes(dm_wire_buffer *buffer, const void *data, size_t size)
{
    dm_wire_put_u64(buffer, size);
    dm_wire_put_raw(buffer, data, size);
}

void
dm_wire_put_key(dm_wire_buffer *buffer, const char *key)
{
    size_t size = strlen(key);
    dm_wire_put_u64(buffer, size + 1);
    dm_wire_put_u8(buffer, '/');
    dm_wire_put_raw(buffer, key, size);
}

void
dm_wire_put_keys(dm_wire_buffer *buffer, const char *const *keys, size_t n)
{
    dm_wire_put_u64(buffer, n);
    for (size_t i = 0; i < n; i++) {
        dm_wire_put_key(buffer, keys[i]);
    }
}

dm_status
dm_wire_check(const dm_wire_buffer *buffer, dm_error *err)
{
    return buffer->failed ? dm_error_set_no_memory(err, "a message to or from a store")
                          : DM_OK;
}
