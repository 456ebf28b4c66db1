/* Tests of the wire protocol's frames, and of the server's work without sockets.
 *
 * sources: base store/dm_wire.c store/dm_serve.c store/dm_serve_waits.c store/dm_kv.c store/dm_store.c
 */
#include "dm_test.h"

#include "store/dm_serve.h"
#include "store/dm_wire.h"

static dm_error err;

static uint64_t random_state = 88172645463325252;

/* xorshift: the same numbers in every run. */
static uint64_t
next_random(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static bool
slice_is(dm_wire_slice slice, const char *text)
{
    return slice.size == strlen(text) &&
           (slice.size == 0 || memcmp(slice.data, text, slice.size) == 0);
}

/* --- every opcode -------------------------------------------------------------------- */

/* The fields of each opcode, in the words of dm_wire.h's comments. */
static const struct {
    uint8_t op;
    const char *fields; /* k v e(xpected) 4 8 K P t */
} ops[] = {
    {DM_WIRE_VALIDATE, "4"},      {DM_WIRE_SET, "kv"},
    {DM_WIRE_COMPARE_SET, "kev"}, {DM_WIRE_GET, "k"},
    {DM_WIRE_ADD, "k8"},          {DM_WIRE_CHECK, "K"},
    {DM_WIRE_WAIT, "K"},          {DM_WIRE_NUM_KEYS, ""},
    {DM_WIRE_DELETE_KEY, "k"},    {DM_WIRE_APPEND, "kv"},
    {DM_WIRE_MULTI_GET, "K"},     {DM_WIRE_MULTI_SET, "P"},
    {DM_WIRE_CANCEL_WAIT, ""},    {DM_WIRE_PING, "4"},
    {DM_WIRE_QUEUE_PUSH, "kv"},   {DM_WIRE_QUEUE_POP, "k"},
    {DM_WIRE_QUEUE_LEN, "k"},     {DM_WIRE_LIST_KEYS, ""},
    {DM_WIRE_BARRIER, "k8"},      {DM_WIRE_TOKEN, "v"},
    {DM_WIRE_WAIT_GET, "K"},      {DM_WIRE_WAIT_UNLESS, "KK"},
    {DM_WIRE_WAIT_POP, "k"},      {DM_WIRE_WAIT_ALL, "k8"},
    {DM_WIRE_TRY_ADD, "k8"},      {DM_WIRE_TRY_APPEND, "kv"},
    {DM_WIRE_WHICH, "K"},         {DM_WIRE_WILL, "kv"},
    {DM_WIRE_GOODBYE, ""},
};
enum { N_OPS = sizeof(ops) / sizeof(*ops) };

static const char *const two_keys[] = {"first", "second"};
static const char *const one_key[] = {"other"};

/* A request with known content; returns its length. */
static size_t
encode(dm_wire_buffer *buffer, uint8_t op, const char *fields)
{
    size_t before = buffer->size;
    dm_wire_put_u8(buffer, op);
    for (const char *field = fields; *field != '\0'; field++) {
        switch (*field) {
        case 'k':
            dm_wire_put_key(buffer, "the key");
            break;
        case 'v':
            dm_wire_put_bytes(buffer, "a value", 7);
            break;
        case 'e':
            dm_wire_put_bytes(buffer, "expected", 8);
            break;
        case '4':
            dm_wire_put_u32(buffer, 0xfedcba98);
            break;
        case '8':
            dm_wire_put_u64(buffer, (uint64_t)-2);
            break;
        case 'K':
            if (field == fields) {
                dm_wire_put_keys(buffer, two_keys, 2);
            }
            else {
                dm_wire_put_keys(buffer, one_key, 1);
            }
            break;
        default:
            dm_wire_put_u64(buffer, 2);
            dm_wire_put_key(buffer, "first");
            dm_wire_put_bytes(buffer, "1", 1);
            dm_wire_put_key(buffer, "second");
            dm_wire_put_bytes(buffer, "", 0);
        }
    }
    CHECK(!buffer->failed);
    return buffer->size - before;
}

static void
check_request(const dm_wire_request *request, uint8_t op, const char *fields)
{
    CHECK_INT(request->op, op);
    const bool has_key = strchr(fields, 'k') != NULL;
    CHECK(slice_is(request->key, has_key ? "/the key" : ""));
    CHECK(slice_is(request->value, strchr(fields, 'v') != NULL ? "a value" : ""));
    CHECK(slice_is(request->expected, strchr(fields, 'e') != NULL ? "expected" : ""));
    if (strchr(fields, '4') != NULL) {
        CHECK_INT(request->number, 0xfedcba98);
    }
    else {
        CHECK_INT(request->number, strchr(fields, '8') != NULL ? -2 : 0);
    }
    dm_wire_slice items = request->items, item;
    if (fields[0] == 'K' || fields[0] == 'P') {
        bool pairs = fields[0] == 'P';
        CHECK_INT(request->n, 2);
        CHECK(dm_wire_next(&items, &item) && slice_is(item, "/first"));
        CHECK(!pairs || (dm_wire_next(&items, &item) && slice_is(item, "1")));
        CHECK(dm_wire_next(&items, &item) && slice_is(item, "/second"));
        CHECK(!pairs || (dm_wire_next(&items, &item) && slice_is(item, "")));
    }
    CHECK(!dm_wire_next(&items, &item));
    dm_wire_slice unless = request->unless;
    if (strcmp(fields, "KK") == 0) {
        CHECK_INT(request->n_unless, 1);
        CHECK(dm_wire_next(&unless, &item) && slice_is(item, "/other"));
    }
    CHECK(!dm_wire_next(&unless, &item));
}

/* A copy that ends where its memory ends, so that reading on is seen. */
static dm_status
decode_exactly(const char *data, size_t size, dm_wire_scan *scan,
               dm_wire_request *request, size_t *used, char **copy)
{
    *copy = malloc(size != 0 ? size : 1);
    if (size != 0) {
        memcpy(*copy, data, size);
    }
    return dm_wire_decode(*copy, size, scan, request, used, &err);
}

static void
every_opcode(void)
{
    for (int i = 0; i < N_OPS; i++) {
        dm_wire_buffer buffer = {0};
        size_t size = encode(&buffer, ops[i].op, ops[i].fields);
        dm_wire_scan scan = {0};
        dm_wire_request request;
        size_t used;
        char *copy;
        CHECK_OK(decode_exactly(buffer.data, size, &scan, &request, &used, &copy));
        CHECK_INT(used, size);
        check_request(&request, ops[i].op, ops[i].fields);
        free(copy);

        /* Each beginning of it is incomplete; the scan goes on where it was. */
        memset(&scan, 0, sizeof(scan));
        for (size_t cut = 0; cut < size; cut++) {
            dm_status status =
                decode_exactly(buffer.data, cut, &scan, &request, &used, &copy);
            CHECK_INT(status, DM_ERR_AGAIN);
            free(copy);
        }
        CHECK_OK(decode_exactly(buffer.data, size, &scan, &request, &used, &copy));
        CHECK_INT(used, size);
        check_request(&request, ops[i].op, ops[i].fields);
        free(copy);
        dm_wire_buffer_fini(&buffer);
    }
}

static void
unknown_opcodes(void)
{
    for (int op = 0; op < 256; op++) {
        bool known = false;
        for (int i = 0; i < N_OPS; i++) {
            known = known || ops[i].op == op;
        }
        char byte = (char)op;
        dm_wire_scan scan = {0};
        dm_wire_request request;
        size_t used;
        dm_status status = dm_wire_decode(&byte, 1, &scan, &request, &used, &err);
        CHECK_INT(status == DM_ERR_PROTOCOL, !known);
    }
    CHECK(!dm_wire_op_waits(DM_WIRE_GET) && dm_wire_op_waits(DM_WIRE_WAIT));
    CHECK(dm_wire_op_waits(DM_WIRE_BARRIER) && dm_wire_op_waits(DM_WIRE_WAIT_ALL));
    CHECK(!dm_wire_op_waits(DM_WIRE_TRY_ADD));
}

static dm_status
decode(const dm_wire_buffer *buffer)
{
    dm_wire_scan scan = {0};
    dm_wire_request request;
    size_t used;
    return dm_wire_decode(buffer->data, buffer->size, &scan, &request, &used, &err);
}

/* A field of that length, of which only the announcement has come. */
static void
check_length(uint8_t op, uint64_t length, dm_status expected)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, op);
    if (op == DM_WIRE_SET) {
        dm_wire_put_key(&buffer, "k");
    }
    dm_wire_put_u64(&buffer, length);
    CHECK_INT(decode(&buffer), expected);
    dm_wire_buffer_fini(&buffer);
}

