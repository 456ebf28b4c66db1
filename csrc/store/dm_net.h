/* Sockets with deadlines: resolve, connect, listen, send and receive.
 *
 * Every socket is close-on-exec, non-blocking, without Nagle's delay and with
 * keep-alive, and no call raises SIGPIPE. Whatever can block takes a dm_wait. Texts
 * say what the peer did; the caller puts "store at host:port" in front where the text
 * does not name it. No state, no locks.
 */
#ifndef DM_NET_H
#define DM_NET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"

enum {
    DM_NET_HOST_MAX = 256,     /* longest host name, with its NUL */
    DM_NET_MAX_ADDRESSES = 16, /* of one name; more are ignored */
};

typedef struct dm_net_address {
    struct sockaddr_storage data;
    socklen_t size;
} dm_net_address;

/* The addresses of `host`. Numeric ones (also "[::1]") and "localhost" (loopback, IPv4
 * first) never go to a resolver; other names do, on a helper thread, so that deadline
 * and interrupts hold. DM_ERR_VALUE: no usable name. DM_ERR_CONNECTION: unknown name,
 * or the resolver failed; the text shows host and reason. */
dm_status
dm_net_resolve(const char *host, uint16_t port, const dm_wait *wait,
               dm_net_address addresses[DM_NET_MAX_ADDRESSES], int *n, dm_error *err);

/* One attempt to connect, each address in turn. DM_ERR_CONNECTION names the address
 * and the reason; `native` is the errno. */
dm_status
dm_net_connect(const dm_net_address *addresses, int n, const dm_wait *wait, int *fd,
               dm_error *err);

/* Whether it can help to connect again after this error (nobody listens yet, a reset,
 * a name that does not resolve yet), as opposed to a local failure. */
bool
dm_net_may_retry(const dm_error *err);

/* Sleeps `ns` at most (less when the deadline is nearer), polling the wait. */
dm_status
dm_net_sleep(int64_t ns, const dm_wait *wait, dm_error *err);

/* A socket that listens on `host` alone. The system caps the backlog (somaxconn).
 * DM_ERR_SYSTEM: cannot be bound (the text names host, port and reason). */
dm_status
dm_net_listen(const char *host, uint16_t port, const dm_wait *wait, int *fd,
              dm_error *err);

/* A second socket beside `fd`, which listens on `host`. Where that is this machine's own
 * name and its hosts file maps it to a loopback address (as Debian's does), other
 * machines know the name by another address: the one that leads to them, if there is
 * one, is listened on too. -1 where nothing of that is the case. */
int
dm_net_listen_outward(const char *host, int fd);

/* Checks that `fd` is a listening stream socket and makes it non-blocking and
 * close-on-exec. DM_ERR_VALUE otherwise. */
dm_status
dm_net_adopt_listener(int fd, dm_error *err);

/* The port a socket is bound to. */
dm_status
dm_net_port(int fd, uint16_t *port, dm_error *err);

/* Sets up a socket that accept4 has returned; failures do not matter. */
void
dm_net_tune(int fd);

/* Sends all of it. DM_ERR_CONNECTION: the peer is gone. */
dm_status
dm_net_send(int fd, const void *data, size_t size, const dm_wait *wait, dm_error *err);

/* Receives at least one byte, at most `size`. DM_ERR_CONNECTION: the peer has closed
 * or is gone. */
dm_status
dm_net_receive(int fd, void *data, size_t size, const dm_wait *wait, size_t *got,
               dm_error *err);

#endif
