/* The choice of a network interface, on whatever interfaces this machine has.
 *
 * sources: base backend/gloo/dm_netif.c
 */
#include "dm_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "backend/gloo/dm_netif.h"

static const char *const variable = "DEVICEMESH_SOCKET_IFNAME";

static dm_netif
choose(const char *list, const char *master)
{
    dm_error err = DM_ERROR_INIT;
    dm_netif_wish wish = {.variable = variable, .list = list, .master = master};
    dm_netif netif;
    CHECK_OK(dm_netif_choose(&wish, &netif, &err));
    CHECK(netif.name[0] != '\0' && netif.text[0] != '\0');
    CHECK(netif.loopback ==
          dm_netif_is_loopback((const struct sockaddr *)&netif.address));
    return netif;
}

static void
refused(const char *list, dm_error *error)
{
    dm_error err;
    dm_netif_wish wish = {.variable = variable, .list = list};
    dm_netif netif = {.name = "untouched"};
    CHECK_ERR(dm_netif_choose(&wish, &netif, &err), DM_ERR_VALUE);
    CHECK_STR(netif.name, "untouched");
    *error = err;
}

static void
loopback_addresses(void)
{
    struct sockaddr_in in = {.sin_family = AF_INET};
    inet_pton(AF_INET, "127.0.1.1", &in.sin_addr);
    CHECK(dm_netif_is_loopback((struct sockaddr *)&in));
    inet_pton(AF_INET, "128.0.0.1", &in.sin_addr);
    CHECK(!dm_netif_is_loopback((struct sockaddr *)&in));
    struct sockaddr_in6 in6 = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    CHECK(dm_netif_is_loopback((struct sockaddr *)&in6));
    in6.sin6_addr = in6addr_any;
    CHECK(!dm_netif_is_loopback((struct sockaddr *)&in6));
}

static void
nothing_said_is_loopback(void)
{
    CHECK(choose(NULL, NULL).loopback);
    CHECK(choose("", "").loopback);
    CHECK(choose(NULL, "localhost").loopback);
    CHECK(choose(NULL, "127.0.0.1").loopback);
}

static void
by_name_and_by_address(void)
{
    dm_netif lo = choose(NULL, NULL);
    CHECK_STR(choose(lo.name, "192.0.2.1").name, lo.name);
    CHECK_STR(choose(lo.text, NULL).name, lo.name);

    char list[128];
    snprintf(list, sizeof(list), "nosuch0, %s", lo.name);
    CHECK_STR(choose(list, NULL).name, lo.name);
    snprintf(list, sizeof(list), "%s,nosuch0", lo.text);
    CHECK_STR(choose(list, NULL).name, lo.name);
}

static void
exclusions(void)
{
    dm_netif lo = choose(NULL, NULL);
    CHECK_STR(choose("^nosuch0", NULL).text, choose(NULL, "nosuchhost.invalid").text);

    /* Without loopback: another interface, or an error where there is no other. */
    char list[64];
    snprintf(list, sizeof(list), "^%s", lo.name);
    dm_error err = DM_ERROR_INIT;
    dm_netif_wish wish = {.variable = variable, .list = list};
    dm_netif netif;
    if (dm_netif_choose(&wish, &netif, &err) == DM_OK) {
        CHECK(strcmp(netif.name, lo.name) != 0);
    }
    else {
        CHECK_CONTAINS(err.text, list);
    }
}

static void
unknown_ones_are_refused(void)
{
    dm_netif lo = choose(NULL, NULL);
    dm_error err;
    refused("nosuch0", &err);
    CHECK_CONTAINS(err.text, "DEVICEMESH_SOCKET_IFNAME=nosuch0");
    CHECK_CONTAINS(err.text, lo.name);
    CHECK_CONTAINS(err.text, lo.text);

    /* A prefix of a name is not the name. */
    char part[IF_NAMESIZE];
    snprintf(part, sizeof(part), "%.*s", (int)strlen(lo.name) - 1, lo.name);
    refused(part, &err);
    refused("192.0.2.77", &err);
    refused(",", &err);
    char much[2000];
    memset(much, 'x', sizeof(much) - 1);
    much[sizeof(much) - 1] = '\0';
    refused(much, &err);
}

/* A route to somewhere else leads over an interface that others can reach, where
 * there is one. */
static void
route_to_master(void)
{
    dm_netif other = choose("^", NULL);
    dm_netif routed = choose(NULL, "192.0.2.1");
    if (!other.loopback) {
        CHECK(!routed.loopback);
    }
}

static void
the_environment(void)
{
    dm_error err = DM_ERROR_INIT;
    dm_netif netif;
    unsetenv("MASTER_ADDR");
    unsetenv("DEVICEMESH_SOCKET_IFNAME");
    setenv("GLOO_SOCKET_IFNAME", "nosuch1", 1);
    CHECK_ERR(dm_netif_from_environment(&netif, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "GLOO_SOCKET_IFNAME=nosuch1");

    setenv("DEVICEMESH_SOCKET_IFNAME", "nosuch2", 1);
    CHECK_ERR(dm_netif_from_environment(&netif, &err), DM_ERR_VALUE);
    CHECK_CONTAINS(err.text, "DEVICEMESH_SOCKET_IFNAME=nosuch2");

    setenv("DEVICEMESH_SOCKET_IFNAME", "", 1);
    setenv("GLOO_SOCKET_IFNAME", choose(NULL, NULL).name, 1);
    CHECK_OK(dm_netif_from_environment(&netif, &err));
    CHECK(netif.loopback);

    unsetenv("GLOO_SOCKET_IFNAME");
    CHECK_OK(dm_netif_from_environment(&netif, &err));
    CHECK(netif.loopback);
}

TEST_MAIN(TEST(loopback_addresses), TEST(nothing_said_is_loopback),
          TEST(by_name_and_by_address), TEST(exclusions),
          TEST(unknown_ones_are_refused), TEST(route_to_master), TEST(the_environment))