static void
too_large(void)
{
    check_length(DM_WIRE_GET, DM_STORE_KEY_MAX, DM_ERR_AGAIN);
    check_length(DM_WIRE_GET, DM_STORE_KEY_MAX + 1, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_GET, UINT64_MAX, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_SET, DM_STORE_VALUE_MAX, DM_ERR_AGAIN);
    check_length(DM_WIRE_SET, DM_STORE_VALUE_MAX + 1, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_SET, UINT64_MAX - 8, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_TOKEN, DM_WIRE_TOKEN_MAX + 1, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_WAIT, DM_WIRE_KEYS_MAX, DM_ERR_AGAIN);
    check_length(DM_WIRE_WAIT, DM_WIRE_KEYS_MAX + 1, DM_ERR_PROTOCOL);
    check_length(DM_WIRE_MULTI_SET, UINT64_MAX / 2 + 1, DM_ERR_PROTOCOL);

    /* Many values that are allowed one by one. */
    dm_wire_buffer buffer = {0};
    char *value = calloc(1, DM_STORE_VALUE_MAX);
    dm_wire_put_u8(&buffer, DM_WIRE_MULTI_SET);
    dm_wire_put_u64(&buffer, 100);
    while (buffer.size < DM_WIRE_FRAME_MAX) {
        CHECK_INT(decode(&buffer), DM_ERR_AGAIN);
        dm_wire_put_key(&buffer, "k");
        dm_wire_put_bytes(&buffer, value, DM_STORE_VALUE_MAX);
    }
    CHECK_INT(decode(&buffer), DM_ERR_PROTOCOL);
    CHECK_CONTAINS(err.text, "67108864");
    free(value);
    dm_wire_buffer_fini(&buffer);
}

