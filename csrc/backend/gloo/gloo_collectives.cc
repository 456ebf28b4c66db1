/* The operations: see gloo_collectives.h. */
#include "backend/gloo/gloo_collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/scatter.h>

namespace dm_gloo {

namespace {

/* Up to here, counted over all members, reduce_scatter and all_gather send every piece
 * straight to where it goes. */
constexpr size_t kDirectBytes = 256 * 1024;

/* Up to here all_reduce is a matter of latency, and beyond the second one of bandwidth
 * alone. (Measured on loopback: benchmarks/native.) */
constexpr size_t kDoublingBytes = 128 * 1024;
constexpr size_t kHalvingBytes = 2 * 1024 * 1024;

/* What travels at once in a ring: large enough to be cheap, small enough that
 * reducing one segment overlaps with receiving the next. */
constexpr size_t kSegmentBytes = 512 * 1024;

template <size_t N> struct Element {
    char bytes[N];
};

/* Calls `body` with an Element of the dtype's size: gloo takes the size of an element
 * from a type. */
template <typename Body>
void
with_element(dm_dtype dtype, Body &&body)
{
    switch (dm_dtype_size(dtype)) {
    case 1:
        return body(Element<1>{});
    case 2:
        return body(Element<2>{});
    case 4:
        return body(Element<4>{});
    case 8:
        return body(Element<8>{});
    case 16:
        return body(Element<16>{});
    default:
        fail(DM_ERR_UNSUPPORTED, "gloo cannot reduce %s", dm_dtype_name(dtype));
    }
}

char *
bytes_of(const void *data)
{
    /* gloo's buffers are not const, also those that are only read. */
    return const_cast<char *>(static_cast<const char *>(data));
}

/* One operation and what every step of it needs. */
struct Run {
    Links &links;
    const dm_op &op;
    const int rank;
    const int size;
    const size_t width; /* bytes of an element */

    Run(Links &l, const dm_op &o)
        : links(l), op(o), rank(l.context()->rank), size(l.context()->size),
          width(dm_dtype_size(o.dtype))
    {
    }

    Transport &
    transport() const
    {
        return links.transport();
    }

    const std::shared_ptr<gloo::Context>
    context() const
    {
        return links.context();
    }
};

dm_reduce_fn
kernel(const dm_op &op)
{
    dm_reduce_fn fn = dm_reduce_lookup(op.dtype, op.reduce);
    if (fn == nullptr) {
        fail(DM_ERR_UNSUPPORTED, "gloo cannot reduce %s with %s",
             dm_dtype_name(op.dtype), dm_reduce_op_name(op.reduce));
    }
    return fn;
}

void
finish(const Run &run, void *data, size_t count)
{
    dm_reduce_finish(data, count, run.op.dtype, run.op.reduce, run.size);
}

/* --- reductions ----------------------------------------------------------------- */

/* Recursive doubling: in each round two ranks exchange all they have, so that log2(size)
 * rounds do. Ranks beyond the largest power of two hand theirs in before and are handed
 * the result after. Both ranks of a round add up in the same order, the lower rank's
 * first, so that all ranks get the same bits. */
void
all_reduce_doubling(const Run &run)
{
    const dm_op &op = run.op;
    dm_reduce_fn fn = kernel(op);
    char *data = bytes_of(op.output);
    const size_t bytes = op.count * run.width;
    std::unique_ptr<char[]> scratch(new char[bytes]);
    Buffer mine(run.transport(), data, bytes);
    Buffer theirs(run.transport(), scratch.get(), bytes);

    int power = 1;
    while (power * 2 <= run.size) {
        power *= 2;
    }
    if (run.rank >= power) {
        mine.send(run.rank - power, 0);
        mine.waitSend();
        mine.recv(run.rank - power, 1);
        mine.waitRecv();
        return;
    }
    const bool has_guest = run.rank + power < run.size;
    if (has_guest) {
        theirs.recv(run.rank + power, 0);
        theirs.waitRecv();
        fn(data, data, scratch.get(), op.count);
    }
    for (int step = 1; step < power; step *= 2) {
        const int peer = run.rank ^ step;
        theirs.recv(peer, 2);
        mine.send(peer, 2);
        theirs.waitRecv();
        mine.waitSend();
        const bool first = run.rank < peer;
        fn(data, first ? data : scratch.get(), first ? scratch.get() : data, op.count);
    }
    if (has_guest) {
        mine.send(run.rank + power, 1);
        mine.waitSend();
    }
}

/* Halving and doubling talks to ranks at distances of powers of two, and of other
 * factors of the size where it has some. */
bool
can_halve(const Run &run)
{
    return run.links.is_full() || (run.size & (run.size - 1)) == 0;
}

void
all_reduce(const Run &run)
{
    using Algorithm = gloo::AllreduceOptions::Algorithm;
    const dm_op &op = run.op;
    const size_t bytes = op.count * run.width;
    if (bytes <= kDoublingBytes) {
        all_reduce_doubling(run);
        finish(run, op.output, op.count);
        return;
    }
    gloo::AllreduceOptions options(run.context());
    options.setAlgorithm(bytes <= kHalvingBytes && can_halve(run) ? Algorithm::BCUBE
                                                                  : Algorithm::RING);
    options.setReduceFunction(kernel(op));
    with_element(op.dtype, [&](auto element) {
        using T = decltype(element);
        options.setOutput(static_cast<T *>(op.output), op.count);
    });
    gloo::allreduce(options);
    finish(run, op.output, op.count);
}

/* How an array of `count` elements is cut into one piece for each member. */
struct Pieces {
    size_t count;
    size_t each;
    size_t width;

