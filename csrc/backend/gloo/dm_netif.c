/* The choice of a network interface: see dm_netif.h. */
#include "backend/gloo/dm_netif.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static socklen_t
size_of(const struct sockaddr *address)
{
    return address->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                         : sizeof(struct sockaddr_in6);
}

bool
dm_netif_is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in =
            (const struct sockaddr_in *)(const void *)address;
        return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
    }
    if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 =
            (const struct sockaddr_in6 *)(const void *)address;
        return IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
    }
    return false;
}

/* Up, and with an address that a peer can use: link-local IPv6 needs a scope that
 * means nothing on another host. */
static bool
is_usable(const struct ifaddrs *entry)
{
    if (entry->ifa_addr == NULL || (entry->ifa_flags & IFF_UP) == 0) {
        return false;
    }
    if (entry->ifa_addr->sa_family == AF_INET) {
        return true;
    }
    if (entry->ifa_addr->sa_family != AF_INET6) {
        return false;
    }
    const struct sockaddr_in6 *in6 =
        (const struct sockaddr_in6 *)(const void *)entry->ifa_addr;
    return !IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr);
}

static bool
same_address(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a->sa_family != b->sa_family) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)b)->sin_addr.s_addr;
    }
    return memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

/* A numeric address, or false. */
static bool
parse_address(const char *text, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof(*address));
    struct sockaddr_in *in = (struct sockaddr_in *)address;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)address;
    if (inet_pton(AF_INET, text, &in->sin_addr) == 1) {
        in->sin_family = AF_INET;
        return true;
    }
    if (inet_pton(AF_INET6, text, &in6->sin6_addr) == 1) {
        in6->sin6_family = AF_INET6;
        return true;
    }
    return false;
}

static void
fill(const struct ifaddrs *entry, dm_netif *netif)
{
    memset(netif, 0, sizeof(*netif));
    snprintf(netif->name, sizeof(netif->name), "%s", entry->ifa_name);
    netif->address_size = size_of(entry->ifa_addr);
    memcpy(&netif->address, entry->ifa_addr, netif->address_size);
    const void *number =
        entry->ifa_addr->sa_family == AF_INET
            ? (const void *)&((struct sockaddr_in *)&netif->address)->sin_addr
            : (const void *)&((struct sockaddr_in6 *)&netif->address)->sin6_addr;
    inet_ntop(entry->ifa_addr->sa_family, number, netif->text, sizeof(netif->text));
    netif->loopback = dm_netif_is_loopback(entry->ifa_addr);
}

/* --- what the user listed ------------------------------------------------------ */

/* Whether the comma-separated list (without its '^') has the interface in it, by
 * name or by address. */
static bool
list_has(const char *list, const struct ifaddrs *entry)
{
    char word[INET6_ADDRSTRLEN + IF_NAMESIZE];
    const char *at = list;
    while (*at != '\0') {
        at += strspn(at, ", ");
        size_t length = strcspn(at, ", ");
        if (length > 0 && length < sizeof(word)) {
            memcpy(word, at, length);
            word[length] = '\0';
            struct sockaddr_storage address;
            if (strcmp(word, entry->ifa_name) == 0 ||
                (parse_address(word, &address) &&
                 same_address((struct sockaddr *)&address, entry->ifa_addr))) {
                return true;
            }
        }
        at += length;
    }
    return false;
}

/* The n-th word of the list decides before the next one does: a list is an order of
 * preference. */
static const struct ifaddrs *
find_first_listed(const char *list, const struct ifaddrs *all)
{
    const char *at = list;
    while (*at != '\0') {
        at += strspn(at, ", ");
        size_t length = strcspn(at, ", ");
        char word[INET6_ADDRSTRLEN + IF_NAMESIZE];
        if (length > 0 && length < sizeof(word)) {
            memcpy(word, at, length);
            word[length] = '\0';
            for (const struct ifaddrs *e = all; e != NULL; e = e->ifa_next) {
                if (is_usable(e) && list_has(word, e)) {
                    return e;
                }
            }
        }
        at += length;
    }
    return NULL;
}

/* Not in the list; an interface that others can reach before loopback. */
static const struct ifaddrs *
find_first_unlisted(const char *list, const struct ifaddrs *all)
{
    const struct ifaddrs *loopback = NULL;
    for (const struct ifaddrs *e = all; e != NULL; e = e->ifa_next) {
        if (!is_usable(e) || list_has(list, e)) {
            continue;
        }
        if (!dm_netif_is_loopback(e->ifa_addr)) {
            return e;
        }
        if (loopback == NULL) {
            loopback = e;
        }
    }
    return loopback;
}

/* "lo (127.0.0.1), eth0 (10.0.0.7)" */
static void
list_all(const struct ifaddrs *all, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (const struct ifaddrs *e = all; e != NULL && used < size; e = e->ifa_next) {
        if (!is_usable(e)) {
            continue;
        }
        dm_netif netif;
        fill(e, &netif);
        int n = snprintf(text + used, size - used, "%s%s (%s)", used > 0 ? ", " : "",
                         netif.name, netif.text);
        used += n > 0 ? (size_t)n : 0;
    }
    if (used == 0) {
        snprintf(text, size, "none");
    }
}