static void
empty_lists(void)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, DM_WIRE_WAIT_UNLESS);
    dm_wire_put_keys(&buffer, NULL, 0);
    dm_wire_put_keys(&buffer, NULL, 0);
    CHECK_INT(decode(&buffer), DM_OK);
    dm_wire_buffer_fini(&buffer);
}

static void
buffers_without_memory(void)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u32(&buffer, 1);
    dm_alloc_fail_at(1);
    char large[1000] = {0};
    dm_wire_put_raw(&buffer, large, sizeof(large));
    dm_alloc_fail_at(0);
    CHECK(buffer.failed);
    dm_wire_put_u8(&buffer, 1);
    CHECK_INT(buffer.size, 4);
    CHECK_ERR(dm_wire_check(&buffer, &err), DM_ERR_NO_MEMORY);
    dm_wire_buffer_fini(&buffer);
    CHECK_OK(dm_wire_check(&buffer, &err));
}

/* Random bytes, and good requests with random changes: nothing is read beyond the end,
 * and bytes that come one by one are understood as those that come together. */
static void
random_bytes(void)
{
    for (int round = 0; round < 20000; round++) {
        dm_wire_buffer buffer = {0};
        if (round % 2 == 0) {
            size_t size = next_random() % 64;
            for (size_t i = 0; i < size; i++) {
                dm_wire_put_u8(&buffer, (uint8_t)next_random());
            }
            if (size > 0) {
                buffer.data[0] = (char)ops[next_random() % N_OPS].op;
            }
        }
        else {
            int op = (int)(next_random() % N_OPS);
            size_t size = encode(&buffer, ops[op].op, ops[op].fields);
            buffer.data[next_random() % size] = (char)next_random();
        }
        dm_wire_scan whole = {0}, slow = {0};
        dm_wire_request request;
        size_t used = 0, used_slowly = 0;
        char *copy;
        dm_status status =
            decode_exactly(buffer.data, buffer.size, &whole, &request, &used, &copy);
        free(copy);
        dm_status slowly = DM_ERR_AGAIN;
        for (size_t n = 0; n <= buffer.size && slowly == DM_ERR_AGAIN; n++) {
            slowly =
                decode_exactly(buffer.data, n, &slow, &request, &used_slowly, &copy);
            free(copy);
        }
        CHECK_INT(slowly, status);
        CHECK_INT(used_slowly, used);
        dm_wire_buffer_fini(&buffer);
    }
}