    Pieces(size_t n, int size, size_t w)
        : count(n),
          each((n + static_cast<size_t>(size) - 1) / static_cast<size_t>(size)),
          width(w)
    {
    }

    size_t
    offset(int piece) const
    {
        return std::min(count, each * static_cast<size_t>(piece)) * width;
    }

    size_t
    bytes(int piece) const
    {
        return offset(piece + 1) - offset(piece);
    }
};

/* Every piece goes straight to its owner, who adds them up in the order of ranks, with
 * one rounding. `mine` may be the own piece of the input. */
void
scatter_direct(const Run &run, const Pieces &pieces, const char *input, char *mine)
{
    const size_t bytes = pieces.bytes(run.rank);
    std::vector<char> scratch(bytes * static_cast<size_t>(run.size - 1));
    Buffer in(run.transport(), bytes_of(input), pieces.count * pieces.width);
    Buffer parts(run.transport(), scratch.data(), scratch.size());

    size_t at = 0;
    for (int peer = 0; peer < run.size; peer++) {
        if (peer != run.rank && bytes > 0) {
            parts.recv(peer, 0, at, bytes);
            at += bytes;
        }
    }
    for (int step = 1; step < run.size; step++) {
        int peer = (run.rank + step) % run.size;
        if (pieces.bytes(peer) > 0) {
            in.send(peer, 0, pieces.offset(peer), pieces.bytes(peer));
        }
    }
    for (int peer = 0; peer < run.size; peer++) {
        if (peer != run.rank && bytes > 0) {
            parts.waitRecv();
        }
    }

    std::vector<const void *> inputs;
    const char *next = scratch.data();
    for (int peer = 0; peer < run.size; peer++) {
        if (peer == run.rank) {
            inputs.push_back(input + pieces.offset(run.rank));
        }
        else {
            inputs.push_back(next);
            next += bytes;
        }
    }
    /* The division of an average comes later, where the whole operation ends. */
    dm_reduce_many(mine, inputs.data(), run.size, bytes / pieces.width, run.op.dtype,
                   run.op.reduce, 1);
    for (int step = 1; step < run.size; step++) {
        if (pieces.bytes((run.rank + step) % run.size) > 0) {
            in.waitSend();
        }
    }
}

/* Round the ring, towards higher ranks. In step s a rank receives what has been added
 * up of piece rank - s - 2, adds its own, and sends it on in step s + 1; after
 * size - 1 steps it holds its own piece. A piece travels in segments:
 *
 *   for each step:  for each segment:
 *       wait until what was sent from this place two steps ago has gone; receive into it
 *       wait for it; add my input; send it on
 */
void
scatter_ring(const Run &run, const Pieces &pieces, const char *input, char *mine)
{
    dm_reduce_fn fn = kernel(run.op);
    const int next = (run.rank + 1) % run.size;
    const int previous = (run.rank - 1 + run.size) % run.size;
    const size_t each = pieces.each * pieces.width;
    const size_t segment =
        std::max(pieces.width, kSegmentBytes / pieces.width * pieces.width);

    std::unique_ptr<char[]> scratch(new char[2 * each]);
    Buffer in(run.transport(), bytes_of(input), pieces.count * pieces.width);
    Buffer halves(run.transport(), scratch.get(), 2 * each);

    auto piece_at = [&](int step) {
        return (run.rank - step - 2 + 3 * run.size) % run.size;
    };
    auto for_segments = [&](int piece, auto body) {
        for (size_t at = 0; at < pieces.bytes(piece); at += segment) {
            body(at, std::min(segment, pieces.bytes(piece) - at));
        }
    };

    /* Step -1: my own part of the piece below mine. */
    for_segments(piece_at(-1), [&](size_t at, size_t bytes) {
        in.send(next, 0, pieces.offset(piece_at(-1)) + at, bytes);
    });
    for_segments(piece_at(0),
                 [&](size_t at, size_t bytes) { halves.recv(previous, 0, at, bytes); });

    const int last = run.size - 2;
    for (int step = 0; step <= last; step++) {
        const int piece = piece_at(step);
        const size_t half = static_cast<size_t>(step & 1) * each;
        for_segments(piece, [&](size_t at, size_t bytes) {
            halves.waitRecv();
            char *place = scratch.get() + half + at;
            char *sum = step == last ? mine + at : place;
            fn(sum, place, input + pieces.offset(piece) + at, bytes / pieces.width);
            if (step < last) {
                halves.send(next, 0, half + at, bytes);
            }
        });
        /* The other half is free once what this step's predecessor sent has gone. */
        for_segments(piece_at(step - 1), [&](size_t, size_t) {
            if (step == 0) {
                in.waitSend();
            }
            else {
                halves.waitSend();
            }
        });
        if (step < last) {
            const size_t other = each - half;
            for_segments(piece_at(step + 1), [&](size_t at, size_t bytes) {
                halves.recv(previous, 0, other + at, bytes);
            });
        }
    }
}

/* My piece of the sum of all inputs, in `mine`. */
void
reduce_scatter_pieces(const Run &run, const Pieces &pieces, const char *input,
                      char *mine)
{
    if (run.links.is_full() && pieces.count * pieces.width <= kDirectBytes) {
        scatter_direct(run, pieces, input, mine);
    }
    else {
        scatter_ring(run, pieces, input, mine);
    }
}

void
reduce_scatter(const Run &run)
{
    const dm_op &op = run.op;
    Pieces pieces(op.count * static_cast<size_t>(run.size), run.size, run.width);
    reduce_scatter_pieces(run, pieces, bytes_of(op.input), bytes_of(op.output));
    finish(run, op.output, op.count);
}

/* Reduce-scatter, then the pieces go to the root. Other ranks' arrays stay as they
 * are. */
void
reduce(const Run &run)
{
    const dm_op &op = run.op;
    const bool is_root = run.rank == op.root;
    const char *input = bytes_of(op.input != nullptr ? op.input : op.output);
    Pieces pieces(op.count, run.size, run.width);

    /* Not into the output yet: it may be the input, which is still being sent. */
    std::unique_ptr<char[]> mine(new char[std::max<size_t>(1, pieces.bytes(run.rank))]);
    reduce_scatter_pieces(run, pieces, input, mine.get());

    if (!is_root) {
        Buffer piece(run.transport(), mine.get(), pieces.bytes(run.rank));
        if (piece.size > 0) {
            piece.send(op.root, 1);
            piece.waitSend();
        }
        return;
    }
    Buffer whole(run.transport(), op.output, op.count * run.width);
    int expected = 0;
    for (int peer = 0; peer < run.size; peer++) {
        if (peer != run.rank && pieces.bytes(peer) > 0) {
            whole.recv(peer, 1, pieces.offset(peer), pieces.bytes(peer));
            expected++;
        }
    }
    std::memcpy(static_cast<char *>(op.output) + pieces.offset(run.rank), mine.get(),
                pieces.bytes(run.rank));
    for (; expected > 0; expected--) {
        whole.waitRecv();
    }
    finish(run, op.output, op.count);
}

/* --- moving bytes ---------------------------------------------------------------- */

void
broadcast(const Run &run)
{
    gloo::BroadcastOptions options(run.context());
    options.setOutput(bytes_of(run.op.output), run.op.count * run.width);
    options.setRoot(run.op.root);
    gloo::broadcast(options);
}

size_t
sum_of(const size_t *counts, int size)
{
    return std::accumulate(counts, counts + size, size_t(0));
}

/* Everybody's piece of `bytes` straight to everybody. */
void
gather_direct(const Run &run, size_t bytes)
{
    auto offset = [&](int peer) { return bytes * static_cast<size_t>(peer); };
    Buffer out(run.transport(), run.op.output, offset(run.size));
    char *mine = static_cast<char *>(run.op.output) + offset(run.rank);
    if (run.op.input != nullptr && run.op.input != mine) {
        std::memcpy(mine, run.op.input, bytes);
    }
    for (int step = 1; step < run.size; step++) {
        int from = (run.rank - step + run.size) % run.size;
        out.recv(from, 0, offset(from), bytes);
    }
    for (int step = 1; step < run.size; step++) {
        out.send((run.rank + step) % run.size, 0, offset(run.rank), bytes);
    }
    for (int step = 1; step < run.size; step++) {
        out.waitRecv();
        out.waitSend();
    }
}

void
all_gather(const Run &run)
{
    const dm_op &op = run.op;
    if (op.output_counts != nullptr) {
        std::vector<size_t> bytes(op.output_counts, op.output_counts + run.size);
        size_t before = 0;
        for (int peer = 0; peer < run.size; peer++) {
            bytes[static_cast<size_t>(peer)] *= run.width;
            before += peer < run.rank ? bytes[static_cast<size_t>(peer)] : 0;
        }
        gloo::AllgathervOptions options(run.context());
        if (op.input != nullptr &&
            op.input != static_cast<char *>(op.output) + before) {
            options.setInput(bytes_of(op.input), bytes[static_cast<size_t>(run.rank)]);
        }
        options.setOutput(bytes_of(op.output), bytes);
        gloo::allgatherv(options);
        return;
    }
    const size_t bytes = op.count * run.width;
    if (run.links.is_full() && bytes * static_cast<size_t>(run.size) <= kDirectBytes) {
        gather_direct(run, bytes);
        return;
    }
    gloo::AllgatherOptions options(run.context());
    if (op.input != nullptr && op.input != static_cast<char *>(op.output) +
                                               bytes * static_cast<size_t>(run.rank)) {
        options.setInput(bytes_of(op.input), bytes);
    }
    options.setOutput(bytes_of(op.output), bytes * static_cast<size_t>(run.size));
    gloo::allgather(options);
}

void
gather(const Run &run)
{
    const dm_op &op = run.op;
    const size_t bytes = op.count * run.width;
    gloo::GatherOptions options(run.context());
    options.setInput(bytes_of(op.input), bytes);
    if (run.rank == op.root) {
        options.setOutput(bytes_of(op.output), bytes * static_cast<size_t>(run.size));
    }
    options.setRoot(op.root);
    gloo::gather(options);
}

void
scatter(const Run &run)
{
    const dm_op &op = run.op;
    const size_t bytes = op.count * run.width;
    gloo::ScatterOptions options(run.context());
    if (run.rank == op.root) {
        std::vector<char *> inputs;
        for (int peer = 0; peer < run.size; peer++) {
            inputs.push_back(bytes_of(op.input) + bytes * static_cast<size_t>(peer));
        }
        options.setInputs(inputs, bytes);
    }
    options.setOutput(bytes_of(op.output), bytes);
    options.setRoot(op.root);
    gloo::scatter(options);
}

std::vector<int64_t>
bytes_each(const size_t *counts, size_t count, int size, size_t width)
{
    std::vector<int64_t> bytes;
    for (int peer = 0; peer < size; peer++) {
        size_t n = counts != nullptr ? counts[peer] : count;
        bytes.push_back(static_cast<int64_t>(n * width));
    }
    return bytes;
}

void
all_to_all(const Run &run)
{
    const dm_op &op = run.op;
    if (op.input_counts == nullptr && op.output_counts == nullptr) {
        const size_t bytes = op.count * run.width * static_cast<size_t>(run.size);
        gloo::AlltoallOptions options(run.context());
        options.setInput(bytes_of(op.input), bytes);
        options.setOutput(bytes_of(op.output), bytes);
        gloo::alltoall(options);
        return;
    }
    gloo::AlltoallvOptions options(run.context());
    options.setInput(bytes_of(op.input),
                     bytes_each(op.input_counts, op.count, run.size, run.width));
    options.setOutput(bytes_of(op.output),
                      bytes_each(op.output_counts, op.count, run.size, run.width));
    gloo::alltoallv(options);
}

void
barrier(const Run &run)
{
    gloo::BarrierOptions options(run.context());
    gloo::barrier(options);
}

void
send(const Run &run)
{
    Buffer buffer(run.transport(), bytes_of(run.op.input), run.op.count * run.width);
    buffer.send(run.op.root, 0);
    buffer.waitSend();
}

void
recv(const Run &run)
{
    const dm_op &op = run.op;
    Buffer buffer(run.transport(), op.output, op.count * run.width);
    if (op.root != DM_ANY_RANK) {
        buffer.recv(op.root, 0);
    }
    else {
        std::vector<int> peers;
        for (int peer = 0; peer < run.size; peer++) {
            if (peer != run.rank) {
                peers.push_back(peer);
            }
        }
        buffer.recv(peers, 0, 0, buffer.size);
    }
    int from = op.root;
    buffer.waitRecv(&from);
    if (op.source != nullptr) {
        *op.source = from;
    }
}

bool
is_reduction(dm_op_kind kind)
{
    return kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
           kind == DM_OP_REDUCE_SCATTER;
}

} // namespace

bool
supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce) noexcept
{
    return !is_reduction(kind) || dm_reduce_lookup(dtype, reduce) != nullptr;
}

