/* The registry of backends, and what the fake one does to memory.
 *
 * sources: base backend backend/fake backend/shm store/dm_store.c
 */
#include "dm_test.h"

#include <sys/stat.h>
#include <unistd.h>

#include "backend/dm_backend.h"
#include "backend/reduce/dm_reduce.h"

/* Stands in for the kernels, which take long to compile: all pairs but these two. */
dm_reduce_fn
dm_reduce_lookup(dm_dtype dtype, dm_reduce_op op)
{
    dm_reduce_fn some = (dm_reduce_fn)(void (*)(void))abort;
    bool refused = (dtype == DM_COMPLEX64 && op == DM_MAX) ||
                   (dtype == DM_FLOAT32 && op == DM_BAND);
    return refused ? NULL : some;
}

void
dm_reduce_many(void *out, const void *const *inputs, int n, size_t count,
               dm_dtype dtype, dm_reduce_op op, int size)
{
    (void)out;
    (void)inputs;
    (void)n;
    (void)count;
    (void)dtype;
    (void)op;
    (void)size;
    abort();
}

/* --- registry --------------------------------------------------------------------- */

static void
unknown_names_are_refused(void)
{
    dm_error err = DM_ERROR_INIT;
    const dm_backend *backend = NULL;
    CHECK_INT(dm_backend_check_name("mpi", &err), DM_ERR_VALUE);
    CHECK_STR(err.text, "unknown backend 'mpi': there are 'gloo', 'nccl', 'fake'");
    CHECK_INT(dm_backend_find("", &backend, &err), DM_ERR_VALUE);
    CHECK(backend == NULL);
}

static void
built_in_ones_are_found(void)
{
    dm_error err = DM_ERROR_INIT;
    const dm_backend *backend = NULL;
    CHECK_OK(dm_backend_check_name("gloo", &err));
    CHECK_OK(dm_backend_find("fake", &backend, &err));
    CHECK(backend == &dm_backend_fake);
    CHECK_OK(dm_backend_find("gloo", &backend, &err));
    CHECK(backend == &dm_backend_cpu);
    CHECK_STR(backend->name, "gloo");
    CHECK_OK(dm_backend_find("fake", &backend, &err));
    CHECK_INT(dm_backend_find("nccl", &backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "this build of devicemesh has no nccl backend");
    CHECK(backend == &dm_backend_fake);
}

static void
device_types_have_a_default(void)
{
    CHECK_STR(dm_backend_default("cpu"), "gloo");
    CHECK_STR(dm_backend_default("cuda"), "nccl");
    CHECK(dm_backend_default("xpu") == NULL);
}

static void
operations_have_names(void)
{
    CHECK_STR(dm_op_name(DM_OP_ALL_REDUCE), "all_reduce");
    for (int i = 0; i < DM_OP_KIND_COUNT; i++) {
        CHECK(dm_op_name((dm_op_kind)i)[0] != '\0');
    }
}

/* Compiles `text` as the bridge of a folder. */
static void
write_library(const char *folder, const char *text)
{
    char command[1024];
    snprintf(command, sizeof(command), "printf '%%s' '%s' | cc -shared -x c - -o %s/%s",
             text, folder, "_gloo.so");
    CHECK_INT(system(command), 0);
}

static void
gloo_that_cannot_be_loaded(void)
{
    dm_error err = DM_ERROR_INIT;
    const dm_backend *backend = NULL;
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "nobody said in which folder");

    char folder[] = "/tmp/dm_backend_XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    CHECK_OK(dm_backend_set_path(folder, &err));
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    char path[64];
    snprintf(path, sizeof(path), "tried %s/_gloo.so: ", folder);
    CHECK_CONTAINS(err.text, path);
    CHECK_CONTAINS(err.text, "apt-get install libgloo-dev");

    write_library(folder, "int nothing;");
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "has no dm_gloo_backend");

    write_library(
        folder, "const void *dm_gloo_backend(int abi) { return abi == 0 ? \"\" : 0; }");
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "was built for another version of devicemesh");

    write_library(folder,
                  "static const int abi = 99; const void *dm_gloo_backend(int a) "
                  "{ return a ? &abi : 0; }");
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "(interface 99, not ");
    CHECK(backend == NULL);

    char library[64];
    snprintf(library, sizeof(library), "%s/_gloo.so", folder);
    CHECK_INT(unlink(library), 0);
    CHECK_INT(rmdir(folder), 0);
}

static void
path_that_is_too_long(void)
{
    dm_error err = DM_ERROR_INIT;
    const dm_backend *backend = NULL;
    char *folder = malloc(5000);
    memset(folder, 'x', 4999);
    folder[4999] = '\0';
    CHECK_OK(dm_backend_set_path(folder, &err));
    free(folder);
    CHECK_INT(dm_backend_load_gloo(&backend, &err), DM_ERR_LIBRARY);
    CHECK_CONTAINS(err.text, "too long");
    dm_alloc_fail_at(1);
    CHECK_INT(dm_backend_set_path("/tmp", &err), DM_ERR_NO_MEMORY);
}

/* --- the fake backend: rank 1 of 3 ------------------------------------------------- */