/* --- sessions -------------------------------------------------------------------------- */

/* Feeds all of `buffer`, drops it; the session must not fail. */
static void
feed(dm_session *session, dm_wire_buffer *buffer)
{
    size_t used;
    CHECK_OK(dm_session_feed(session, buffer->data, buffer->size, &used, &err));
    CHECK_INT(used, buffer->size);
    dm_wire_buffer_fini(buffer);
}

/* What the session answers is exactly this; it is taken as sent. */
static void
check_answer(dm_session *session, const char *bytes, size_t size)
{
    CHECK_INT(dm_session_pending(session), size);
    CHECK(size == 0 || memcmp(session->out.data + session->out_sent, bytes, size) == 0);
    dm_session_sent(session, size);
}

static void
begin_session(dm_session *session, dm_serve *serve)
{
    dm_wire_buffer buffer = {0};
    dm_session_init(session, serve);
    dm_wire_put_u8(&buffer, DM_WIRE_VALIDATE);
    dm_wire_put_u32(&buffer, DM_WIRE_MAGIC);
    dm_wire_put_u8(&buffer, DM_WIRE_PING);
    dm_wire_put_u32(&buffer, DM_WIRE_HELLO);
    feed(session, &buffer);
    check_answer(session, "\x00\x00\xb2\xbb", 4);
}

static void
put_request(dm_session *session, uint8_t op, const char *key, const char *value)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, op);
    dm_wire_put_key(&buffer, key);
    if (value != NULL) {
        dm_wire_put_bytes(&buffer, value, strlen(value));
    }
    feed(session, &buffer);
}

static void
wait_request(dm_session *session, uint8_t op, const char *const *keys, size_t n)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, op);
    dm_wire_put_keys(&buffer, keys, n);
    feed(session, &buffer);
}

static void
come_to_barrier(dm_session *session, uint64_t world)
{
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, DM_WIRE_WAIT_ALL);
    dm_wire_put_key(&buffer, "b");
    dm_wire_put_u64(&buffer, world);
    feed(session, &buffer);
}

static void
hello(void)
{
    dm_serve serve;
    dm_serve_init(&serve, "secret");
    dm_session first, second;
    dm_session_init(&first, &serve);
    dm_session_init(&second, &serve);
    size_t used;
    CHECK_ERR(dm_session_feed(&first, "\x0d\1\2\3\4", 5, &used, &err), DM_ERR_PROTOCOL);
    CHECK_ERR(dm_session_feed(&first, "\0\1\2\3\4", 5, &used, &err), DM_ERR_PROTOCOL);
    CHECK_OK(
        dm_session_feed(&first, "\0\xce\xf7\x85\x3c\x0d\1\2\3\4", 10, &used, &err));
    check_answer(&first, "\1\2\3\4", 4);
    CHECK_INT(serve.clients, 1);
    CHECK_OK(dm_session_feed(&first, "\x0d\0\0\x4d\x44", 5, &used, &err));
    check_answer(&first, "\1\0\xb2\xbb", 4); /* a token is needed */
    CHECK_ERR(dm_session_feed(&first, "\x11", 1, &used, &err), DM_ERR_PROTOCOL);
    CHECK_OK(dm_session_feed(&first, "\x80\6\0\0\0\0\0\0\0secrex", 15, &used, &err));
    check_answer(&first, "\3\x0b\0\0\0\0\0\0\0wrong token", 20);
    CHECK_OK(
        dm_session_feed(&first, "\x80\6\0\0\0\0\0\0\0secret\x07", 16, &used, &err));
    check_answer(&first, "\0\0\0\0\0\0\0\0\0", 9);

    CHECK_OK(dm_session_feed(&second, "\0\xce\xf7\x85\x3c\x0d\1\0\x4d\x44", 10, &used,
                             &err));
    CHECK_INT(serve.clients, 1); /* a secondary connection */
    dm_session_fini(&second);
    dm_session_fini(&first);
    CHECK_INT(serve.clients, 0);
    dm_serve_fini(&serve);
}