bool
is_point_to_point(dm_op_kind kind) noexcept
{
    return kind == DM_OP_SEND || kind == DM_OP_RECV;
}

uint64_t
key_of(const dm_op &op, uint64_t turn) noexcept
{
    constexpr uint64_t prime = UINT64_C(0x100000001b3);
    uint64_t key = UINT64_C(0xcbf29ce484222325);
    auto add = [&](uint64_t value) { key = (key ^ value) * prime; };
    if (is_point_to_point(op.kind)) {
        add(DM_OP_KIND_COUNT);
        add(op.tag);
        return key;
    }
    add(turn);
    add(op.kind);
    add(op.dtype);
    add(is_reduction(op.kind) ? static_cast<uint64_t>(op.reduce) : 0);
    add(static_cast<uint64_t>(op.root));
    add(op.input_counts == nullptr && op.output_counts == nullptr ? op.count : 0);
    return key;
}

void
run_operation(Links &links, const dm_op &op, uint64_t key)
{
    links.transport().set_key(key);
    Run run(links, op);
    const bool uneven = op.input_counts != nullptr || op.output_counts != nullptr;
    if (op.count == 0 && !uneven && !is_point_to_point(op.kind) &&
        op.kind != DM_OP_BARRIER) {
        /* Nothing moves, but members for which it is not empty must learn of it. */
        return barrier(run);
    }
    switch (op.kind) {
    case DM_OP_ALL_REDUCE:
        return all_reduce(run);
    case DM_OP_BROADCAST:
        return broadcast(run);
    case DM_OP_REDUCE:
        return reduce(run);
    case DM_OP_ALL_GATHER:
        return all_gather(run);
    case DM_OP_GATHER:
        return gather(run);
    case DM_OP_SCATTER:
        return scatter(run);
    case DM_OP_REDUCE_SCATTER:
        return reduce_scatter(run);
    case DM_OP_ALL_TO_ALL:
        return all_to_all(run);
    case DM_OP_BARRIER:
        return barrier(run);
    case DM_OP_SEND:
        return send(run);
    case DM_OP_RECV:
        return recv(run);
    case DM_OP_KIND_COUNT:
        break;
    }
    fail(DM_ERR_UNSUPPORTED, "gloo has no operation %d", static_cast<int>(op.kind));
}

void
run_alone(const dm_op &op)
{
    if (is_point_to_point(op.kind)) {
        fail(DM_ERR_VALUE, "a group of one rank has nobody to talk to");
    }
    if (op.input != nullptr && op.output != nullptr && op.input != op.output) {
        size_t count = op.input_counts != nullptr    ? sum_of(op.input_counts, 1)
                       : op.output_counts != nullptr ? sum_of(op.output_counts, 1)
                                                     : op.count;
        std::memcpy(op.output, op.input, count * dm_dtype_size(op.dtype));
    }
    if (is_reduction(op.kind) && op.output != nullptr) {
        dm_reduce_finish(op.output, op.count, op.dtype, op.reduce, 1);
    }
}

} // namespace dm_gloo