static const int32_t ranks[] = {4, 5, 6};
static const float input[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

/* Runs one operation on nine floats that are all 0 before; `op` without pointers. */
static void
run(dm_op op, float output[9])
{
    dm_error err = DM_ERROR_INIT;
    dm_comm_config config = {.rank = 1, .size = 3, .ranks = ranks, .name = "x"};
    dm_comm *comm = NULL;
    dm_wait wait = DM_WAIT_FOREVER;
    memset(output, 0, 9 * sizeof(*output));
    op.dtype = DM_FLOAT32;
    op.input = input;
    op.output = output;
    CHECK_OK(dm_backend_fake.comm_new(&config, &comm, &err));
    CHECK_OK(dm_backend_fake.comm_connect(comm, &wait, &err));
    CHECK_OK(dm_backend_fake.comm_run(comm, &op, &wait, &err));
    CHECK_STR(dm_backend_fake.comm_transport(comm), "none");
    dm_backend_fake.comm_abort(comm);
    dm_backend_fake.comm_free(comm, false);
}

/* The output is `values`, written as digits: "000456000". */
static void
check(const float output[9], const char *values)
{
    char text[10] = "";
    for (int i = 0; i < 9; i++) {
        text[i] = (char)('0' + (int)output[i]);
    }
    CHECK_STR(text, values);
}

static void
fake_moves_the_own_part(void)
{
    float out[9];
    run((dm_op){.kind = DM_OP_ALL_REDUCE, .count = 9}, out);
    check(out, "000000000");
    run((dm_op){.kind = DM_OP_BROADCAST, .count = 9}, out);
    check(out, "000000000");
    run((dm_op){.kind = DM_OP_ALL_GATHER, .count = 3}, out);
    check(out, "000123000");
    run((dm_op){.kind = DM_OP_REDUCE_SCATTER, .count = 3}, out);
    check(out, "456000000");
    run((dm_op){.kind = DM_OP_ALL_TO_ALL, .count = 3}, out);
    check(out, "000456000");
    run((dm_op){.kind = DM_OP_BARRIER}, out);
    run((dm_op){.kind = DM_OP_SEND, .count = 3}, out);
    check(out, "000000000");
}

static void
fake_roots(void)
{
    float out[9];
    run((dm_op){.kind = DM_OP_REDUCE, .count = 9, .root = 1}, out);
    check(out, "123456789");
    run((dm_op){.kind = DM_OP_REDUCE, .count = 9, .root = 0}, out);
    check(out, "000000000");
    run((dm_op){.kind = DM_OP_GATHER, .count = 3, .root = 1}, out);
    check(out, "000123000");
    run((dm_op){.kind = DM_OP_GATHER, .count = 3, .root = 2}, out);
    check(out, "000000000");
    run((dm_op){.kind = DM_OP_SCATTER, .count = 3, .root = 1}, out);
    check(out, "456000000");
    run((dm_op){.kind = DM_OP_SCATTER, .count = 3, .root = 0}, out);
    check(out, "000000000");
}

static void
fake_uneven_pieces(void)
{
    float out[9];
    size_t counts[] = {1, 2, 3}, other[] = {4, 2, 0};
    run((dm_op){.kind = DM_OP_ALL_GATHER, .count = 2, .output_counts = counts}, out);
    check(out, "012000000");
    run((dm_op){.kind = DM_OP_REDUCE_SCATTER, .count = 2, .input_counts = counts}, out);
    check(out, "230000000");
    run((dm_op){.kind = DM_OP_ALL_TO_ALL,
                .input_counts = counts,
                .output_counts = other},
        out);
    check(out, "000023000");
}

static void
fake_has_nothing_to_receive(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_comm_config config = {.rank = 1, .size = 3, .ranks = ranks, .name = "x"};
    dm_comm *comm = NULL;
    dm_wait wait = DM_WAIT_FOREVER;
    CHECK_OK(dm_backend_fake.comm_new(&config, &comm, &err));
    dm_op op = {.kind = DM_OP_RECV, .root = 2};
    CHECK_INT(dm_backend_fake.comm_run(comm, &op, &wait, &err), DM_ERR_UNSUPPORTED);
    CHECK_CONTAINS(err.text, "nothing to receive from rank 6");
    op.root = DM_ANY_RANK;
    CHECK_INT(dm_backend_fake.comm_run(comm, &op, &wait, &err), DM_ERR_UNSUPPORTED);
    dm_backend_fake.comm_free(comm, false);
}

static void
fake_supports_what_kernels_do(void)
{
    const dm_backend *fake = &dm_backend_fake;
    CHECK(fake->supports(DM_OP_ALL_REDUCE, DM_BFLOAT16, DM_MAX));
    CHECK(!fake->supports(DM_OP_ALL_REDUCE, DM_COMPLEX64, DM_MAX));
    CHECK(!fake->supports(DM_OP_REDUCE_SCATTER, DM_FLOAT32, DM_BAND));
    CHECK(fake->supports(DM_OP_BROADCAST, DM_COMPLEX64, DM_MAX));
    CHECK(fake->supports(DM_OP_BARRIER, DM_BOOL, DM_BAND));
}

TEST_MAIN(TEST(unknown_names_are_refused), TEST(built_in_ones_are_found),
          TEST(device_types_have_a_default), TEST(operations_have_names),
          TEST(gloo_that_cannot_be_loaded), TEST(path_that_is_too_long),
          TEST(fake_moves_the_own_part), TEST(fake_roots), TEST(fake_uneven_pieces),
          TEST(fake_has_nothing_to_receive), TEST(fake_supports_what_kernels_do))