static void
waiting_sessions(void)
{
    dm_serve serve;
    dm_serve_init(&serve, NULL);
    dm_session a, b, c;
    begin_session(&a, &serve);
    begin_session(&b, &serve);
    begin_session(&c, &serve);

    /* The same key twice; both ways of waiting; one cancelled. */
    const char *twice[] = {"k", "l", "k"};
    wait_request(&a, DM_WIRE_WAIT, twice, 3);
    wait_request(&b, DM_WIRE_WAIT_GET, twice, 3);
    CHECK(dm_session_is_stalled(&a) && dm_session_is_stalled(&b));
    put_request(&c, DM_WIRE_SET, "k", "1");
    check_answer(&a, "", 0);
    put_request(&c, DM_WIRE_SET, "l", "2");
    check_answer(&a, "\0", 1);
    check_answer(&b, "\0\1\0\0\0\0\0\0\0001\1\0\0\0\0\0\0\0002\1\0\0\0\0\0\0\0001", 28);
    CHECK(dm_serve_next_woken(&serve) != NULL && dm_serve_next_woken(&serve) != NULL);
    CHECK(dm_serve_next_woken(&serve) == NULL);

    const char *never[] = {"never"};
    wait_request(&a, DM_WIRE_WAIT, never, 1);
    dm_wire_buffer buffer = {0};
    dm_wire_put_u8(&buffer, DM_WIRE_NUM_KEYS);
    size_t used;
    CHECK_OK(dm_session_feed(&a, buffer.data, buffer.size, &used, &err));
    CHECK_INT(used, 0); /* must wait */
    buffer.data[0] = DM_WIRE_CANCEL_WAIT;
    feed(&a, &buffer);
    check_answer(&a, "\1", 1);
    CHECK(!dm_session_is_stalled(&a));

    /* Who is gone has not come to the barrier. */
    for (int round = 0; round < 2; round++) {
        dm_session *members[] = {&a, &b, &c};
        if (round == 0) {
            come_to_barrier(&b, 3);
            dm_session_fini(&b);
            begin_session(&b, &serve);
        }
        for (int i = 0; i < 3; i++) {
            check_answer(&a, "", 0);
            come_to_barrier(members[i], 3);
        }
        for (int i = 0; i < 3; i++) {
            CHECK_INT(dm_session_pending(members[i]), 1);
            check_answer(members[i], "\0", 1);
        }
    }

    /* One item for one waiting session, in their order. */
    put_request(&a, DM_WIRE_WAIT_POP, "q", NULL);
    put_request(&b, DM_WIRE_WAIT_POP, "q", NULL);
    put_request(&c, DM_WIRE_QUEUE_PUSH, "q", "x");
    check_answer(&a, "\0\1\0\0\0\0\0\0\0x", 10);
    check_answer(&b, "", 0);
    put_request(&c, DM_WIRE_QUEUE_PUSH, "q", "y");
    check_answer(&b, "\0\1\0\0\0\0\0\0\0y", 10);

    /* A will, executed while another waits unless it is. */
    dm_wire_put_u8(&buffer, DM_WIRE_WAIT_UNLESS);
    dm_wire_put_keys(&buffer, never, 1);
    dm_wire_put_keys(&buffer, (const char *[]){"w", "w"}, 2);
    feed(&a, &buffer);
    put_request(&b, DM_WIRE_WILL, "w", "first");
    put_request(&b, DM_WIRE_WILL, "w", "b");
    check_answer(&b, "\0\0", 2);
    put_request(&c, DM_WIRE_WILL, "v", "c");
    check_answer(&c, "\0", 1);
    dm_wire_put_u8(&buffer, DM_WIRE_GOODBYE);
    feed(&c, &buffer);
    dm_session_fini(&c);
    check_answer(&a, "", 0);
    dm_session_fini(&b);
    check_answer(&a, "\2\1\0\0\0\0\0\0\0b", 10);
    CHECK(dm_kv_find(&serve.kv, "/v", 2) == NULL);
    dm_session_fini(&a);
    CHECK(dm_serve_next_woken(&serve) == NULL);
    dm_serve_fini(&serve);
}

