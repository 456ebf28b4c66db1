/* Which network interface a backend that talks over sockets binds to.
 *
 * The user's word first (DEVICEMESH_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME), else the
 * interface that routes to MASTER_ADDR, else loopback. The name of this host is never
 * resolved: what it resolves to says little about how others reach it.
 */
#ifndef DM_NETIF_H
#define DM_NETIF_H

#include <net/if.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "base/dm_status.h"

enum { DM_NETIF_TEXT_SIZE = 64 };

typedef struct dm_netif {
    char name[IF_NAMESIZE];
    char text[DM_NETIF_TEXT_SIZE];   /* the address as people write it */
    struct sockaddr_storage address; /* port 0 */
    socklen_t address_size;
    bool loopback;
} dm_netif;

/* What the user can say; NULL or empty where nothing was said. */
typedef struct dm_netif_wish {
    const char *variable; /* the name of the environment variable, for errors */
    const char *list;     /* "eth0,ib0", "^docker0,lo" (all but these), "10.0.0.7";
                             the first that is there and up wins. A name matches as a
                             whole; the address of an interface may be given instead. */
    const char *master;   /* MASTER_ADDR: a number or a name */
} dm_netif_wish;

/* DM_ERR_VALUE when nothing matches the list: the text names the variable, its value
 * and the interfaces that there are. DM_ERR_SYSTEM when they cannot be listed. Blocks
 * only where `master` is a name to be resolved. */
dm_status
dm_netif_choose(const dm_netif_wish *wish, dm_netif *netif, dm_error *err);

/* The same with the wish that the environment expresses. */
dm_status
dm_netif_from_environment(dm_netif *netif, dm_error *err);

/* 127.0.0.0/8 and ::1. */
bool
dm_netif_is_loopback(const struct sockaddr *address);

#endif