/* --- what MASTER_ADDR says ------------------------------------------------------ */

static const struct ifaddrs *
find_loopback(const struct ifaddrs *all)
{
    for (const struct ifaddrs *e = all; e != NULL; e = e->ifa_next) {
        if (is_usable(e) && dm_netif_is_loopback(e->ifa_addr)) {
            return e;
        }
    }
    return NULL;
}

/* The interface whose address the kernel would send from. A UDP connect sends
 * nothing. */
static const struct ifaddrs *
find_route(const struct sockaddr *master, const struct ifaddrs *all)
{
    struct sockaddr_storage address;
    memset(&address, 0, sizeof(address));
    memcpy(&address, master, size_of(master));
    if (master->sa_family == AF_INET) {
        ((struct sockaddr_in *)&address)->sin_port = htons(9);
    }
    else {
        ((struct sockaddr_in6 *)&address)->sin6_port = htons(9);
    }

    int fd = socket(master->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return NULL;
    }
    const struct ifaddrs *found = NULL;
    struct sockaddr_storage self;
    socklen_t self_size = sizeof(self);
    if (connect(fd, (struct sockaddr *)&address, size_of(master)) == 0 &&
        getsockname(fd, (struct sockaddr *)&self, &self_size) == 0) {
        for (const struct ifaddrs *e = all; e != NULL && found == NULL;
             e = e->ifa_next) {
            if (is_usable(e) && same_address((struct sockaddr *)&self, e->ifa_addr)) {
                found = e;
            }
        }
    }
    close(fd);
    return found;
}

static bool
resolve(const char *name, struct sockaddr_storage *address)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    if (getaddrinfo(name, NULL, &hints, &list) != 0) {
        return false;
    }
    bool found = false;
    for (struct addrinfo *e = list; e != NULL && !found; e = e->ai_next) {
        if (e->ai_family == AF_INET || e->ai_family == AF_INET6) {
            memset(address, 0, sizeof(*address));
            memcpy(address, e->ai_addr, e->ai_addrlen);
            found = true;
        }
    }
    freeaddrinfo(list);
    return found;
}

static const struct ifaddrs *
find_for_master(const char *master, const struct ifaddrs *all)
{
    if (master == NULL || master[0] == '\0' || strcmp(master, "localhost") == 0) {
        return find_loopback(all);
    }
    struct sockaddr_storage address;
    bool known = true;
    if (!parse_address(master, &address)) {
        /* A name that means loopback here (Debian's 127.0.1.1) means another address
         * on the other hosts: then loopback is the one wrong answer. */
        known = resolve(master, &address) &&
                !dm_netif_is_loopback((struct sockaddr *)&address);
    }
    const struct ifaddrs *found =
        known ? find_route((struct sockaddr *)&address, all) : NULL;
    return found != NULL ? found : find_first_unlisted("", all);
}

/* --- the choice ------------------------------------------------------------------ */

dm_status
dm_netif_choose(const dm_netif_wish *wish, dm_netif *netif, dm_error *err)
{
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) {
        return dm_error_set_errno(err, errno, "cannot list the network interfaces");
    }

    dm_status status = DM_OK;
    const struct ifaddrs *found;
    char there[512];
    if (wish->list != NULL && wish->list[0] != '\0') {
        found = wish->list[0] == '^' ? find_first_unlisted(wish->list + 1, all)
                                     : find_first_listed(wish->list, all);
        if (found == NULL) {
            list_all(all, there, sizeof(there));
            status = dm_error_set(err, DM_ERR_VALUE,
                                  "%s=%.128s matches no network interface that is up: "
                                  "there are %s",
                                  wish->variable, wish->list, there);
        }
    }
    else {
        found = find_for_master(wish->master, all);
        if (found == NULL) {
            list_all(all, there, sizeof(there));
            status = dm_error_set(err, DM_ERR_SYSTEM,
                                  "no network interface to use: there are %s", there);
        }
    }
    if (found != NULL) {
        fill(found, netif);
    }
    freeifaddrs(all);
    return status;
}

dm_status
dm_netif_from_environment(dm_netif *netif, dm_error *err)
{
    static const char *const variables[] = {"DEVICEMESH_SOCKET_IFNAME",
                                            "GLOO_SOCKET_IFNAME"};
    dm_netif_wish wish = {.master = getenv("MASTER_ADDR")};
    for (int i = 0; i < 2 && wish.list == NULL; i++) {
        const char *value = getenv(variables[i]);
        if (value != NULL && value[0] != '\0') {
            wish.variable = variables[i];
            wish.list = value;
        }
    }
    return dm_netif_choose(&wish, netif, err);
}