/* Some hundred thousand requests, good and bad, from five sessions that come and go. */
static void
random_sessions(void)
{
    static const char *const names[] = {"a", "b", "c", "d"};
    enum { N = 5 };
    dm_serve serve;
    dm_serve_init(&serve, NULL);
    dm_session sessions[N];
    for (int i = 0; i < N; i++) {
        begin_session(&sessions[i], &serve);
    }
    for (int round = 0; round < 60000; round++) {
        dm_session *session = &sessions[next_random() % N];
        uint8_t op = ops[next_random() % N_OPS].op;
        if (op == DM_WIRE_VALIDATE || (session->waiting != 0 && round % 3 == 0)) {
            op = DM_WIRE_CANCEL_WAIT;
        }
        const char *fields = "";
        for (int i = 0; i < N_OPS; i++) {
            fields = ops[i].op == op ? ops[i].fields : fields;
        }
        dm_wire_buffer buffer = {0};
        dm_wire_put_u8(&buffer, op);
        for (; *fields != '\0'; fields++) {
            const char *name = names[next_random() % 4];
            const char *some[] = {name, names[next_random() % 4]};
            size_t n = next_random() % 3;
            switch (*fields) {
            case 'k':
                dm_wire_put_key(&buffer, name);
                break;
            case '4':
                dm_wire_put_u32(&buffer, (uint32_t)next_random());
                break;
            case '8':
                dm_wire_put_u64(&buffer, next_random() % 4);
                break;
            case 'K':
                dm_wire_put_keys(&buffer, some, n);
                break;
            case 'P':
                dm_wire_put_u64(&buffer, n);
                for (size_t i = 0; i < n; i++) {
                    dm_wire_put_key(&buffer, some[i]);
                    dm_wire_put_bytes(&buffer, "7", 1);
                }
                break;
            default:
                dm_wire_put_bytes(&buffer, "12", next_random() % 3);
            }
        }
        if (next_random() % 64 == 0) {
            buffer.data[next_random() % buffer.size] = (char)next_random();
        }
        if (next_random() % 256 == 0) {
            dm_alloc_fail_at(1 + next_random() % 3);
        }
        size_t used;
        dm_status status =
            dm_session_feed(session, buffer.data, buffer.size, &used, &err);
        dm_alloc_fail_at(0);
        CHECK(used <= buffer.size);
        dm_wire_buffer_fini(&buffer);
        dm_session *woken;
        while ((woken = dm_serve_next_woken(&serve)) != NULL) {
            CHECK(woken >= sessions && woken < sessions + N);
        }
        bool incomplete = status == DM_OK && session->scan.at != 0;
        if (status != DM_OK || incomplete || next_random() % 512 == 0) {
            dm_session_fini(session);
            begin_session(session, &serve);
        }
        dm_session_sent(session, dm_session_pending(session));
    }
    for (int i = 0; i < N; i++) {
        dm_session_fini(&sessions[i]);
    }
    dm_serve_fini(&serve);
}

TEST_MAIN(TEST(every_opcode), TEST(unknown_opcodes), TEST(too_large), TEST(empty_lists),
          TEST(buffers_without_memory), TEST(random_bytes), TEST(hello),
          TEST(waiting_sessions), TEST(random_sessions))
